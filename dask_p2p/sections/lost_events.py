"""Events of another process that has ended: streams of this process stop waiting for these.

A process records an event on its GPU behind its work. If it ends before that work is done, the
event never happens, and a stream of another process that waits for it would wait for ever. CUDA
lets each process that has opened an event record it. So this process records such events itself, on
a stream that has nothing else to do, and all waits end.

The stream then goes on with memory that may not have been written. Its results are dropped: the
attempt has lost a member.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

_NOT_READY = 600  # of CUDA: cudaErrorNotReady
# Priorities of two streams, lower than those of others: streams of one priority may share a queue
# of the GPU, where the first that waits stops all.
_OF_WAITING, _OF_RECORDING = -2, -3
_LONGEST_S = 0.5  # that waits take to end


class LostEvents:
    """Events of a process that has ended, which this one records.

    Parameters
    ----------
    cuda
        CuPy's module.
    device : int
        Number of the GPU that opened them.
    events : sequence of int
        Opened events of that process.
    """

    def __init__(self, cuda: Any, device: int, events: Sequence[int]) -> None:
        self._runtime = cuda.runtime
        with cuda.Device(device):
            self._waiting = cuda.Stream(non_blocking=True, priority=_OF_WAITING)
            self._recording = cuda.Stream(non_blocking=True, priority=_OF_RECORDING)
            for event in events:  # first: like the streams that wait already
                self._runtime.streamWaitEvent(self._waiting.ptr, event)
            for event in events:
                self._runtime.eventRecord(event, self._recording.ptr)
        self._recorded_s = time.monotonic()

    @property
    def are_waited_for(self) -> bool:
        """Streams still wait for the events, which were recorded long enough ago."""
        is_late = time.monotonic() - self._recorded_s > _LONGEST_S
        return is_late and self._runtime.streamQuery(self._waiting.ptr) == _NOT_READY
