"""Arrays that a rank's GPU lends other ranks of the host, and two events that order all accesses.

A rank records an event after the work that makes its arrays, and sends their descriptors. A reader
waits for this event on its stream, and enqueues copies. Then it records an event of its own, and
acknowledges: the holder's stream waits for that event, and the memory may be used again. So hosts
wait for messages alone.

A wait for an event counts for the latest record before it. Each record is made before the message
that reports it, so GPUs never wait in a circle.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from dask_p2p.interprocess import cuda_ipc
from dask_p2p.sections.gpu.descriptors import pack_descriptor
from dask_p2p.sections.gpu.windows import OwnEvents, PeerMemory, try_share
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.gpu.streams import GpuStreams

WRITTEN, READ = range(2)  # numbers of a rank's events
EVENTS = 2


class LentArrays:
    """Arrays of this rank that other ranks may be reading."""

    def __init__(self, gpu: GpuStreams) -> None:
        self._gpu = gpu
        self._own: OwnEvents | None = None
        # Memory of other ranks that read here and are read.
        self._near: dict[int, PeerMemory] = {}
        #: By reader: arrays that it may be reading. They stay until all ranks have ended.
        self._lent = defaultdict[int, list[Array]](list)
        self._is_exported = False

    def _record(self, number: int) -> None:
        """Record one of the events after the work of the stream so far."""
        if self._own is not None:
            self._gpu.stream.record(self._own.events[number])

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
