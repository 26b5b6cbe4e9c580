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


class Attempts:
    """The failed attempts of one worker at one task: how many, and why the last ones failed.

    Its size is bounded, however often and however wordily a task fails.
    """

    __slots__ = ("_causes", "count")

    def __init__(self) -> None:
        self.count = 0
        self._causes: deque[tuple[int, int, str]] = deque(maxlen=_KEPT_CAUSES)  # first, last, text

    def add(self, cause: str) -> None:
        """Count an attempt."""
        self.count += 1
        if len(cause) > _CAUSE_CHARS:
            cause = f"{cause[: _CAUSE_CHARS - 4]} ..."
        first = self.count
        if self._causes and self._causes[-1][2] == cause:
            first, _, cause = self._causes.pop()
        self._causes.append((first, self.count, cause))

    def __str__(self) -> str:
        return "; ".join(
            f"attempt{f' {first}' if first == last else f's {first} to {last}'}: {cause}"
            for first, last, cause in self._causes
        )


class AttemptLog:
    """The failed attempts of one worker at its tasks."""

    def __init__(self, address: str) -> None:  # the worker's
        self.address = address
        self.failed: OrderedDict[Any, Attempts] = OrderedDict()
        self._lock = threading.Lock()

    def count_attempt(self, key: Key, cause: str) -> Attempts:
        """Note a failed attempt at this task; return what is known of all there were."""
        with self._lock:
            attempts = self.failed.pop(key, None) or Attempts()
            attempts.add(cause)
            self.failed[key] = attempts
            while len(self.failed) > _COUNTED_TASKS:
                self.failed.popitem(last=False)
            return attempts

    def forget_attempts(self, key: Key) -> None:
        """Forget the attempts at this task: if it is wanted again, it gets as many again."""
        with self._lock:
            self.failed.pop(key, None)
