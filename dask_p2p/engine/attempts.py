"""How often, and for how long, a worker tries to bring a block: the one policy, with its bound.

"Failure" in docs/design.md tells of it. `worst_case_s` is what it takes together, for one task or
for many. The worker's event loop keeps the deadlines; where it stands still itself, each wait takes
`EVENT_LOOP_GRACE_S` more.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Any

from dask_p2p.config import Options
from dask_p2p.transports.silence import LONGEST_PAUSE_S, PROBE_TIMEOUT_S
from dask_p2p.types import Key

_KEPT_CAUSES = 8  # of a task's failed attempts: the last ones that differ
_CAUSE_CHARS = 500  # of each
_COUNTED_TASKS = 10_000  # whose failed attempts are kept


def pause_s(options: Options, attempt: int) -> float:
    """Return how long to wait after a failed attempt; the first one is number 1."""
    return min(LONGEST_PAUSE_S, options.backoff_s * 2.0 ** (attempt - 1))


def worst_case_s(
    options: Options,  # the task's
    holders: int = 1,  # workers that hold its blocks, and do not answer
    unmet: int = 0,  # transports by which this worker has not met them, of those that may be used
) -> float:
    """Return the longest time until a task ends in an error, on one worker."""
    waiting_s = holders * (options.request_timeout_s + unmet * PROBE_TIMEOUT_S)
    pauses_s = sum(pause_s(options, attempt) for attempt in range(1, options.attempts))
    return options.attempts * waiting_s + pauses_s


class AttemptLog:
    """The failed attempts of one worker at its tasks: how many, and why the last ones failed.

    Its size is bounded, however often and however wordily tasks fail.
    """

    def __init__(self, address: str) -> None:  # the worker's
        self.address = address
        #: By task the numbers of the first and the last attempt that failed by a cause.
        self.failed: OrderedDict[Any, deque[tuple[int, int, str]]] = OrderedDict()
        self._lock = threading.Lock()

    def count_attempt(self, key: Key, cause: str) -> tuple[int, str]:
        """Note a failed attempt at this task; return how many there were, and their causes."""
        if len(cause) > _CAUSE_CHARS:
            cause = f"{cause[: _CAUSE_CHARS - 4]} ..."
        with self._lock:
            causes = self.failed.pop(key, None) or deque(maxlen=_KEPT_CAUSES)
            first = count = causes[-1][1] + 1 if causes else 1
            if causes and causes[-1][2] == cause:
                first, *_ = causes.pop()
            causes.append((first, count, cause))
            self.failed[key] = causes
            while len(self.failed) > _COUNTED_TASKS:
                self.failed.popitem(last=False)
            return count, "; ".join(
                f"attempt{f' {first}' if first == last else f's {first} to {last}'}: {cause}"
                for first, last, cause in causes
            )

    def forget_attempts(self, key: Key) -> None:
        """Forget the attempts at this task: if it is wanted again, it gets as many again."""
        with self._lock:
            self.failed.pop(key, None)
