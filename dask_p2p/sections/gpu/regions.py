"""Regions of local blocks in GPU memory: read in place by the ranks of a host.

A rank records an event after the work that writes its local block, and sends descriptors of its
regions to their readers. The readers read them part by part, as tasks do: a copy engine brings the
next part while a kernel puts the previous one into place. Then each reader records an event and
acknowledges the read. The holder's stream waits for the readers' events before it goes on. The host
waits for messages alone::

    stream      [writes the local block] written         [waits: others have read] [overwrites it]
    copies                        [waits: others' written][part][part][part]
    emptying                                                    [part][part][part] read

All ranks of a host that read each other exchange descriptors and acknowledgements in each exchange,
even if empty. So no event is recorded again before all have waited for it. A rank that sends its
descriptors has waited for the previous reads. A rank that acknowledges a read has waited for the
write.

A local block may be made in `Pieces`, one after the other, with an event after each: others read
the first piece while the next one is made.

Acknowledgements are awaited lazily, by the next user of the local block or its memory: see
`GpuRegions.settle`. Until then the host enqueues more work.

Regions that cannot be read are sent: see `messages`. Small ones are packed: see
`region_windows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

from dask_p2p import tuning
from dask_p2p.backends import memory_order
from dask_p2p.backends.cupy import region_batch
from dask_p2p.backends.host import IdentityCache
from dask_p2p.geometry import (
    Box,
    ContiguousRuns,
    box_shape,
    box_slices,
    c_strides,
    first_gapless_axis,
    split_box,
    taper_last,
    whole_box,
)
from dask_p2p.plans import Piece
from dask_p2p.sections.exchange.redistribution import MOST_PIECES, Pieces, along
from dask_p2p.sections.exchange.regions import ExchangeCall, regions_of
from dask_p2p.sections.gpu.messages import GpuMessages
from dask_p2p.sections.gpu.streams import GpuStreams
from dask_p2p.sections.gpu.windows import (
    SLOTS,
    OwnEvents,
    OwnWindow,
    PeerMemory,
    PeerWindow,
    map_descriptor,
    opened,
    opened_by_all,
    pack_descriptor,
    try_share,
)
from dask_p2p.sections.wire.connection import Buffer
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.transports import cuda_ipc
from dask_p2p.types import Array

#: Limit of a local block with pending acknowledgements: memory may be short, and the host is ahead
#: anyway.
_MOST_UNSETTLED_BYTES = 2**30
_READ, _WRITTEN = range(2)  # numbers of a rank's events; from the second on one for each piece


_Region: TypeAlias = Sequence[tuple[int, Array]]  # pieces, each with its number


class _PendingReads(NamedTuple):
    """An exchange that other ranks may still be reading."""

    call: ExchangeCall
    axis: int  # of the pieces
    blocks: list[Array]  # the pieces
    regions: Mapping[int, _Region]  # by rank of the reader
    targets: dict[int, Array]  # by rank of the sender: regions that must come in messages
    acknowledgements: Callable[[], Mapping[int, Buffer]]  # waits for them; by rank of the reader


class GpuRegions:
    """Exchanges regions in GPU memory, repeatedly, as `RegionExchange` does in host memory."""

    def __init__(self, gpu: GpuStreams, connections: Connections, reads_memory: bool) -> None:
        self._gpu, self._connections = gpu, connections
        self._messages = GpuMessages(gpu, connections, reads_memory)
        self._windows = RegionWindows(gpu, connections)
        self._events: OwnEvents | None = None
        self._near: dict[int, PeerMemory] | None = None  # by rank, from the first exchange on
        self._unsettled: _PendingReads | None = None

    def bring(self, call: ExchangeCall, source: Array | Pieces, target: Array) -> None:
        """Exchange regions as `RegionExchange.bring` does, on the rank's stream.

        Others may still read the source: it must not change until `settle` has returned.
        """
        self.settle()
        pieces = source if isinstance(source, Pieces) else Pieces.one(source)
        if self._windows.can_bring(call):
            self._windows.bring(call, pieces, target)
            return
        pieces_read: list[Array] = []
        try:
            self._unsettled = self._bring_directly(call, pieces, pieces_read, target)
        except BaseException:
            self._gpu.exported.append(pieces_read)  # others may still be reading
            raise
        is_large = sum(piece.nbytes for piece in pieces_read) > _MOST_UNSETTLED_BYTES
        if self._unsettled is not None and (is_large or self._unsettled.targets):
            self.settle()

    def settle(self) -> None:
        """Make the stream wait for readers of the last local block, and send unread regions."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None:
            return
        call, axis, blocks, regions, targets, acknowledgements = unsettled
        try:
            readers = {rank for rank, has_read in acknowledgements().items() if any(has_read)}
        except BaseException:
            self._gpu.exported.append(blocks)
            raise
        for rank in readers:
            self._open(call)[rank].wait(self._gpu.stream, _READ)
        unread = {
            rank: [piece for _, piece in region]
            for rank, region in regions.items()
            if rank not in readers
        }
        self._messages.bring(call, axis, unread, targets)

    def _bring_directly(
        self, call: ExchangeCall, pieces: Pieces, blocks: list[Array], target: Array
    ) -> _PendingReads | None:
        """Make a local block and read regions of others where possible; return the pending rest."""
        gpu, connections = self._gpu, self._connections
        near = {} if connections.is_alone else self._open(call)
        targets, written = regions_of(target, call.exchange.receives), []
        with gpu.queue.within(gpu.stream):
            for number in range(len(pieces.bounds) - 1):
                blocks.append(pieces.make(number))
                written.append(self._record(_WRITTEN + number))
            regions = {
                rank: [(n, blocks[n][box_slices(part)]) for n, part, _ in pieces.intersect(box)]
                for rank, (box,) in call.exchange.sends.items()
            }
            descriptors = {
                rank: self._descriptor(pieces.axis, regions.get(rank, ())) for rank in near
            }
            text = f"{call.text}, {call.order}, descriptors"
            received = connections.begin(text, descriptors, dict.fromkeys(near))
            self._copy_own(call, pieces, blocks, written, target)
            if connections.is_alone:
                return None
            remaining = received()
            with gpu.reading:
                gpu.check_goes_on()
                read = self._read(call, remaining, targets)
        unread = {rank: target for rank, target in targets.items() if rank not in read}
        self._record(_READ)
        has_read = {rank: bytes([rank in read]) for rank in near}
        into: dict[int, Buffer | None] = {rank: bytearray(1) for rank in near}
        acknowledgements = connections.begin(f"{call.text}, read", has_read, into)
        return _PendingReads(call, pieces.axis, blocks, regions, unread, acknowledgements)

    def _copy_own(
        self,
        call: ExchangeCall,
        pieces: Pieces,
        blocks: Sequence[Array],
        written: Sequence[Any],  # an event after each piece
        target: Array,
    ) -> None:
        """Enqueue copies of the parts of each piece that stay on this rank."""
        queue, axes = self._gpu.queue, call.exchange.axes
        for src, dst in call.exchange.local:
            into = target[box_slices(dst)]
            for number, part, inside in pieces.intersect(src):
                queue.concurrent.wait_event(written[number])
                where = box_slices(tuple(inside[axis] for axis in axes))
                source = blocks[number][box_slices(part)]
                queue.permute(into[where], source, axes, concurrent=True)

    def _record(self, number: int) -> Any:
        if self._events is None:  # no other rank waits
            return self._gpu.stream.record()
        return self._gpu.stream.record(self._events.events[number])

    def _read(
        self, call: ExchangeCall, descriptors: Mapping[int, Buffer], targets: Mapping[int, Array]
    ) -> set[int]:
        """Enqueue reads of the regions that others described; return the ranks of these others."""
        gpu, connections, near, lent = self._gpu, self._connections, self._open(call), {}
        described = [rank for rank, descriptor in descriptors.items() if len(descriptor)]
        for rank in call.in_turn(connections, described):
            make = partial(map_descriptor, near[rank], descriptors[rank], call.dtype)
            region = try_share(gpu, make)
            if region is not None:
                lent[rank] = region
        for copy_number, (rank, (its_axis, pieces)) in enumerate(lent.items(), 1):
            start = 0
            for number, piece in pieces:
                for stream in gpu.queue.reading:
                    near[rank].wait(stream, _WRITTEN + number)
                is_last = copy_number == len(lent) and number == pieces[-1][0]
                self._read_piece(call, its_axis, start, piece, targets[rank], is_last)
                start += piece.shape[its_axis] if piece.ndim else 0
            connections.count(rank, targets[rank].nbytes)
        return {*lent}

    def _read_piece(
        self, call: ExchangeCall, axis: int, start: int, piece: Array, target: Array, is_last: bool
    ) -> None:
        axes = call.exchange.axes
        if piece.ndim:
            box = whole_box(piece.shape)
            part = along(axis, box, (start, start + piece.shape[axis]))
            target = target[box_slices(tuple(part[axis] for axis in axes))]
        read_in_parts(self._gpu, piece, target, axes, is_last)

    def _descriptor(self, axis: int, region: _Region) -> bytes:
        """Return the descriptor of a region for its reader; empty if it cannot be read.

        Each rank may divide its local block along another axis, or not at all.
        """
        fields = []
        for number, piece in region:
            place = try_share(self._gpu, partial(cuda_ipc.export, piece))
            if place is None:
                return b""
            fields.append((number, piece.shape, piece.strides, place))
        return pack_descriptor(axis, tuple(fields)) if fields else b""

    def _open(self, call: ExchangeCall) -> dict[int, PeerMemory]:
        """Find out, once, which ranks of the host read each other's memory."""
        if self._near is None:
            self._events, self._near = opened_by_all(
                self._gpu, self._connections, call.text, _WRITTEN + MOST_PIECES
            )
            # Later exchanges involve only ranks that have data for each other.
            self._messages.of_host.reads.try_all()
        return self._near


