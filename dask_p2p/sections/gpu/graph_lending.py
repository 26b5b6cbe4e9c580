"""Arrays that ranks lend each other in a CUDA graph.

All ranks capture the same exchanges. Each exchange has a device barrier: behind it, all arrays that
others lend are written. The graph ends with one more. Behind that one, others have read this rank's
arrays, and the next replay may write them. So replays exchange data without messages of hosts.

The graph has the addresses of all arrays. Lent ones stay as long as the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p.errors import TransferError
from dask_p2p.geometry import box_slices
from dask_p2p.plans import Fill
from dask_p2p.sections.gpu.lending import GpuLending
from dask_p2p.sections.gpu.windows import DeviceBarrier, OwnWindow, PeerWindow, opened
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.gpu.streams import GpuStreams

_SLOT_BYTES = 1  # of windows that have counters alone


class GraphLending(GpuLending):
    """Arrays in the memory of a rank's GPU, while its stream is captured.

    Making it is a collective call of all ranks. `place` raises `TransferError`, since the array of
    a message is in host memory.
    """

    _barrier: DeviceBarrier | None = None  # None: one rank

    def __init__(self, gpu: GpuStreams, connections: Connections) -> None:
        self._read_bytes = Counter[int]()  # by rank, in a replay
        super().__init__(gpu, connections)

    def _open(self) -> None:
        gpu, (own, size) = self._gpu, self._connections.rank_and_size
        window, near = opened(
            gpu,
            self._connections,
            "lending in graphs",
            {*range(size)} - {own},
            lambda ranks: OwnWindow(gpu, dict.fromkeys(ranks, _SLOT_BYTES)),
            lambda _, descriptor: PeerWindow(gpu, descriptor, _SLOT_BYTES),
        )
        self._near = {**near}
        if window is not None and near:
            self._barrier = DeviceBarrier(gpu, window, [*near.values()])

    @property
    def is_complete(self) -> bool:
        """True if this rank and all others read each other's memory."""
        _, size = self._connections.rank_and_size
        return len(self._near) == size - 1

    def begin(self, ranks: Collection[int]) -> None:
        self._reads.clear()

    def received(self, ranks: Collection[int]) -> None:
        pass  # no rank reads before the graph runs

    def end(self, text: str, readers: Collection[int], read: Collection[int]) -> None:
        self.put_barrier()
        for copy in self._add_reads():
            self.backend.permute_into(*copy)
        self.flush()

    def fill(self, into: Array, fills: Sequence[Fill]) -> None:
        for box, item in fills:  # as arguments of kernels: an upload would need its host memory
            into[box_slices(box)] = np.full((), item, into.dtype)[()]

    def count_reads(self) -> None:
        """Count the bytes that a replay reads from other ranks."""
        for rank, size_bytes in self._read_bytes.items():
            self._connections.count(rank, size_bytes)

    def _count(self, rank: int, size_bytes: int) -> None:
        self._read_bytes[rank] += size_bytes

    def put_barrier(self) -> None:
        """Enqueue a device barrier of all ranks: they have done all that they enqueued before."""
        if self._barrier is not None:
            self._barrier.put()

    def place(self, into: Array, array: Any, axes: Sequence[int]) -> None:
        raise TransferError("expected arrays of GPU memory alone in a CUDA graph")
