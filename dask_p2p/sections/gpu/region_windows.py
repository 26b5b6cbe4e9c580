"""Regions of small local blocks in GPU memory: packed into windows, which other ranks read.

A rank packs a region for each other rank into a slot of its window, records an event, and sends all
others an empty message. When their messages have arrived, the stream waits for their events, and a
kernel puts the regions into place. So an exchange takes one message to each rank, and the local
block may change immediately. Regions that are read in place are not copied on the way, but need
descriptors and acknowledgements::

    stream   [packs regions] event  [waits: others have packed] [reads their windows]
    host                     [messages]

Slots are used in turn, and two are enough, as in `halo_windows`: all ranks exchange messages each
time, also those without regions for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from dask_p2p import tuning
from dask_p2p.backends.cupy import region_batch
from dask_p2p.backends.kept_results import KeptResults
from dask_p2p.geometry import box_shape, box_slices, c_strides, whole_box
from dask_p2p.interprocess import cuda_ipc
from dask_p2p.plans import Piece
from dask_p2p.sections.exchange.movers import ExchangeCall
from dask_p2p.sections.exchange.pieces import Pieces, along
from dask_p2p.sections.gpu.windows import SLOTS, OwnWindow, PeerWindow, opened
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.gpu.streams import GpuStreams

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
    """Windows of all ranks, for exchanges of small regions.

    Parameters
    ----------
    gpu
        The rank's GPU.
    connections
        Connections to the other ranks.
    """

    def __init__(self, gpu: GpuStreams, connections: Connections) -> None:
        self._gpu, self._connections = gpu, connections
        self._batch = region_batch()
        self._copies = KeptResults[_Copies](_MOST_CALLS)
        self._own: OwnWindow | None = None
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
        if slot_bytes > self._slot_bytes or self._own is None:
            self._open(call.text, max(_LEAST_SLOT_BYTES, 1 << (slot_bytes - 1).bit_length()))
        return self._are_complete

    def bring(self, call: ExchangeCall, pieces: Pieces, target: Array) -> None:
        """Exchange regions on the rank's stream; the local block may change immediately."""
        gpu, connections, own = self._gpu, self._connections, self._own
        assert own is not None, "`can_bring` has opened the windows"
        slot, self._count = self._count % SLOTS, self._count + 1
        local_block, axes = self._in_one_piece(call, pieces), call.exchange.axes
        key = call.dtype.str, call.order, self._slot_bytes
        sends, local, receives = self._copies.of(call.exchange, key, lambda: self._prepared(call))
        for _, region, its_pieces in sends[slot]:
            self._add(region, local_block, its_pieces, range(len(axes)))
        self._add(target, local_block, local, axes)
        self._batch.flush()
        own.events[slot].record(gpu.stream)
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
        made = [pieces.make(number) for number in range(len(pieces.bounds) - 1)]
        if len(made) == 1:
            return made[0]
        local_block = self._gpu.empty(call.exchange.before, call.dtype)
        whole = whole_box(call.exchange.before)
        for piece, bounds in zip(made, pairwise(pieces.bounds), strict=True):
            part = along(pieces.axis, whole, bounds)
            into = local_block[box_slices(part)]
            self._gpu.backend.permute_into(into, piece, range(piece.ndim))
        return local_block

    def _add(self, into: Array, array: Array, pieces: Sequence[Piece], axes: Sequence[int]) -> None:
        """Add copies to the next launch; large ones are enqueued by themselves."""
        for _, src, dst in self._batch.copy_pieces(into, array, pieces, axes):
            target, source = into[box_slices(dst)], array[box_slices(src)]
            self._gpu.backend.permute_into(target, source, axes)

    def _prepared(self, call: ExchangeCall) -> _Copies:
        """Return the copies of a call, with the regions in the present windows."""
        own, exchange, dtype = self._own, call.exchange, call.dtype
        assert own is not None, "`can_bring` has opened the windows"
        sends: list[list[_Copy]] = [[] for _ in range(SLOTS)]
        receives: list[list[_Copy]] = [[] for _ in range(SLOTS)]
        for rank, (box,) in exchange.sends.items():
            shape = box_shape(box)
            pieces = [Piece(0, box, whole_box(shape))]
            for slot in range(SLOTS):
                memory = own.memory(rank, slot)[: prod(shape) * dtype.itemsize]
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
        gpu, (own, size) = self._gpu, self._connections.rank_and_size
        self._own, self._peers = opened(
            gpu,
            self._connections,
            text,
            {*range(size)} - {own},
            lambda ranks: OwnWindow(gpu, dict.fromkeys(ranks, slot_bytes)),
            lambda _, descriptor: PeerWindow(gpu, descriptor, slot_bytes),
        )
        is_complete = bytes([len(self._peers) == size - 1])
        answers = self._connections.gather(f"{text}, all windows", is_complete)
        self._slot_bytes, self._are_complete = slot_bytes, all(map(any, answers))
