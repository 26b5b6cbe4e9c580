"""Gangs from the arrival of their graph until they run. A gang that can never run is ended.

Ranks wait for each other, so a gang that cannot run as a whole would wait for ever. It ends with a
`SectionError` if the workers lack resources for all its ranks. A rank behind long tasks moves to a
worker with a free thread. Users are warned of a gang that waits for long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask_p2p.errors import SectionError
from dask_p2p.inputs import pluralize
from dask_p2p.plugins.dask_internals import warn_client
from dask_p2p.plugins.gangs.coordinator import COMMIT, Coordinator, Wait
from dask_p2p.plugins.placement import (
    allowed_addresses,
    allowed_workers,
    has_room,
    is_full,
    is_restricted,
    max_matching,
    named_workers,
    resource_needs,
    room,
    unstarted,
)
from dask_p2p.types import Key

logger = logging.getLogger(__name__)

_CHECK_S = 0.5  # between two checks
REMINDER_S = 60.0  # between two warnings of one wait
_JOINING_S = 1.0  # patience after the graph or a worker has arrived: more workers may join
_LOST_S = 300.0  # longest wait of a gang that could run, after a worker was lost
_RESTART_S = 30.0  # patience if a worker was lost just before: its nanny may restart it
_ADAPTIVE_S = 30.0  # time after a request for its target, in which a cluster counts as adaptive


@dataclass
class _WaitingGang:
    """State of a gang that gathers its ranks."""

    could_run: bool = False  # True once there were workers for all ranks
    lacking_s: float | None = None  # start of the lack of workers
    is_warned: bool = False
    attempt: int | None = None  # number of attempts so far, if ranks wait
    waiting_s: float = 0.0  # start of this wait
    warn_s: float = 0.0  # time of the next warning of this wait


class Gathering:
    """Checks all gangs that do not run, twice a second."""

    def __init__(
        self,
        scheduler: Any,
        coordinator: Coordinator,  # of all gangs
        warn_after_s: float,  # wait of a gang for workers or ranks, before users are warned
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._coordinator = scheduler, coordinator
        self._warn_after_s, self._now_s = warn_after_s, now_s
        self._gangs: dict[str, _WaitingGang] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._joined_s = self._lost_s = self._asked_s = float("-inf")
        self._lost = 0  # lost workers that were not replaced

    def add(self, keys: Iterable[Any]) -> bool:
        """Begin to check the gangs among new tasks. Return whether there are gangs to check."""
        for name in _find_gangs(keys):
            self._gangs.setdefault(name, _WaitingGang())
        if self._gangs and self._timer is None:
            self._schedule_check()
        return bool(self._gangs)

    def forget(self, key: Any) -> None:
        for gang in _find_gangs([key]):
            self._gangs.pop(gang, None)

    def close(self) -> None:
        self._gangs.clear()
        if self._timer is not None:
            self._timer.cancel()

    def record_joined(self) -> None:
        """Record that a worker has joined: more may follow."""
        self._joined_s, self._lost = self._now_s(), max(0, self._lost - 1)

    def record_lost(self) -> None:
        """Record that a worker was lost: its nanny may restart it."""
        self._lost_s, self._lost = self._now_s(), self._lost + 1

    def record_target(self) -> None:
        self._asked_s = self._now_s()

    def _schedule_check(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check_periodically)

    def _check_periodically(self) -> None:
        self._timer = None
        self.check_gangs()
        if self._gangs:
            self._schedule_check()

    def check_gangs(self) -> None:
        """End gangs that can never run, move ranks that do not start where they are, and warn."""
        for name, gang in tuple(self._gangs.items()):
            self._warn_of_wait(name, gang)
            commit = self._scheduler.tasks.get((name, COMMIT))
            # Later the ranks have returned, or one has failed; the gang may be tried once more.
            is_gathering = commit is not None and commit.state == "waiting"
            if not is_gathering or self._coordinator.has_started(name):
                gang.lacking_s = None
                gang.could_run = is_gathering or gang.could_run
                continue
            tasks = [ts for ts in commit.dependencies if ts.key[0] == name]
            if reason := self._find_shortage(name, gang, tasks):
                self._end(commit, reason)
            else:
                self._move(name, tasks)

    def _find_shortage(self, name: str, gang: _WaitingGang, tasks: Sequence[Any]) -> str:
        """Return a text about lacking resources or workers, once there is no use in waiting."""
        text = ""
        if self._scheduler.workers and any(map(is_restricted, tasks)):
            text = describe_shortage(self._scheduler, name, tasks)
        now_s = self._now_s()
        if not text:
            gang.could_run = gang.could_run or bool(self._scheduler.workers)
            gang.lacking_s = None
            return ""
        since_s = gang.lacking_s = now_s if gang.lacking_s is None else gang.lacking_s
        is_restarted = self._lost and now_s - self._lost_s < _RESTART_S
        patience_s = _RESTART_S if is_restarted else _JOINING_S
        patience_s = _LOST_S if gang.could_run else patience_s
        is_adaptive = now_s - self._asked_s < _ADAPTIVE_S
        if not is_adaptive and now_s - max(since_s, self._joined_s) >= patience_s:
            return text
        if now_s - since_s >= self._warn_after_s and not gang.is_warned:
            gang.is_warned = True
            warn_client(self._scheduler, f"dask_p2p: {text}")
        return ""

    def _warn_of_wait(self, name: str, gang: _WaitingGang) -> None:
        """Warn of ranks that have waited for long, and again while they wait."""
        wait, now_s = self._coordinator.wait(name), self._now_s()
        if wait is None or wait.attempt != gang.attempt:  # the gang may have run in the meantime
            gang.attempt = None if wait is None else wait.attempt
            gang.waiting_s, gang.warn_s = now_s, now_s + self._warn_after_s
        elif now_s >= gang.warn_s:
            gang.warn_s = now_s + REMINDER_S
            tasks = {rank: self._scheduler.tasks.get((name, rank)) for rank in wait.missing}
            reason = _describe_wait(wait, tasks)
            text = f"dask_p2p: {name} has waited for {now_s - gang.waiting_s:.0f} s: {reason}."
            logger.warning(text)
            # No warning while the inputs are being computed, which the dashboard shows.
            if wait.gangs or any(ts is None or ts.state != "waiting" for ts in tasks.values()):
                warn_client(self._scheduler, text)

    def _end(self, commit: Any, reason: str) -> None:
        from distributed.protocol.pickle import dumps

        logger.warning("%s", reason)
        commit.exception, commit.exception_text = dumps(SectionError(reason)), reason
        commit.exception_blame, commit.erred_on = commit, set()
        stimulus = f"p2p-section-ended-{time.time()}"
        self._scheduler.transitions({commit.key: "erred"}, stimulus_id=stimulus)

    def _move(self, name: str, tasks: Sequence[Any]) -> None:
        """Release ranks that would wait for long tasks, if another worker can run them now."""
        if any(ts.state == "waiting" for ts in tasks):
            return  # for inputs: the worker may be free when these are computed
        waiting_ranks = self._coordinator.waiting(name)
        stuck = []
        for ts in tasks:
            ws = ts.processing_on
            if ts.key[1] in waiting_ranks or ts.state != "processing" or not is_full(ws, ts):
                continue
            free = (self._scheduler.running & allowed_workers(self._scheduler, ts)) - {ws}
            placed = [sibling for sibling in tasks if sibling.processing_on in free]
            if any(
                not is_full(candidate, ts)
                and has_room(candidate, ts, [o for o in placed if o.processing_on is candidate])
                for candidate in free
            ):
                unstarted.add(ts)
                stuck.append(ts.key)
        if stuck:
            stimulus = f"p2p-section-moved-{time.time()}"
            self._scheduler.transitions(dict.fromkeys(stuck, "released"), stimulus_id=stimulus)


def _find_gangs(keys: Iterable[Key]) -> list[str]:
    return [str(key[0]) for key in keys if isinstance(key, tuple) and key[1:] == (COMMIT,)]


_MOST_NAMED = 4


def _describe_wait(wait: Wait, tasks: Mapping[int, Any]) -> str:
    """Return why a gang waits; `tasks` are those of its missing ranks, or None."""
    if not wait.missing:
        gangs = ", ".join(wait.gangs[:_MOST_NAMED])
        return f"all its ranks are there, but some of their workers are still needed by {gangs}"
    missing = [_describe_missing(rank, tasks[rank]) for rank in wait.missing[:_MOST_NAMED]]
    if wait.missing[_MOST_NAMED:]:
        missing.append(f"and {len(wait.missing) - _MOST_NAMED} more")
    return f"of its {wait.size} ranks, these are missing: " + "; ".join(missing)


def _describe_missing(rank: int, ts: Any) -> str:
    state, why = "forgotten" if ts is None else ts.state, ""
    if state == "processing":
        worker = ts.processing_on
        status = worker.status.name
        busy = len(worker.processing) - len(worker.long_running)
        why = f" on {worker.address}"
        if status != "running":
            why += f", which is {status}"
        elif busy > worker.nthreads:
            why += f", with {busy} tasks for {worker.nthreads} threads"
        for name, n in (ts.resource_restrictions or {}).items():
            why += f", and needs {n:g} of {worker.resources.get(name, 0):g} {name!r} there"
    elif state == "waiting":
        needs = sorted(str(dependency.key) for dependency in ts.waiting_on)
        why = f" for {len(needs)} tasks, such as {needs[0]}" if needs else ""
    elif state in ("queued", "no-worker"):
        why = ": no worker can take it now"
    return f"rank {rank}, whose task is {state}{why}"


def describe_shortage(scheduler: Any, gang: str, tasks: Sequence[Any]) -> str:
    """Return why the present workers cannot run all tasks of a gang at the same time, and a remedy.

    The text is empty if they can, once other tasks have ended. Each set of needed units is checked
    alone. So the text may be empty for ranks that need different units and cannot run together.
    """
    kinds: dict[tuple[tuple[str, float], ...], list[Any]] = {}
    for ts in tasks:
        kinds.setdefault(tuple(sorted(resource_needs(ts).items())), []).append(ts)
    for needs, alike in kinds.items():
        if text := _describe_lack(scheduler, f"{gang} has {len(tasks)} ranks", dict(needs), alike):
            return text
    return ""


def _describe_lack(
    scheduler: Any, gang: str, needs: Mapping[str, float], tasks: Sequence[Any]
) -> str:
    workers = scheduler.workers.values()
    wants = Counter(allowed_addresses(scheduler, tasks))
    rank_limit = max_matching(wants, {ws.address: room(ws.resources, needs) for ws in workers})
    if rank_limit == len(tasks):
        return ""
    named = [ts.loose_restrictions or named_workers(scheduler, ts) for ts in tasks]
    restrictions = next(filter(None, map(_restrictions, tasks)), "")
    if not needs or not all(named):
        excess = named.count(set()) or len(tasks) - rank_limit
        return (
            f"{gang}, which run at the same time, and {excess} of them are restricted to workers "
            f"that the cluster does not have ({restrictions}). Name workers of the cluster by "
            f"workers=, or give allow_other_workers=True."
        )
    among = set(workers) if True in named else set().union(*(group for group in named if group))
    fits = {name: sum(room(ws.resources, {name: needs[name]}) for ws in among) for name in needs}
    name = min(fits, key=lambda name: fits[name])
    have = sum(ws.resources.get(name, 0) for ws in among)
    may = f" that may run them ({restrictions})" if restrictions else ""
    enough = f"enough for {pluralize(rank_limit, 'rank')}" if rank_limit else "too few for any rank"
    fewer = f"Give ranks={rank_limit}, or start" if rank_limit else "Start"
    return (
        f"{gang}, which run at the same time. {len(tasks)} of them need "
        f"{pluralize(needs[name], 'unit')} of resource {name!r} each, and the workers{may} have "
        f"{pluralize(have, 'unit')} in all, {enough}. "
        f"{fewer} workers with more units of {name!r} and wait for them with "
        f"client.wait_for_workers."
    )


def _restrictions(ts: Any) -> str:
    if ts.loose_restrictions:
        return ""
    named = sorted(map(str, {*(ts.worker_restrictions or ()), *(ts.host_restrictions or ())}))
    return ", ".join(named[:_MOST_NAMED]) + (", ..." if len(named) > _MOST_NAMED else "")
