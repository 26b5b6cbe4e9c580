"""Memory for states. Members of one host share it, and so copy a state once for two workers.

A member copies its state into a memory of the kernel that has no name, and its buddy opens that,
once. When the member is killed, its buddy still has it. Where the buddy cannot open it, as on
another host, the member sends the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from dask_p2p.errors import InputError, UnsuitableError
from dask_p2p.interprocess.segments import Segment, SegmentName
from dask_p2p.sections.devices import HOST, Host, check_not_masked
from dask_p2p.types import Array

_IS_SEEN, _IS_SENT = b"\1", b"\0"
SAME, CHANGED, EMPTY = range(3)


class StateMemory:
    """Memory for one state of a member, and for one of each member whose buddy it is."""

    def __init__(self) -> None:
        self.own: memoryview | None = None  # for the member's state, once it is made
        self.theirs: dict[int, memoryview] = {}  # for those of the others, by rank
        self.is_seen = False  # whether the buddy sees what is written into `own`
        self._seen: set[int] = set()  # others whose memory this is
        self._segment: Segment | None = None  # until the buddy has looked for it

    def make(self, size_bytes: int, has_buddy: bool) -> bytes:
        """Make `own` anew; return what `take` needs to be told at the buddy."""
        self.own, self.is_seen = None, False  # it goes before another one comes
        if has_buddy and size_bytes:
            with suppress(OSError):  # no memory of that kind, or no open file is left
                self._segment = segment = Segment.make(size_bytes)
                self.own = _view(segment.bytes)
                return " ".join(map(str, (size_bytes, *segment.name))).encode()
        self.own = _view(np.empty(size_bytes, np.uint8))
        return str(size_bytes).encode()

    def take(self, rank: int, told: bytes) -> bytes:
        """Have memory for another member's state; return what `know` needs to be told there."""
        size, *name = told.decode().split()
        self.theirs.pop(rank, None)
        self._seen.discard(rank)
        if name:
            kernel, namespace, *numbers = name
            with suppress(UnsuitableError, OSError):  # another host, or one that must not look
                segment = Segment.open(SegmentName(kernel, namespace, *map(int, numbers)))
                self.theirs[rank] = _view(segment.bytes)
                self._seen.add(rank)
                return _IS_SEEN
        self.theirs[rank] = _view(np.empty(int(size), np.uint8))
        return _IS_SENT

    def know(self, told: bytes) -> None:
        """Take note of whether the buddy sees `own`."""
        self.is_seen, self._segment = told == _IS_SEEN, None

    def places(self) -> dict[int, memoryview]:
        """Return where the bytes go that others send, by rank: none of those whose are seen."""
        nothing = memoryview(b"")
        return {rank: nothing if rank in self._seen else to for rank, to in self.theirs.items()}


def check_state(arrays: Sequence[Any], device: Host = HOST) -> None:
    """Refuse what no state can be copied from, and back into.

    `InputError` if it is no array of the device, holds Python objects, or cannot be written;
    `UnsupportedArrayError` if it is masked.
    """
    for array in arrays:
        check_not_masked("the state to save", array)
        if not isinstance(array, device.module.ndarray):
            found = type(array).__name__
        elif array.dtype.hasobject:
            found = "one of Python objects"
        elif not getattr(array.flags, "writeable", True):  # CuPy's always are
            found = "one that is read-only"
        else:
            continue
        raise InputError(
            f"expected {device.module.__name__} arrays as the state to save, which can be filled "
            f"again, got {found}. Give a list of arrays; keep a number in one of its own."
        )


def size_of(arrays: Sequence[Array]) -> int:
    """Return how many bytes the state takes that these arrays are."""
    return sum(array.nbytes for array in arrays)


def copied_into(state: memoryview, arrays: Sequence[Array], device: Host = HOST) -> None:
    """Copy arrays of a device to where a state is, one after the other."""
    for array, place in zip(arrays, _places(state, arrays), strict=True):
        device.copy_to_host(place, array)


def copied_from(state: memoryview, arrays: Sequence[Array], device: Host = HOST) -> None:
    """Copy a state to where arrays of a device are."""
    for array, place in zip(arrays, _places(state, arrays), strict=True):
        device.copy_from_host(array, place)


def changes(state: memoryview, arrays: Sequence[Array], device: Host = HOST) -> bytes:
    """Return for each array whether a state has other bytes: `SAME`, `CHANGED` or `EMPTY`."""
    found = []
    for array, place in zip(arrays, _places(state, arrays), strict=True):
        own = np.empty(array.shape, array.dtype)
        device.copy_to_host(own, array)
        is_same = own.tobytes() == place.tobytes()
        found.append(EMPTY if not own.size else SAME if is_same else CHANGED)
    return bytes(found)


def _view(array: Any) -> memoryview:
    return memoryview(array)


def _places(state: memoryview, arrays: Sequence[Any]) -> list[Array]:
    places, start = [], 0
    for array in arrays:
        place: Array = np.ndarray(array.shape, array.dtype, state, start)
        places.append(place)
        start += array.nbytes
    return places
