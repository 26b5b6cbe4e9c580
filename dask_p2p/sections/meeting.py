"""Meetings of members on their GPUs: streams wait for each other, and no host for anything.

Each member has a counter of its meetings in its window. At a meeting a kernel of one thread for
each peer raises it, and reads the peers' counters until they are as high. So all that a stream was
given before a meeting is done when a peer's stream goes on after it, as by events and messages.
But nothing of it changes from step to step: a graph of a GPU can have it.

Members read each other's counters, and write their own alone. What a member still does when others
have given up, and use that memory for something else, harms nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dask_p2p.sections.windows import COUNTERS_BYTES, OwnWindow, PeerWindow

if TYPE_CHECKING:
    from dask_p2p.sections.devices import Gpu

__all__ = ["Meeting"]

_SOURCE = r"""
extern "C" __global__ void meet(
    volatile unsigned long long* own,  // how many meetings there were, and whether to wait no more
    const volatile unsigned long long* const* theirs, int peers
) {
    const unsigned long long number = own[0] + 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        own[0] = number;
    }
    for (int peer = threadIdx.x; peer < peers; peer += blockDim.x)
        while (*theirs[peer] < number && !own[1]) __nanosleep(100);
    __threadfence_system();
}
"""
_THREADS = 32


class Meeting:
    """What members do on their GPUs again and again.

    Parameters
    ----------
    gpu
        Of this member.
    own
        Its window, where its counter is.
    peers
        The windows of those that it meets, which meet it too.
    """

    def __init__(self, gpu: Gpu, own: OwnWindow, peers: Sequence[PeerWindow]) -> None:
        self._gpu, self._counters = gpu, own.counters
        addresses = np.array([peer.counters for peer in peers], np.uint64)
        theirs = gpu.module.asarray(addresses)
        self._kernel = gpu.module.RawKernel(_SOURCE, "meet")
        self._kernel.compile()
        self._given = own.counters, theirs, np.int32(len(peers))
        gpu.ending.append(self._end)

    def put(self) -> None:
        """Put a meeting on the member's stream, which is the current one."""
        self._kernel((1,), (_THREADS,), self._given)

    def _end(self) -> None:
        """Have the member's GPU wait for nobody any more."""
        ended = self._counters.data.ptr + COUNTERS_BYTES // 2
        runtime, copies = self._gpu.module.cuda.runtime, self._gpu.copies
        runtime.memsetAsync(ended, 1, COUNTERS_BYTES // 2, copies.ptr)
