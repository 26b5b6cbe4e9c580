"""Regions of local blocks in host memory: sent in messages, or read in place by other ranks.

A region that is read in place is copied once, and never packed. Its holder sends the address, the
readers copy the region and acknowledge. Until then the holder does not change it. If the holder is
killed, a reader may copy arbitrary bytes. They are dropped with the attempt, because the connection
fails as well.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.geometry import Box, Layout, box_shape, box_size, box_slices
from dask_p2p.inputs import checked_choice
from dask_p2p.plans.ranks import ORDERS, Exchange, schedule_partners
from dask_p2p.sections.wire.connection import AttemptEndedError, Buffer
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.transports import process_memory
from dask_p2p.types import Array, DType

# Exchanges as collective calls, and the interfaces of the objects that move their data. Halos have
# movers of their own: see "Deliberate duplication" in docs/design.md.


@dataclass(frozen=True)
class ExchangeCall:
    """An exchange between local blocks, a collective call of all ranks."""

    text: str  # text of the call, the same on all ranks
    dtype: DType  # data type of the local blocks
    exchange: Exchange  # this rank's part
    order: str = "auto"  # schedule of the messages: one of `dask_p2p.plans.ranks.ORDERS`
    #: Mean number of elements from one rank to another. 0 for halos: they always use messages.
    mean_elements: int = 0
    #: Upper bound of the number of elements from one rank to another, the same on all ranks. 0 if
    #: it is unknown.
    most_elements: int = 0

    def in_turn(self, connections: Connections, sources: Collection[int]) -> list[int]:
        order = "diagonal" if self.order == "auto" else self.order
        in_turn = (stage.source for stage in schedule_partners(order, *connections.rank_and_size))
        return [rank for rank in in_turn if rank is not None and rank in sources]


class HaloMover(ABC):
    """Exchanges packed halos with other ranks, repeatedly: of one local block, or of several."""

    #: Number of exchanges so far, if the mover needs it. Only those not made may be taken back.
    count = 0

    @abstractmethod
    def begin(
        self,
        arrays: Sequence[Array],  # local blocks with their halos
        in_background: bool,  # whether the caller computes during the exchange
    ) -> Callable[[], Any] | None:
        """Begin an exchange; return a function that completes it, or None if it is complete."""

    def is_worth_hiding(self, elements: int, in_graph: bool) -> bool:
        """Return whether local blocks of this size should be computed during the exchange.

        `in_graph` is true for exchanges of a CUDA graph, by `enqueue`.
        """
        return False

    def can_enqueue(self) -> bool:
        """Return whether `enqueue` can be used, after the first exchange, and prepare it."""
        return False

    def enqueue(self, arrays: Sequence[Array]) -> None:
        """Enqueue a whole exchange on the GPU's stream, without any work of the host."""
        raise NotImplementedError


