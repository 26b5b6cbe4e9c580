"""Units of a resource that a member's task has: lent to other tasks while the member waits.

Dask gives them to a task until it ends. A member that kept them while it waits could keep them from
the inputs of other members of its gang, or from members of another gang that has units it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

from dask_p2p.types import Key

_ROUNDING = 1e-9  # of units that are fractions, like 0.1


class Units:
    """The units of one task on its worker. All is done on the worker's event loop."""

    def __init__(self, worker: Any, key: Key) -> None:
        task = worker.state.tasks.get(key)
        self._needs = dict((task and task.resource_restrictions) or {})
        self._worker, self._is_lent = worker, False

    def lend(self) -> None:
        """Give other tasks the units. They start when the loop looks again: secede after this."""
        if self._needs and not self._is_lent:
            self._is_lent = True
            self._worker.loop.add_callback(self._add, 1)

    def take(self, wait: Callable[[], bool]) -> None:
        """Take the units back, and wait until other tasks have returned theirs.

        No other task gets them from now on. `wait` waits a moment, and says whether to go on.
        """
        if not self._is_lent:
            return
        self._is_lent, is_taken = False, Event()
        self._worker.loop.add_callback(self._add, -1, is_taken)
        while not (is_taken.is_set() and self._are_enough()) and wait():
            pass

    def close(self) -> None:
        """Take them back without waiting: Dask returns them when the task ends."""
        if self._is_lent:
            self._is_lent = False
            self._worker.loop.add_callback(self._add, -1)

    def _are_enough(self) -> bool:
        available = self._worker.state.available_resources
        return all(available.get(name, 0) >= -_ROUNDING for name in self._needs)

    def _add(self, sign: int, done: Event | None = None) -> None:
        available = self._worker.state.available_resources
        for name, n in self._needs.items():
            available[name] = available.get(name, 0) + sign * n
        if done is not None:
            done.set()
