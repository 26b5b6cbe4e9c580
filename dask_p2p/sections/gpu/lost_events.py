"""Events of a process that has ended: ends the waits of this process's streams for them.

A process records an event on its GPU behind its work. If it ends before that work is done, the
event never completes, and a stream of another process that waits for it would wait for ever. CUDA
lets each process that has opened an event record it. So this process records such events itself, on
an idle stream, and all waits end.

The stream then continues with memory that may not have been written. Its results are dropped: the
attempt has lost a rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

NOT_READY = 600  # of CUDA: cudaErrorNotReady
# Priorities of the two streams, unlike those of other streams. Streams of one priority may share a
# hardware queue, where one waiting stream blocks all others.
_OF_WAITING, _OF_RECORDING = -2, -3
_LONGEST_S = 0.5  # time within which waits end


class LostEvents:
    """Records the events of a process that has ended, in its place.

    Parameters
    ----------
    cuda
        CuPy's module.
    device : int
        Number of the GPU on which the events were opened.
    events : sequence of int
        Handles of the opened events.
    """

    def __init__(self, cuda: Any, device: int, events: Sequence[int]) -> None:
        self._runtime = cuda.runtime
        with cuda.Device(device):
            self._waiting = cuda.Stream(non_blocking=True, priority=_OF_WAITING)
            self._recording = cuda.Stream(non_blocking=True, priority=_OF_RECORDING)
            for event in events:  # before they are recorded, like the streams that already wait
                self._runtime.streamWaitEvent(self._waiting.ptr, event)
            for event in events:
                self._runtime.eventRecord(event, self._recording.ptr)
        self._recorded_s = time.monotonic()

    @property
    def are_waited_for(self) -> bool:
        """True if streams still wait for the events long after they were recorded."""
        is_late = time.monotonic() - self._recorded_s > _LONGEST_S
        return is_late and self._runtime.streamQuery(self._waiting.ptr) == NOT_READY
