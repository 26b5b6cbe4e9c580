"""The retry policy of a worker: the number of attempts, their pauses, and the longest total time.

"Failure" in docs/design.md describes it. `worst_case_s` bounds the total time for one task or for
many. The worker's event loop enforces the deadlines. While the loop itself is blocked, each wait
takes `Tuning.event_loop_grace_s` longer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Any

from dask_p2p import tuning
from dask_p2p.config import Options
from dask_p2p.transports.base import PROBE_TIMEOUT_S
from dask_p2p.types import Key

LONGEST_PAUSE_S = 2.0  # between two attempts at a task
_KEPT_CAUSES = 8  # causes kept per task: the last distinct ones
_CAUSE_CHARS = 500  # length of a cause


def pause_s(options: Options, attempt: int) -> float:
    """Return the pause after a failed attempt. The first attempt has number 1."""
    return min(LONGEST_PAUSE_S, options.backoff_s * 2.0 ** (attempt - 1))


def worst_case_s(
    options: Options,  # the task's
    holders: int = 1,  # silent workers that hold the task's blocks
    unprobed: int = 0,  # allowed transports that have not probed these workers
) -> float:
    """Return the longest time until a task ends in an error, on one worker."""
    waiting_s = holders * (options.request_timeout_s + unprobed * PROBE_TIMEOUT_S)
    pauses_s = sum(pause_s(options, attempt) for attempt in range(1, options.attempts))
    return options.attempts * waiting_s + pauses_s


class AttemptLog:
    """The failed attempts of one worker: their number and their last causes, by task.

    The size of the log is bounded.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        #: By task: first and last number of successive attempts with one cause, and the cause.
        self.failed: OrderedDict[Any, deque[tuple[int, int, str]]] = OrderedDict()
        self._lock = threading.Lock()

    def count_attempt(self, key: Key, cause: str) -> tuple[int, str]:
        """Record a failed attempt at a task. Return the number of attempts, and their causes."""
        if len(cause) > _CAUSE_CHARS:
            cause = f"{cause[: _CAUSE_CHARS - 4]} ..."
        with self._lock:
            causes = self.failed.pop(key, None) or deque(maxlen=_KEPT_CAUSES)
            first = count = causes[-1][1] + 1 if causes else 1
            if causes and causes[-1][2] == cause:
                first, *_ = causes.pop()
            causes.append((first, count, cause))
            self.failed[key] = causes
            while len(self.failed) > tuning.current.counted_tasks:
                self.failed.popitem(last=False)
            return count, "; ".join(
                f"attempt{f' {first}' if first == last else f's {first} to {last}'}: {cause}"
                for first, last, cause in causes
            )

    def forget_attempts(self, key: Key) -> None:
        """Remove a task from the log. A later run of the task starts at attempt 1."""
        with self._lock:
            self.failed.pop(key, None)
