"""Devices of local blocks: the interface, and the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar, TypeAlias

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends import Backend, backend_for, backend_named, checksum
from dask_p2p.backends.allocator import keep_temporaries
from dask_p2p.backends.base import is_plain
from dask_p2p.backends.host import IdentityCache, copy_on_host
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.errors import InputError
from dask_p2p.geometry import Slices, box_slices
from dask_p2p.plans import Fill, Piece
from dask_p2p.sections.exchange.regions import (
    ExchangeCall,
    HaloMover,
    Packed,
    Reads,
    RegionExchange,
    begin_in_order,
    receive_layouts,
    send_layouts,
    text_of,
)
from dask_p2p.sections.wire.connection import Buffer
from dask_p2p.sections.wire.connections import ONE_RANK, Connections
from dask_p2p.types import Array, DType, DTypeLike, Kind


class Host:
    """The host: each method completes its work before it returns."""

    kind: ClassVar[Kind] = "numpy"
    has_ended = False  # True for a GPU that has stopped waiting for lost ranks

    @property
    def backend(self) -> Backend:
        return backend_named(self.kind)

    @property
    def module(self) -> Any:
        return self.backend.module

    def running(self, blocks: Sequence[Array]) -> AbstractContextManager[None]:
        """Return a context for a rank's work with its blocks. At its end the work is done."""
        return keep_temporaries()

    def zeros(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
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
        np.copyto(host_array, array)

    def copy_from_host(self, array: Array, host_array: Any) -> None:
        np.copyto(array, host_array)

    def assign(self, into: Array, array: Array) -> None:
        """Copy an array into another one of its shape, and of a dtype that keeps its values."""
        if array.nbytes >= tuning.current.first_touch_bytes and array.dtype == into.dtype:
            copy_on_host(into, array)
        else:
            into[...] = array

    def block(self, array: Array, dtype: DType) -> Array:
        """Return a copy of an array as an output block of the task."""
        block: Array = np.empty(array.shape, dtype)
        self.assign(block, array)
        return block

    def halo_mover(self, calls: Sequence[ExchangeCall], connections: Connections) -> HaloMover:
        """Return an object that exchanges packed halos with other ranks, of an array a call."""
        return HaloMessages(calls, connections)

    def region_mover(self, connections: Connections, reads_memory: bool) -> Any:
        """Return an object that exchanges regions of local blocks, as `RegionExchange` does."""
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
        sends, receives = (
            {
                r: Packed(layout, np.empty(layout.positions.size_bytes, np.uint8))
                for r, layout in layouts.items()
            }
            for layouts in (send_layouts(calls), receive_layouts(calls))
        )
        self._receives: dict[int, Buffer | None] = {
            rank: _bytes_of(packed) for rank, packed in receives.items()
        }
        of_ranks = {rank: _bytes_of(packed) for rank, packed in sends.items()}
        arguments = connections, calls[0].order, text_of(calls), of_ranks, self._receives
        self._begin = partial(begin_in_order, *arguments)
        self._outgoing, self._incoming = list(sends.values()), list(receives.values())
        buffers = [*map(_bytes_of, self._outgoing), *map(_bytes_of, self._incoming)]
        self._is_large = any(len(buffer) > _LARGE_BYTES for buffer in buffers)

    def begin(
        self,
        arrays: Sequence[Array],  # local blocks with their halos
        in_background: bool,  # whether the caller computes: large messages need a thread
    ) -> Callable[[], Any] | None:
        if self._connections.is_alone:
            return None
        for packed in self._outgoing:
            packed.pack(arrays)
        end = self._begin(in_background and self._is_large)

        def unpacked() -> None:
            end()
            for packed in self._incoming:
                packed.unpack(arrays)

        return unpacked

    def is_worth_hiding(self, elements: int, in_graph: bool) -> bool:
        is_on_other_host = self._connections.is_on_other_host
        is_large = elements >= tuning.current.overlap_elements and not in_graph
        return is_large and any(map(is_on_other_host, self._receives))


class WideHalos(HaloMover):
    """Exchanges halos in host memory that are too large for messages: ranks read them in place."""

    def __init__(
        self,
        calls: Sequence[ExchangeCall],
        connections: Connections,
        reads_memory: bool,  # whether ranks of one host may read each other's memory
    ) -> None:
        self._calls = [replace(call, mean_elements=tuning.current.read_bytes) for call in calls]
        self._regions = RegionExchange(connections, reads_memory)

    def begin(self, arrays: Sequence[Array], in_background: bool) -> None:
        for call, array in zip(self._calls, arrays, strict=True):
            sends, receives = call.exchange.sends, call.exchange.receives
            for number in range(max(map(len, (*sends.values(), *receives.values())), default=0)):
                regions, targets = (
                    {
                        rank: array[box_slices(boxes[number])]
                        for rank, boxes in side.items()
                        if number < len(boxes)
                    }
                    for side in (sends, receives)
                )
                self._regions.give(call, regions, targets)


def _bytes_of(packed: Packed) -> memoryview:
    buffer: Any = packed.buffer
    return memoryview(buffer)


# Arrays of one kind of memory that ranks lend each other, any number in one exchange.
#
# A rank that lends an array sends its descriptor. It does not change the array while `is_lent`.

#: The items of fills, and the indices of their regions.
_Filled: TypeAlias = Sequence[tuple[Slices, Array]]


class SourcePieces(tuple[Piece, ...]):
    """The pieces of one source of a block. Later exchanges use them again."""

    @cached_property
    def indices(self) -> Sequence[tuple[Slices, Slices]]:
        return [(box_slices(src), box_slices(dst)) for _, src, dst in self]


class Lending:
    """Arrays in host memory that ranks lend each other. `GpuLending` has those of GPUs.

    An exchange consists of `begin`, descriptors in messages to other ranks, `received` when their
    messages are here, reads of the arrays that others have described, and `end`.
    """

    backend: Backend = NUMPY  # of the arrays
    #: Whether arrays are lent as a whole, since others read any regions of them.
    lends_whole: ClassVar[bool] = False

    def __init__(
        self,
        connections: Connections = ONE_RANK,
        reads: Reads | None = None,  # of other ranks' memory; None: all arrays are sent
    ) -> None:
        self._connections, self._reads = connections, reads
        self._fills = IdentityCache[_Filled]()

    def holds(self, value: Any) -> bool:
        """Return whether a value is a plain array in this memory, without Python objects."""
        return type(value) is np.ndarray and not value.dtype.hasobject

    def copy_pieces(
        self, into: Array, array: Array, pieces: SourcePieces, axes: Sequence[int]
    ) -> None:
        """Copy pieces of an array with its axes permuted, before `flush` returns."""
        for src, at in pieces.indices:
            NUMPY.permute_into(into[at], array[src], axes)

    def fill(self, into: Array, fills: Sequence[Fill]) -> None:
        """Set regions of an array, before `flush` returns."""
        dtype = into.dtype
        for index, item in self._fills.get(fills, dtype, lambda: _filled(fills, dtype)):
            into[index] = item

    def flush(self) -> None:
        """Do all copies, or enqueue them on the rank's stream."""

    def is_lent(self, array: Array) -> bool:
        """Return whether other ranks may still be reading the memory of an array."""
        return False  # `end` has waited

    def begin(self, ranks: Collection[int]) -> None:
        """Begin an exchange of arrays that are made by now, with messages to these ranks."""

    def received(self, ranks: Collection[int]) -> None:
        """Take note of messages from ranks: they have read all that earlier exchanges lent them."""

    def lent_bytes(self, rank: int, size_bytes: int) -> Array | None:
        """Return memory for packed arrays, which a rank reads; None: they are sent."""
        if (
            self._reads is None
            or size_bytes < tuning.current.read_bytes
            or not self._reads.is_read_by(rank)
        ):
            return None
        memory: Array = NUMPY.allocate(size_bytes)
        return memory

    def read_bytes(self, rank: int, address: int, start: int, size_bytes: int) -> memoryview:
        """Return bytes of packed arrays from the memory of another rank, at a position."""
        assert self._reads is not None, "addresses are only sent to ranks that read memory"
        memory = NUMPY.allocate(size_bytes)
        self._reads.read_bytes(rank, address + start, memory)
        self._connections.count(rank, size_bytes)
        return memoryview(memory)

    def descriptor(self, rank: int, array: Array) -> bytes | None:
        """Return the descriptor of an array for a rank; None if its bytes have to be sent."""
        if self._reads is None or array.nbytes < tuning.current.lent_read_bytes:
            return None
        descriptor = self._reads.descriptor_for(rank, array)
        return descriptor if descriptor is not None and any(descriptor) else None

    def read(
        self, rank: int, descriptor: bytes, shape: Sequence[int], into: Array, axes: Sequence[int]
    ) -> None:
        """Read an array of another rank into memory here, with its axes permuted."""
        assert self._reads is not None, "descriptors are only sent to ranks that read memory"
        region = self._reads.read(rank, descriptor, shape, into, axes, NUMPY.allocate)
        self._connections.count(rank, into.nbytes)
        if region is not None:
            NUMPY.permute_into(into, region, axes)

    def read_pieces(
        self, rank: int, descriptor: bytes, into: Array, pieces: SourcePieces, axes: Sequence[int]
    ) -> None:
        """Read pieces of an array that is lent as a whole: see `lends_whole`."""
        raise NotImplementedError

    def end(self, text: str, readers: Collection[int], read: Collection[int]) -> None:
        """End an exchange: all reads are done, or enqueued on the rank's stream.

        `readers` are the ranks with descriptors of this one, `read` those whose arrays it has read.
        """
        if readers or read:
            receives = {rank: bytearray() for rank in readers}
            self._connections.exchange(f"{text}, read", dict.fromkeys(read, b""), {**receives})

    def place(self, into: Array, array: Any, axes: Sequence[int]) -> None:
        """Put an array of host memory, from a message, into memory here, with its axes permuted."""
        NUMPY.permute_into(into, array, axes)


def _filled(fills: Sequence[Fill], dtype: DType) -> _Filled:
    return [(box_slices(box), np.full((), item, dtype)) for box, item in fills]


HOST_ARRAYS = Lending()  # of a rank alone
