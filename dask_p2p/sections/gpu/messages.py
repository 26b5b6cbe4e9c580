"""Regions in GPU memory that other ranks cannot read: sent in messages.

Between hosts they go by UCX, each from contiguous GPU memory, if the connection carries messages of
that size. All others go through host memory: to other hosts without UCX, between ranks of one
process, and where the allocator's memory cannot be shared.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dask_p2p import tuning
from dask_p2p.geometry import box_slices, whole_box
from dask_p2p.sections.exchange.redistribution import along
from dask_p2p.sections.exchange.regions import ExchangeCall, RegionExchange, begin_in_order
from dask_p2p.sections.exchange.values import in_host_memory
from dask_p2p.sections.gpu.streams import GpuStreams
from dask_p2p.sections.gpu.windows import (
    OwnEvents,
    PeerMemory,
    map_descriptor,
    pack_descriptor,
    try_share,
)
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.transports import cuda_ipc
from dask_p2p.types import Array


class GpuMessages:
    """Exchanges regions in messages, repeatedly."""

    def __init__(self, gpu: GpuStreams, connections: Connections, reads_memory: bool) -> None:
        self._gpu, self._connections = gpu, connections
        self.of_host = RegionExchange(connections, reads_memory)

    def bring(
        self,
        call: ExchangeCall,
        axis: int,  # axis along which regions are in pieces
        regions: dict[int, list[Array]],  # by rank of the receiver: the pieces
        targets: dict[int, Array],  # by rank of the sender
    ) -> None:
        if self._connections.use_ucx and (regions or targets):
            self._by_ucx(call, axis, regions, targets)
        if regions or targets:
            self._through_host(call, axis, regions, targets)

    def _by_ucx(
        self,
        call: ExchangeCall,
        axis: int,
        regions: dict[int, list[Array]],
        targets: dict[int, Array],
    ) -> None:
        """Exchange regions by UCX from GPU memory, and remove these from the arguments."""
        gpu, connections, sends, receives = self._gpu, self._connections, {}, {}
        with gpu.queue.within(gpu.stream):
            for rank, pieces in [*regions.items()]:
                if connections.carries(rank, sum(piece.nbytes for piece in pieces)):
                    sends[rank] = self._in_one_piece(regions.pop(rank), axis)
            for rank, target in targets.items():
                if connections.carries(rank, target.nbytes):
                    receives[rank] = gpu.empty(call.exchange.shape_before(target.shape), call.dtype)
        gpu.wait()  # for these copies, and for earlier uses of this memory
        end = begin_in_order(
            connections,
            call.order,
            f"{call.text}, by UCX",
            {rank: _bytes_of(array) for rank, array in sends.items()},
            {rank: _bytes_of(array) for rank, array in receives.items()},
        )
        end()
        with gpu.queue.within(gpu.stream):
            for rank, arrived in receives.items():
                gpu.queue.permute(targets.pop(rank), arrived, call.exchange.axes)

    def _in_one_piece(self, pieces: Sequence[Array], axis: int) -> Array:
        """Return contiguous memory for a region, and enqueue the copies of its pieces into it."""
        shape = list(pieces[0].shape)
        if shape:
            shape[axis] = sum(piece.shape[axis] for piece in pieces)
        joined, start = self._gpu.empty(shape, pieces[0].dtype), 0
        for piece in pieces:
            box = whole_box(piece.shape)
            if box:
                box = along(axis, box, (start, start + piece.shape[axis]))
                start += piece.shape[axis]
            self._gpu.queue.permute(joined[box_slices(box)], piece, range(piece.ndim))
        return joined

    def _through_host(
        self,
        call: ExchangeCall,
        axis: int,
        regions: Mapping[int, Sequence[Array]],
        targets: Mapping[int, Array],
    ) -> None:
        """Copy regions to host memory, exchange them there, and copy received regions back up."""
        gpu = self._gpu
        axes = tuple(range(len(call.exchange.axes)))
        straight = replace(call, exchange=replace(call.exchange, axes=axes))
        down = {}
        for rank, pieces in regions.items():
            on_host = [*map(gpu.to_host, pieces)]
            down[rank] = on_host[0] if len(on_host) == 1 else np.concatenate(on_host, axis)
        up = {
            rank: np.empty(call.exchange.shape_before(target.shape), call.dtype)
            for rank, target in targets.items()
        }
        self.of_host.give(straight, down, up)
        arrived = {rank: gpu.module.asarray(host_array) for rank, host_array in up.items()}
        with gpu.queue.within(gpu.stream):
            for rank, array in arrived.items():
                gpu.queue.permute(targets[rank], array, call.exchange.axes)


def _bytes_of(array: Array) -> Array:
    flat: Array = array.reshape(-1).view(np.uint8)
    return flat


# Arrays that a rank's GPU lends other ranks of the host, and two events that order all accesses.
#
# A rank records an event after the work that makes its arrays, and sends their descriptors. A
# reader waits for this event on its stream, and enqueues copies. Then it records an event of its
# own, and acknowledges: the holder's stream waits for that event, and the memory may be used again.
# So hosts wait for messages alone.
#
# A wait for an event counts for the latest record before it. Each record is made before the message
# that reports it, so GPUs never wait in a circle.

WRITTEN, READ = range(2)  # numbers of a rank's events
EVENTS = 2


class LentArrays:
    """Arrays of this rank that other ranks may be reading."""

    def __init__(self, gpu: GpuStreams) -> None:
        self._gpu = gpu
        self._own_events: OwnEvents | None = None
        # Memory of other ranks that read here and are read.
        self._near: dict[int, PeerMemory] = {}
        #: By reader: arrays that it may be reading. They stay until all ranks have ended.
        self._lent = defaultdict[int, list[Array]](list)
        self._is_exported = False

    def _record(self, number: int) -> None:
        if self._own_events is not None:
            self._gpu.stream.record(self._own_events.events[number])

    def _lend(self, rank: int, array: Array) -> bytes | None:
        """Return the descriptor of an array for its reader; None if it cannot be read."""
        handle = try_share(self._gpu, partial(cuda_ipc.export, array))
        if handle is None:
            return None
        if not self._is_exported:
            self._gpu.exported.append(self._lent)
            self._is_exported = True
        self._lent[rank].append(array)
        return pack_descriptor(0, ((0, array.shape, array.strides, handle),))

    def _release(self, rank: int, count: int) -> None:
        """Let the stream wait until a rank has read the first arrays that it was lent."""
        if count:
            self._near[rank].wait(self._gpu.stream, READ)
            del self._lent[rank][:count]


# Arrays of GPUs in messages between two ranks: the receiver copies them by CUDA IPC.
#
# The ranks of a section need not meet before the first message. An offer has the sender's events,
# and an acknowledgement those of the receiver, so each opens the other's with the first one. Until
# the receiver sees in an offer that the sender has opened its events, it acknowledges only after
# its copies are done: the sender could not wait for them on its stream.
#
# One copy engine copies an array, on the receiver's stream.

_BYTE = np.dtype(np.uint8)


class MessageLender(LentArrays):
    """The arrays of a rank's GPU that it sends in messages, and its copies of others' arrays.

    The methods are called while the rank moves messages, from the one thread that moves them.
    """

    def __init__(self, gpu: GpuStreams, connections: Connections) -> None:
        super().__init__(gpu)
        self._connections = connections
        self._unreadable = set[int]()  # ranks whose memory this one cannot read
        self._refusing = set[int]()  # ranks that cannot read this one's memory

    def offer(self, rank: int, arrays: Sequence[Array]) -> bytes | None:
        """Return the offer of contiguous arrays for a rank; None if their bytes have to be sent."""
        size_bytes = sum(array.nbytes for array in arrays)
        is_near = self._gpu.has_windows and not self._connections.is_on_other_host(rank)
        is_small = size_bytes < tuning.current.lent_message_bytes
        if is_small or not is_near or rank in self._refusing or self._events() is None:
            return None
        descriptors = [self._lend(rank, array) for array in arrays]
        if None in descriptors:
            lent = len(descriptors) - descriptors.count(None)
            del self._lent[rank][len(self._lent[rank]) - lent :]
            return None
        self._record(WRITTEN)
        texts = [descriptor.decode() for descriptor in descriptors if descriptor is not None]
        return json.dumps([rank in self._near, self.acknowledgement().decode(), texts]).encode()

    def bring(self, rank: int, offer: bytes, into: Array | None) -> Sequence[Array] | None:
        """Return copies of the arrays that a rank offers, as bytes; None if they are unreadable.

        A single array is copied into the bytes `into`, unless that is None.
        """
        if not self._gpu.is_running:
            return None
        is_open, events, descriptors = json.loads(offer)
        with self._gpu.entered():
            peer = self._peer(rank, events.encode())
            if peer is None or self._events() is None:
                return None
            sources = [self._mapped(peer, descriptor.encode()) for descriptor in descriptors]
            if any(source is None for source in sources):
                return None
            copies = [self._copied(peer, source, into) for source in sources]
            self._record(READ)
            if not is_open:
                self._gpu.wait()
        return copies

    def _mapped(self, peer: PeerMemory, descriptor: bytes) -> Any:
        mapped = try_share(self._gpu, partial(map_descriptor, peer, descriptor, _BYTE))
        return None if mapped is None else mapped[1][0][1]

    def _copied(self, peer: PeerMemory, source: Array, into: Array | None) -> Array:
        gpu = self._gpu
        target = gpu.empty(source.shape, _BYTE) if into is None else into
        with gpu.reading:  # until the copy is enqueued
            gpu.check_goes_on()
            peer.wait(gpu.stream, WRITTEN)
            gpu.copy(target.data.ptr, source.data.ptr, source.nbytes, gpu.stream)
        return target

    def acknowledgement(self) -> bytes:
        """Return the data of the acknowledgement of the newest copies."""
        return b"" if self._own_events is None else self._own_events.descriptor(-1)

    def acknowledged(self, rank: int, count: int, acknowledgement: bytes) -> None:
        """Take note that a rank has copied the first arrays that it was offered."""
        if not self._gpu.is_running:
            return  # the arrays stay until all ranks have ended
        with self._gpu.entered():
            if self._peer(rank, acknowledgement) is None:
                del self._lent[rank][:count]  # the reader has waited for its copies
            else:
                self._release(rank, count)

    def refused(self, rank: int, count: int) -> None:
        """Take note that a rank cannot read the first arrays that it was offered, nor others."""
        self._refusing.add(rank)
        del self._lent[rank][:count]

    def to_host(self, part: Any) -> Any:
        with self._gpu.entered():
            return in_host_memory(part, self._gpu)

    def _events(self) -> OwnEvents | None:
        if self._own_events is None:
            self._own_events = try_share(self._gpu, lambda: OwnEvents(self._gpu, EVENTS))
        return self._own_events

    def _peer(self, rank: int, descriptor: bytes) -> PeerMemory | None:
        """Return another rank's memory, opened once; None if this rank cannot read it."""
        if rank not in self._near and rank not in self._unreadable:
            peer = try_share(self._gpu, lambda: PeerMemory(self._gpu, descriptor))
            if peer is None:
                self._unreadable.add(rank)
            else:
                self._near[rank] = peer
                self._gpu.peers.append(peer)
                self._gpu.closing.append(peer.close)
        return self._near.get(rank)
