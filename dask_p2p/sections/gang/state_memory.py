"""Memory for states, shared on one host: one copy of a state serves two workers.

A rank copies its state into an anonymous memory file, which its replica rank opens once. If the
rank is killed, its replica rank still has the memory. Where the replica rank cannot open it, as on
another host, the rank sends the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np

from dask_p2p.backends.plain import check_plain
from dask_p2p.errors import InputError, UnsuitableError
from dask_p2p.geometry import Layout
from dask_p2p.interprocess.segments import Segment, SegmentName
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.types import Array, DType

_IS_SEEN, _IS_SENT = b"\1", b"\0"
SAME, CHANGED, EMPTY, OUTSIDE = range(4)


class StateMemory:
    """Memory for one state of a rank, and for one state of each rank that it guards."""

    def __init__(self) -> None:
        self.own: memoryview | None = None  # memory for this rank's state
        self.theirs: dict[int, memoryview] = {}  # memory for guarded ranks' states, by rank
        self.is_seen = False  # whether the replica rank shares `own`
        self._seen: set[int] = set()  # guarded ranks whose own memory is shared here
        self._segment: Segment | None = None  # kept until the replica rank has opened it

    def make(self, size_bytes: int, has_replica: bool) -> bytes:
        """Allocate `own`; return its descriptor for `take` on the replica rank."""
        self.own, self.is_seen = None, False  # free the old memory first
        if has_replica and size_bytes:
            with suppress(OSError):  # no shared memory, or too many open files
                self._segment = segment = Segment.make(size_bytes)
                self.own = _view(segment.bytes)
                return " ".join(map(str, (size_bytes, *segment.name))).encode()
        self.own = _view(np.empty(size_bytes, np.uint8))
        return str(size_bytes).encode()

    def take(self, rank: int, message: bytes) -> bytes:
        """Open or allocate memory for a guarded rank's state; return the reply to that rank."""
        size, *name = message.decode().split()
        self.theirs.pop(rank, None)
        self._seen.discard(rank)
        if name:
            kernel, namespace, *numbers = name
            with suppress(UnsuitableError, OSError):  # another host, or no permission
                segment = Segment.open(SegmentName(kernel, namespace, *map(int, numbers)))
                self.theirs[rank] = _view(segment.bytes)
                self._seen.add(rank)
                return _IS_SEEN
        self.theirs[rank] = _view(np.empty(int(size), np.uint8))
        return _IS_SENT

    def record_reply(self, message: bytes) -> None:
        """Record the replica rank's reply: whether it shares `own`."""
        self.is_seen, self._segment = message == _IS_SEEN, None

    def receive_buffers(self) -> dict[int, memoryview]:
        """Return receive buffers for guarded ranks' states, by rank: empty where shared."""
        nothing = memoryview(b"")
        return {rank: nothing if rank in self._seen else to for rank, to in self.theirs.items()}


def check_state(arrays: Sequence[Any], device: Host = HOST) -> None:
    """Check that arrays can be saved and restored.

    Raises `InputError` for a value that is not an array of the device, has Python objects, or is
    read-only. Raises `UnsupportedArrayError` for a masked array.
    """
    for array in arrays:
        check_plain("the state to save", array)
        if not isinstance(array, device.module.ndarray):
            found = type(array).__name__
        elif array.dtype.hasobject:
            found = "one of Python objects"
        elif not getattr(array.flags, "writeable", True):  # CuPy arrays always are writable
            found = "one that is read-only"
        else:
            continue
        raise InputError(
            f"expected {device.module.__name__} arrays as the state to save, all of them writable, "
            f"got {found}. Give a list of arrays; put a number into an array of its own."
        )


def size_of(arrays: Sequence[Array]) -> int:
    """Return the size of the state of these arrays, in bytes."""
    return sum(array.nbytes for array in arrays)


def copied_into(state: memoryview, arrays: Sequence[Array], device: Host = HOST) -> None:
    """Copy arrays of a device into a state, one after the other."""
    host = host_arrays(state, [(array.dtype, array.shape) for array in arrays])
    for array, host_array in zip(arrays, host, strict=True):
        device.copy_to_host(host_array, array)


def _view(array: Any) -> memoryview:
    return memoryview(array)


def host_arrays(state: memoryview, specs: Sequence[tuple[DType, tuple[int, ...]]]) -> list[Array]:
    """Return the arrays in a state, as views, by their dtypes and shapes."""
    starts = Layout((dtype.itemsize * prod(shape),) for dtype, shape in specs).starts
    return [
        np.ndarray(shape, dtype, state, start)
        for (dtype, shape), start in zip(specs, starts, strict=True)
    ]