class RegionExchange:
    """Exchanges regions of local blocks in host memory between ranks: one box a rank."""

    def __init__(
        self,
        connections: Connections,  # connections to other ranks
        reads_memory: bool,  # whether ranks of one host may read each other's memory
    ) -> None:
        self._connections = connections
        self.reads = Reads(connections, reads_memory and not connections.is_alone)
        # Buffers for regions that are not contiguous.
        self._packed, self._arriving = _Memory(), _Memory()

    def bring(self, call: ExchangeCall, source: Array, target: Array) -> None:
        """Exchange regions of local blocks; the source must not change until `settle`."""
        plan = call.exchange
        self.give(call, regions_of(source, plan.sends), regions_of(target, plan.receives))
        for src, dst in plan.local:
            NUMPY.permute_into(target[box_slices(dst)], source[box_slices(src)], plan.axes)

    def settle(self) -> None:
        """Wait until no rank reads the local blocks of previous exchanges: `bring` has waited."""

    def give(
        self, call: ExchangeCall, regions: Mapping[int, Array], targets: Mapping[int, Array]
    ) -> None:
        if self._connections.is_alone:
            return
        readers, read = set[int](), set[int]()
        if call.mean_elements * call.dtype.itemsize >= tuning.current.read_bytes:
            readers, read = self._read(call, regions, targets)
        sent = {rank: region for rank, region in regions.items() if rank not in readers}
        sends: dict[int, Buffer] = dict.fromkeys(read, b"")  # acknowledgements, by holder
        sends |= {rank: _bytes_of(region) for rank, region in self._in_one_piece(sent, call.dtype)}
        targets = {rank: target for rank, target in targets.items() if rank not in read}
        in_place = call.exchange.axes == tuple(sorted(call.exchange.axes))
        direct = {r for r, target in targets.items() if in_place and target.flags.c_contiguous}
        message_ranks = [rank for rank in targets if rank not in direct]
        shapes = [call.exchange.shape_before(targets[rank].shape) for rank in message_ranks]
        arriving = dict(zip(message_ranks, self._arriving.arrays(shapes, call.dtype), strict=True))
        receives: dict[int, Buffer | None] = {rank: bytearray() for rank in readers}
        receives |= {r: _bytes_of(arriving.get(r, target)) for r, target in targets.items()}
        begin_in_order(self._connections, call.order, call.text, sends, receives)()
        for rank in message_ranks:
            NUMPY.permute_into(targets[rank], arriving[rank], call.exchange.axes)

    def _in_one_piece(
        self, regions: Mapping[int, Array], dtype: DType
    ) -> Iterator[tuple[int, Array]]:
        scattered = [rank for rank, region in regions.items() if not region.flags.c_contiguous]
        shapes = [regions[rank].shape for rank in scattered]
        packed = dict(zip(scattered, self._packed.arrays(shapes, dtype), strict=True))
        for rank, region in regions.items():
            if rank in packed:
                NUMPY.permute_into(packed[rank], region, range(region.ndim))
            yield rank, packed.get(rank, region)

    def _read(
        self, call: ExchangeCall, regions: Mapping[int, Array], targets: Mapping[int, Array]
    ) -> tuple[set[int], set[int]]:
        connections, reads = self._connections, self.reads
        reads.try_all()
        described = {rank: reads.descriptor_for(rank, region) for rank, region in regions.items()}
        descriptors = {
            rank: descriptor for rank, descriptor in described.items() if descriptor is not None
        }
        axes = call.exchange.axes
        length = descriptor_bytes(len(axes))
        receives = {rank: bytearray(length) for rank in targets if reads.reads_from(rank)}
        received = connections.exchange(f"{call.text}, descriptors", descriptors, dict(receives))
        read = {rank: descriptor for rank, descriptor in received.items() if any(descriptor)}

        def arriving_bytes(size_bytes: int) -> Array:
            return self._arriving.arrays([(size_bytes,)], np.dtype(np.uint8))[0]

        for rank in call.in_turn(connections, read):
            target = targets[rank]
            shape = call.exchange.shape_before(target.shape)
            region = reads.read(rank, read[rank], shape, target, axes, arriving_bytes)
            connections.count(rank, target.nbytes)
            if region is not None:
                NUMPY.permute_into(target, region, axes)
        return {rank for rank, descriptor in descriptors.items() if any(descriptor)}, {*read}


def regions_of(array: Array, boxes: Mapping[int, Sequence[Box]]) -> dict[int, Array]:
    """Return the only region of each rank."""
    return {rank: array[box_slices(box)] for rank, (box,) in boxes.items()}


def descriptor_bytes(ndim: int) -> int:
    """Return the size of the message with a region's address and strides."""
    return 8 * (1 + ndim)


