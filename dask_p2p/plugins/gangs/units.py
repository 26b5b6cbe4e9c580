"""Resource units of a rank's task: lent to other tasks while the rank waits.

Dask assigns units to a task until it ends. A waiting rank that kept its units could block the
inputs of other ranks of its gang. It could also block ranks of another gang, which has units that
this gang needs.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from time import monotonic
from typing import Any

from distributed.core import Status
from distributed.worker_state_machine import UnpauseEvent

from dask_p2p.types import Key

_ROUNDING = 1e-9  # rounding error of fractional units, such as 0.1


class Units:
    """The resource units of one task. They are changed on the worker's event loop."""

    def __init__(self, worker: Any, key: Key) -> None:
        task = worker.state.tasks.get(key)
        self._needs = dict((task and task.resource_restrictions) or {})
        self._worker, self._is_lent = worker, False

    def lend(self) -> None:
        """Lend the units to other tasks. These start at the worker's next event, so secede next."""
        if self._needs and not self._is_lent:
            self._is_lent = True
            self._worker.loop.add_callback(self._add, 1)

    def lend_while_idle(self) -> None:
        """Lend the units of a task that has seceded; tasks that wait for them start now."""
        if self._needs and not self._is_lent:
            self.lend()
            self._worker.loop.add_callback(self._start_waiting)

    def take(self, wait: Callable[[], bool]) -> None:
        """Take the units back, and wait until enough tasks that borrowed them have ended.

        From now on no other task gets the units. `wait` waits a moment, and returns whether to
        continue.
        """
        if not self._is_lent:
            return
        self._is_lent, is_taken = False, Event()
        self._worker.loop.add_callback(self._add, -1, is_taken)
        while not (is_taken.is_set() and self._are_enough()) and wait():
            pass

    def close(self) -> None:
        """Take the units back without waiting: Dask frees them when the task ends."""
        if self._is_lent:
            self._is_lent = False
            self._worker.loop.add_callback(self._add, -1)

    def _start_waiting(self) -> None:
        if self._worker.status == Status.running:  # then the event has no other effect
            self._worker.handle_stimulus(UnpauseEvent(stimulus_id=f"p2p-units-{monotonic()}"))

    def _are_enough(self) -> bool:
        available = self._worker.state.available_resources
        return all(available.get(name, 0) >= -_ROUNDING for name in self._needs)

    def _add(self, sign: int, done: Event | None = None) -> None:
        available = self._worker.state.available_resources
        for name, n in self._needs.items():
            available[name] = available.get(name, 0) + sign * n
        if done is not None:
            done.set()
