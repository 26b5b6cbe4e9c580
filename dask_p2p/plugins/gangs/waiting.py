"""Warnings about gangs that have waited for long, with the reason."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from dask_p2p import tuning
from dask_p2p.errors import P2PWarning
from dask_p2p.plugins.gangs.coordinator import Coordinator, Wait
from dask_p2p.plugins.notices import warn_client

logger = logging.getLogger(__name__)

_MOST_NAMED = 4


class Waiting:
    """Warns about gangs that wait for long, and repeats the warning while they wait."""

    def __init__(
        self,
        scheduler: Any,
        coordinator: Coordinator,
        after_s: float,  # time that a gang waits before the first warning
    ) -> None:
        self._scheduler, self._coordinator, self._after_s = scheduler, coordinator, after_s
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def watch(self, gang: str) -> None:
        """Start the timer of a gang that has begun to wait."""
        if gang not in self._timers and (wait := self._coordinator.wait(gang)) is not None:
            self._look_after(self._after_s, gang, wait.attempt, 0.0)

    def forget(self, gang: str) -> None:
        """Stop the timer of a gang that was forgotten: a new gang may have its name."""
        if (timer := self._timers.pop(gang, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Stop all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _look_after(self, delay_s: float, gang: str, attempt: int, waited_s: float) -> None:
        loop = asyncio.get_running_loop()
        waited_s += delay_s
        self._timers[gang] = loop.call_later(delay_s, self._look, gang, attempt, waited_s)

    def _look(self, gang: str, attempt: int, waited_s: float) -> None:
        del self._timers[gang]
        wait = self._coordinator.wait(gang)
        if wait is not None and wait.attempt != attempt:  # it has run in the meantime
            self.watch(gang)
        elif wait is not None:
            text = f"dask_p2p: {gang} has waited for {waited_s:.0f} s: {self._reason(gang, wait)}."
            logger.warning(text)
            # No warning while the inputs are being computed, which the dashboard shows.
            if wait.gangs or any(self._state(gang, rank) != "waiting" for rank in wait.missing):
                warn_client(self._scheduler, text, P2PWarning)
            self._look_after(tuning.current.gang_reminder_s, gang, attempt, waited_s)

    def _reason(self, gang: str, wait: Wait) -> str:
        if not wait.missing:
            which = ", ".join(wait.gangs[:_MOST_NAMED])
            return f"all its ranks are there, but some of their workers are still needed by {which}"
        missing = [self._rank(gang, rank) for rank in wait.missing[:_MOST_NAMED]]
        if wait.missing[_MOST_NAMED:]:
            missing.append(f"and {len(wait.missing) - _MOST_NAMED} more")
        return f"of its {wait.size} ranks, these are missing: " + "; ".join(missing)

    def _state(self, gang: str, rank: int) -> str:
        task = self._scheduler.tasks.get((gang, rank))
        return "forgotten" if task is None else task.state

    def _rank(self, gang: str, rank: int) -> str:
        state, why = self._state(gang, rank), ""
        if state == "processing":
            worker = self._scheduler.tasks[gang, rank].processing_on
            status = worker.status.name
            busy = len(worker.processing) - len(worker.long_running)
            if status != "running":
                why = f" on {worker.address}, which is {status}"
            elif busy > worker.nthreads:
                why = f" on {worker.address}, with {busy} tasks for {worker.nthreads} threads"
            else:
                why = f" on {worker.address}"
            for name, n in (self._scheduler.tasks[gang, rank].resource_restrictions or {}).items():
                why += f", and needs {n:g} of {worker.resources.get(name, 0):g} {name!r} there"
        elif state == "waiting":
            needs = sorted(str(other.key) for other in self._scheduler.tasks[gang, rank].waiting_on)
            why = f" for {len(needs)} tasks, such as {needs[0]}" if needs else ""
        elif state in ("queued", "no-worker"):
            why = ": no worker can take it now"
        return f"rank {rank}, whose task is {state}{why}"