class Reads:
    """Reads of other ranks' memory on one host."""

    def __init__(
        self,
        connections: Connections,
        is_allowed: bool,  # whether this rank reads others' memory, and offers its own
    ) -> None:
        self._connections, (self._rank, _) = connections, connections.rank_and_size
        self._is_allowed = is_allowed and process_memory.is_supported()
        self._pids: list[int] = []  # by rank, after the probe; 0: this rank cannot read it
        self._readers: Any = None  # by holder and reader: whether the reader can read

    def try_all(self) -> None:
        """Probe, once, which ranks can read which. A collective call of all ranks."""
        if self._readers is not None:
            return
        nothing = bytes(process_memory.PROOF_BYTES)
        proof = process_memory.own_proof() if self._is_allowed else nothing
        proofs = self._connections.gather("probe of memory reads", proof)
        self._pids = [0] * len(proofs)
        for rank, its_proof in enumerate(proofs):
            is_near = rank != self._rank and not self._connections.is_on_other_host(rank)
            if is_near and self._is_allowed:
                self._pids[rank] = process_memory.readable_pid(bytes(its_proof))
        row = bytes(map(bool, self._pids))
        rows = self._connections.gather("results of the probe of memory reads", row)
        self._readers = np.array([np.frombuffer(row, bool) for row in rows]).T

    def reads_from(self, holder: int) -> bool:
        return bool(self._readers[holder, self._rank])

    def is_read_by(self, reader: int) -> bool:
        return bool(self._readers[self._rank, reader])

    def descriptor_for(self, reader: int, region: Array) -> bytes | None:
        """Return a region's address and strides for a reader; None if it cannot read here.

        All bytes are zero if the region's rows are too short: it is sent in a message then.
        """
        if not self.is_read_by(reader):
            return None
        shape, strides = region.shape, region.strides
        run_bytes = process_memory.run_bytes_of(shape, strides, region.itemsize)
        if run_bytes < tuning.current.read_run_bytes:
            return bytes(descriptor_bytes(region.ndim))
        return struct.pack(f"<Q{region.ndim}q", region.ctypes.data, *strides)

    def read(
        self,
        holder: int,  # rank of the holder
        descriptor: Any,  # address and strides there
        shape: Sequence[int],
        into: Array,  # destination
        axes: Sequence[int],  # axis i of the destination is axis axes[i] of the region
        memory_of: Callable[[int], Any],  # returns a buffer of a size, if one is needed
    ) -> Array | None:
        """Read a region into its destination. If that needs a copy, return the region instead."""
        address, *strides = struct.unpack(f"<Q{len(shape)}q", descriptor)
        layout = tuple(shape), tuple(strides), into.dtype
        remote = process_memory.RemoteArray(self._pids[holder], address, *layout)
        try:
            region: Array = remote.read(into if list(axes) == sorted(axes) else None, memory_of)
        except (OSError, OverflowError) as exc:
            raise AttemptEndedError(f"memory of rank {holder} cannot be read: {exc}") from exc
        return None if region is into else region

    def read_bytes(self, holder: int, address: int, into: Array) -> None:
        descriptor = struct.pack("<Qq", address, 1)
        self.read(holder, descriptor, into.shape, into, (0,), NUMPY.allocate)


