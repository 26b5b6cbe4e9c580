"""Devices of local blocks: the interface, and the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends import Backend, backend_for, backend_named, checksum
from dask_p2p.backends.base import is_plain
from dask_p2p.backends.host_memory import temporaries_kept
from dask_p2p.errors import InputError
from dask_p2p.sections.exchange.lending import Lending
from dask_p2p.sections.exchange.regions import (
    ExchangeCall,
    HaloMover,
    Packed,
    RegionExchange,
    RegionMover,
    begin_in_order,
    receive_layouts,
    send_layouts,
    text_of,
)
from dask_p2p.sections.wire.connection import Buffer
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array, DType, DTypeLike, Kind


class Host:
    """The host: each method completes its work before it returns."""

    kind: ClassVar[Kind] = "numpy"
    has_ended = False  # True for a GPU that has stopped waiting for lost ranks

    @property
    def backend(self) -> Backend:
        """The arrays' backend."""
        return backend_named(self.kind)

    @property
    def module(self) -> Any:
        """The arrays' package."""
        return self.backend.module

    def running(self, blocks: Sequence[Array]) -> AbstractContextManager[None]:
        """Return a context for a rank's work with its blocks. At its end the work is done."""
        return temporaries_kept()

    def zeros(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """Return an array of zeros."""
        return self.module.zeros(tuple(shape), dtype)

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """Return an array with unset values."""
        return self.backend.empty(shape, dtype)

    has_read_only: ClassVar[bool] = True  # True if arrays can refuse writes

    def read_only(self, array: Array) -> Array:
        """Return a read-only view if `has_read_only`, else the array."""
        view: Array = array.view()
        view.flags.writeable = False
        return view

    def checksum(self, array: Array) -> int:
        """Return the checksum of an array's bytes, once they are computed."""
        return checksum(array)

    def as_array(self, value: Any) -> Any:
        """Return a user's value as an array, if this device converts such values."""
        return np.asanyarray(value) if is_plain(value) else value  # refused later

    def holds(self, value: Any) -> bool:
        """Return whether a value is an array whose work is on this device's stream."""
        return False

    def to_host(self, value: Any) -> Any:
        """Return an array of this device as a NumPy array, and any other value unchanged."""
        return value

    def from_host(self, array: Any, like: Any) -> Any:
        """Return a NumPy array with dimensions as an array of this device, if `like` is one."""
        return array

    def copy_to_host(self, host_array: Any, array: Array) -> None:
        """Copy an array into host memory."""
        np.copyto(host_array, array)

    def copy_from_host(self, array: Array, host_array: Any) -> None:
        """Copy host memory into an array."""
        np.copyto(array, host_array)

    def assign(self, into: Array, array: Array) -> None:
        """Copy an array into another one of its shape, and of a dtype that keeps its values."""
        into[...] = array

    def block(self, array: Array, dtype: DType) -> Array:
        """Return a copy of an array as an output block of the task."""
        made: Array = np.array(array, dtype)
        return made

    def halo_mover(self, calls: Sequence[ExchangeCall], connections: Connections) -> HaloMover:
        """Return an object that exchanges packed halos with other ranks, of an array a call."""
        return HaloMessages(calls, connections)

    def region_mover(self, connections: Connections, reads_memory: bool) -> RegionMover:
        """Return an object that exchanges regions of local blocks with other ranks."""
        return RegionExchange(connections, reads_memory)

    def lending(self, connections: Connections) -> Lending | None:
        """Return the device's arrays, which ranks lend each other; None for those of the host.

        A collective call of all ranks.
        """
        return None

    def keep_up(self, step: int) -> None:
        """Limit the lead of the host over the device; `step` counts the steps enqueued."""

    def let_go(self, is_orderly: bool) -> None:
        """Release memory that other ranks read. After an `is_orderly` end none still reads it."""


HOST = Host()


def check_kind(device: Host, name: str, array: Any) -> None:
    """Refuse an array that is not a plain array of a device.

    Raises `UnsupportedArrayError` if the array is of an unknown kind or more than its bytes, and
    `InputError` if it is of another kind.
    """
    kind = backend_for(array).name
    if kind != device.kind:
        module = device.module.__name__
        raise InputError(
            f"{name}: expected an array of {module}, like the section's, got one of {kind}. "
            f"Convert it: {'cupy.asarray' if module == 'cupy' else 'cupy.asnumpy'}({name})."
        )


_LARGE_BYTES = 1 << 16  # size of a message between hosts that a socket may not accept in one call


class HaloMessages(HaloMover):
    """Exchanges halos in host memory, in one packed message a neighbour."""

    def __init__(self, calls: Sequence[ExchangeCall], connections: Connections) -> None:
        self._connections = connections
        self._text, self._order = text_of(calls), calls[0].order
        sends, receives = (
            {r: Packed(layout, np.empty(layout.size_bytes, np.uint8)) for r, layout in of.items()}
            for of in (send_layouts(calls), receive_layouts(calls))
        )
        self._receives: dict[int, Buffer | None] = {
            rank: _bytes_of(packed) for rank, packed in receives.items()
        }
        self._sends = {rank: _bytes_of(packed) for rank, packed in sends.items()}
        self._outgoing, self._incoming = list(sends.values()), list(receives.values())
        buffers = [*map(_bytes_of, self._outgoing), *map(_bytes_of, self._incoming)]
        self._is_large = any(len(each) > _LARGE_BYTES for each in buffers)

    def begin(
        self,
        arrays: Sequence[Array],  # local blocks with their halos
        in_background: bool,  # whether the caller computes: large messages need a thread
    ) -> Callable[[], Any] | None:
        """Begin an exchange; return a function that completes it and unpacks the halos."""
        connections = self._connections
        if connections.is_alone:
            return None
        for packed in self._outgoing:
            packed.pack(arrays)
        in_background = in_background and self._is_large
        order, text = self._order, self._text
        end = begin_in_order(connections, order, text, self._sends, self._receives, in_background)

        def unpacked() -> None:
            end()
            for packed in self._incoming:
                packed.unpack(arrays)

        return unpacked

    def is_worth_hiding(self, elements: int, in_graph: bool) -> bool:
        """Return whether local blocks of this size should be computed during the exchange."""
        is_on_other_host = self._connections.is_on_other_host
        is_large = elements >= tuning.current.overlap_elements and not in_graph
        return is_large and any(map(is_on_other_host, self._receives))


def _bytes_of(packed: Packed) -> memoryview:
    whole: Any = packed.whole
    return memoryview(whole)
