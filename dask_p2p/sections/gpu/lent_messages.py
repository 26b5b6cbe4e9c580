"""Arrays of GPUs in messages between two ranks: the receiver copies them by CUDA IPC.

The ranks of a section need not meet before the first message. An offer has the sender's events, and
an acknowledgement those of the receiver, so each opens the other's with the first one. Until the
receiver sees in an offer that the sender has opened its events, it acknowledges only after its
copies are done: the sender could not wait for them on its stream.

One copy engine copies an array, on the receiver's stream.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p import tuning
from dask_p2p.sections.exchange.values import in_host_memory
from dask_p2p.sections.gpu.descriptors import map_descriptor
from dask_p2p.sections.gpu.lent import EVENTS, READ, WRITTEN, LentArrays
from dask_p2p.sections.gpu.windows import OwnEvents, PeerMemory, try_share
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.sections.wire.messages.lender import Lender
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.gpu.streams import GpuStreams

_BYTE = np.dtype(np.uint8)


class MessageLender(LentArrays, Lender):
    """The arrays of a rank's GPU that it sends and receives in messages."""

    def __init__(self, gpu: GpuStreams, connections: Connections) -> None:
        super().__init__(gpu)
        self._connections = connections
        self._unreadable = set[int]()  # ranks whose memory this one cannot read
        self._refusing = set[int]()  # ranks that cannot read this one's memory

    def offer(self, rank: int, arrays: Sequence[Array]) -> bytes | None:
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
        texts = [each.decode() for each in descriptors if each is not None]
        return json.dumps([rank in self._near, self.acknowledgement().decode(), texts]).encode()

    def bring(self, rank: int, offer: bytes, into: Array | None) -> Sequence[Array] | None:
        if not self._gpu.is_running:
            return None
        is_open, events, descriptors = json.loads(offer)
        with self._gpu.entered():
            peer = self._peer(rank, events.encode())
            if peer is None or self._events() is None:
                return None
            sources = [self._mapped(peer, each.encode()) for each in descriptors]
            if any(source is None for source in sources):
                return None
            found = [self._copied(peer, source, into) for source in sources]
            self._record(READ)
            if not is_open:
                self._gpu.wait()
        return found

    def _mapped(self, peer: PeerMemory, descriptor: bytes) -> Any:
        """Return another rank's array, mapped here; None if that is impossible."""
        found = try_share(self._gpu, partial(map_descriptor, peer, descriptor, _BYTE))
        return None if found is None else found[1][0][1]

    def _copied(self, peer: PeerMemory, source: Array, into: Array | None) -> Array:
        """Enqueue the copy of another rank's array; return it."""
        gpu = self._gpu
        target = gpu.empty(source.shape, _BYTE) if into is None else into
        with gpu.reading:  # until the copy is enqueued
            gpu.check_goes_on()
            peer.wait(gpu.stream, WRITTEN)
            gpu.copy(target.data.ptr, source.data.ptr, source.nbytes, gpu.stream)
        return target

    def acknowledgement(self) -> bytes:
        return b"" if self._own is None else self._own.descriptor(-1)

    def acknowledged(self, rank: int, count: int, acknowledgement: bytes) -> None:
        if not self._gpu.is_running:
            return  # the arrays stay until all ranks have ended
        with self._gpu.entered():
            if self._peer(rank, acknowledgement) is None:
                del self._lent[rank][:count]  # the reader has waited for its copies
            else:
                self._release(rank, count)

    def refused(self, rank: int, count: int) -> None:
        self._refusing.add(rank)
        del self._lent[rank][:count]

    def to_host(self, part: Any) -> Any:
        with self._gpu.entered():
            return in_host_memory(part, self._gpu)

    def _events(self) -> OwnEvents | None:
        """Return this rank's events; None if they cannot be shared."""
        if self._own is None:
            self._own = try_share(self._gpu, lambda: OwnEvents(self._gpu, EVENTS))
        return self._own

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