class _Memory:
    """Reused buffer that grows to the largest exchange."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def arrays(self, shapes: Sequence[tuple[int, ...]], dtype: DType) -> list[Array]:
        layout = Layout(shapes, dtype.itemsize)
        if self._bytes.nbytes < layout.size_bytes:
            self._bytes = np.empty(layout.size_bytes, np.uint8)
        return layout.views(self._bytes, dtype)


def _bytes_of(region: Array) -> Buffer:
    flat = region.reshape(-1)
    return memoryview(flat.view(np.uint8)) if region.nbytes else bytearray()


def checked_order(exchange: Any) -> str:
    """Return an order of messages. Raises `InputError` if it does not exist."""
    return checked_choice("exchange", exchange, ORDERS)


def begin_in_order(
    connections: Connections,  # connections of this rank
    order: str,  # one of `ORDERS`
    call: str,  # see `Connections.begin`
    sends: Mapping[int, Buffer],
    receives: Mapping[int, Buffer | None],
    in_background: bool = False,
) -> Callable[[], Any]:
    """Begin an exchange like `Connections.begin`. All stages but the last complete in this call."""
    if order == "auto":
        return connections.begin(call, sends, receives, in_background)
    end: Callable[[], Any] = dict
    for to, source in schedule_partners(order, *connections.rank_and_size):
        end = connections.begin(
            f"{call}, {order}",
            {rank: data for rank, data in sends.items() if rank == to},
            {rank: into for rank, into in receives.items() if rank == source},
            in_background,
        )
    return end


_MOST_ALIGNMENT_BYTES = 16  # of elements: that of complex numbers on GPUs
_MOST_CHARACTERS = 200  # of the text of a call: longer ones end with a digest


@dataclass(frozen=True)
class PackedLayout:
    """The positions of the regions of one or several arrays in one buffer."""

    boxes: Sequence[Sequence[Box]]  # by array: its regions
    dtypes: Sequence[DType]  # by array

    @cached_property
    def positions(self) -> Layout:
        sizes = zip(self.boxes, self.dtypes, strict=True)
        parts = [(sum(map(box_size, boxes)) * dtype.itemsize,) for boxes, dtype in sizes]
        largest = max(dtype.itemsize for dtype in self.dtypes)
        return Layout(parts, alignment=min(1 << (largest - 1).bit_length(), _MOST_ALIGNMENT_BYTES))

    def regions(self, buffer: Array) -> Iterator[tuple[int, Any, Array]]:
        """Yield each region: number of its array, slices in it, and a view of the buffer."""
        for number, (boxes, dtype) in enumerate(zip(self.boxes, self.dtypes, strict=True)):
            part = self.positions.view(buffer, number, np.uint8).view(dtype)
            views = Layout(map(box_shape, boxes)).views(part, dtype)
            for box, view in zip(boxes, views, strict=True):
                yield number, box_slices(box), view


class Packed:
    """A buffer with packed regions."""

    def __init__(
        self,
        layout: PackedLayout,  # positions of the regions
        buffer: Array,  # one-dimensional buffer of bytes
    ) -> None:
        self.layout, self.buffer = layout, buffer
        self._regions = [*layout.regions(buffer)]

    def pack(self, arrays: Sequence[Array]) -> None:
        for number, index, region in self._regions:
            region[...] = arrays[number][index]

    def unpack(self, arrays: Sequence[Array]) -> None:
        for number, index, region in self._regions:
            arrays[number][index] = region


def send_layouts(calls: Sequence[ExchangeCall]) -> dict[int, PackedLayout]:
    """Return the layout of the message to each receiver, with the regions of all calls."""
    return _layouts(calls, [call.exchange.sends for call in calls])


def receive_layouts(calls: Sequence[ExchangeCall]) -> dict[int, PackedLayout]:
    """Return the layout of the message from each sender, with the regions of all calls."""
    return _layouts(calls, [call.exchange.receives for call in calls])


def _layouts(
    calls: Sequence[ExchangeCall], boxes: Sequence[Mapping[int, Sequence[Box]]]
) -> dict[int, PackedLayout]:
    dtypes = [call.dtype for call in calls]
    ranks = dict.fromkeys(rank for rank_boxes in boxes for rank in rank_boxes)
    return {
        rank: PackedLayout([rank_boxes.get(rank, []) for rank_boxes in boxes], dtypes)
        for rank in ranks
    }


def text_of(calls: Sequence[ExchangeCall]) -> str:
    """Return the text of one exchange for all calls, different for different calls."""
    text = "; ".join(call.text for call in calls)
    return text if len(calls) == 1 else shortened(text)


def shortened(text: str) -> str:
    """Return the text of a call, with a digest in the place of its end if it is long."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    digest = blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[:_MOST_CHARACTERS]}... ({digest})"