def read_in_parts(
    gpu: GpuStreams, region: Array, into: Array, axes: Sequence[int], is_last: bool
) -> None:
    """Enqueue the read of another rank's mapped region on the streams of the rank's queue.

    `is_last` is true for the last region of an exchange.
    """
    queue, part_bytes = gpu.queue, gpu.part_bytes
    layout = region.shape, region.strides, region.itemsize, axes
    for part in _parts(*layout, part_bytes, is_last):
        copy = queue.prefetch(region[box_slices(part)], part_bytes)
        place = box_slices(tuple(part[axis] for axis in axes))
        queue.permute_prefetched(into[place], copy, axes)


@lru_cache(maxsize=256)  # a rank reads the same regions repeatedly
def _parts(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    item_bytes: int,
    axes: Sequence[int],
    part_bytes: int,
    is_last: bool,
) -> tuple[Box, ...]:
    """Return the parts of a region. The last ones get smaller, as no other copy overlaps them."""
    box = whole_box(shape)
    if not part_bytes or not box:
        return (box,)
    order = memory_order(strides)
    lies, steps = ([values[axis] for axis in order] for values in (shape, strides))
    others_from = first_gapless_axis(lies, steps, item_bytes)
    least = tuning.current.gpu_row_bytes // item_bytes
    runs = ContiguousRuns(order.index(axes[-1]), least, others_from)
    in_memory = tuple(box[axis] for axis in order)
    parts = split_box(in_memory, max(1, part_bytes // item_bytes), runs)
    if is_last:
        parts = taper_last(parts, max(1, tuning.current.last_part_bytes // item_bytes), runs)
    return tuple(tuple(part[order.index(axis)] for axis in range(len(shape))) for part in parts)


# Regions of small local blocks in GPU memory: packed into windows, which other ranks read.
#
# A rank packs a region for each other rank into a slot of its window, records an event, and sends
# all others an empty message. When their messages have arrived, the stream waits for their events,
# and a kernel puts the regions into place. So an exchange takes one message to each rank, and the
# local block may change immediately. Regions that are read in place are not copied on the way, but
# need descriptors and acknowledgements::
#
#     stream   [packs regions] event  [waits: others have packed] [reads their windows]
#     host                     [messages]
#
# Slots are used in turn, and two are enough, as in `halo_windows`: all ranks exchange messages each
# time, also those without regions for each other.

_LEAST_SLOT_BYTES = 2**16
_MOST_CALLS = 64  # with prepared copies


class _Copy(NamedTuple):
    """A copy from or to a region in a window."""

    rank: int  # of the reader, or of the holder
    region: Array
    pieces: Sequence[Piece]  # the only one


class _Copies(NamedTuple):
    """The copies of a call."""

    sends: list[list[_Copy]]  # by slot
    local: Sequence[Piece]
    receives: list[list[_Copy]]  # by slot


class RegionWindows:
    """Windows of all ranks, for exchanges of small regions."""

    def __init__(self, gpu: GpuStreams, connections: Connections) -> None:
        self._gpu, self._connections = gpu, connections
        self._batch = region_batch()
        self._copies = IdentityCache[_Copies](_MOST_CALLS)
        self._window: OwnWindow | None = None
        self._peers: dict[int, PeerWindow] = {}  # by rank
        self._slot_bytes = 0
        self._are_complete = True  # false: some ranks cannot read each other's windows
        self._count = 0  # number of exchanges so far

    def can_bring(self, call: ExchangeCall) -> bool:
        """Return whether a call uses windows; open larger ones if it needs them.

        A collective call of all ranks, with the same result.
        """
        _, size = self._connections.rank_and_size
        slot_bytes = call.most_elements * call.dtype.itemsize
        is_small = 0 < slot_bytes * size <= tuning.current.window_bytes
        if size == 1 or not is_small or not self._are_complete:
            return False
        if slot_bytes > self._slot_bytes or self._window is None:
            self._open(call.text, max(_LEAST_SLOT_BYTES, 1 << (slot_bytes - 1).bit_length()))
        return self._are_complete

    def bring(self, call: ExchangeCall, pieces: Pieces, target: Array) -> None:
        """Exchange regions on the rank's stream; the local block may change immediately."""
        gpu, connections, window = self._gpu, self._connections, self._window
        assert window is not None, "`can_bring` has opened the windows"
        slot, self._count = self._count % SLOTS, self._count + 1
        local_block, axes = self._in_one_piece(call, pieces), call.exchange.axes
        key = call.dtype.str, call.order, self._slot_bytes
        sends, local, receives = self._copies.get(call.exchange, key, lambda: self._prepared(call))
        for _, region, its_pieces in sends[slot]:
            self._add(region, local_block, its_pieces, range(len(axes)))
        self._add(target, local_block, local, axes)
        self._batch.flush()
        window.events[slot].record(gpu.stream)
        into = {rank: bytearray() for rank in self._peers}
        text = f"{call.text}, {call.order}, packed"
        connections.exchange(text, dict.fromkeys(self._peers, b""), {**into})
        with gpu.reading:  # until all reads are enqueued
            gpu.check_goes_on()
            for peer in self._peers.values():
                peer.wait(gpu.stream, slot)
            for rank, region, its_pieces in receives[slot]:
                self._add(target, region, its_pieces, axes)
                connections.count(rank, region.nbytes)
            self._batch.flush()

    def _in_one_piece(self, call: ExchangeCall, pieces: Pieces) -> Array:
        blocks = [pieces.make(number) for number in range(len(pieces.bounds) - 1)]
        if len(blocks) == 1:
            return blocks[0]
        local_block = self._gpu.empty(call.exchange.before, call.dtype)
        box = whole_box(call.exchange.before)
        for piece, bounds in zip(blocks, pairwise(pieces.bounds), strict=True):
            part = along(pieces.axis, box, bounds)
            into = local_block[box_slices(part)]
            self._gpu.backend.permute_into(into, piece, range(piece.ndim))
        return local_block

    def _add(self, into: Array, array: Array, pieces: Sequence[Piece], axes: Sequence[int]) -> None:
        for _, src, dst in self._batch.copy_pieces(into, array, pieces, axes):
            target, source = into[box_slices(dst)], array[box_slices(src)]
            self._gpu.backend.permute_into(target, source, axes)

    def _prepared(self, call: ExchangeCall) -> _Copies:
        window, exchange, dtype = self._window, call.exchange, call.dtype
        assert window is not None, "`can_bring` has opened the windows"
        sends: list[list[_Copy]] = [[] for _ in range(SLOTS)]
        receives: list[list[_Copy]] = [[] for _ in range(SLOTS)]
        for rank, (box,) in exchange.sends.items():
            shape = box_shape(box)
            pieces = [Piece(0, box, whole_box(shape))]
            for slot in range(SLOTS):
                memory = window.memory(rank, slot)[: prod(shape) * dtype.itemsize]
                sends[slot].append(_Copy(rank, memory.view(dtype).reshape(shape), pieces))
        for rank in call.in_turn(self._connections, exchange.receives):
            (box,) = exchange.receives[rank]
            shape = exchange.shape_before(box_shape(box))
            pieces = [Piece(0, whole_box(shape), box)]
            for slot in range(SLOTS):
                address, strides = self._peers[rank].address(slot), c_strides(shape, dtype.itemsize)
                region = cuda_ipc.array_at(address, shape, strides, dtype)
                receives[slot].append(_Copy(rank, region, pieces))
        return _Copies(sends, [Piece(0, src, dst) for src, dst in exchange.local], receives)

    def _open(self, text: str, slot_bytes: int) -> None:
        """Open windows of all ranks, with slots of this size. A collective call."""
        gpu, (rank, size) = self._gpu, self._connections.rank_and_size
        self._window, self._peers = opened(
            gpu,
            self._connections,
            text,
            {*range(size)} - {rank},
            lambda ranks: OwnWindow(gpu, dict.fromkeys(ranks, slot_bytes)),
            lambda _, descriptor: PeerWindow(gpu, descriptor, slot_bytes),
        )
        is_complete = bytes([len(self._peers) == size - 1])
        replies = self._connections.gather(f"{text}, all windows", is_complete)
        self._slot_bytes, self._are_complete = slot_bytes, all(map(any, replies))
