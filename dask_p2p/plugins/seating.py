"""Placement of a gang's ranks: spread over all workers, and within the workers' resources.

Dask places a task by its inputs, and a task that lacks units of a resource waits on its worker.
A rank would wait there for ever if another rank of its gang held the units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any
from weakref import WeakSet

from dask_p2p.engine.task import RankTask, WaitTask
from dask_p2p.plans.seats import most_seated, room

_LONG_S = 3.0  # running time of a long task, at least

#: Tasks of ranks that did not start on their last worker: they avoid workers full of long tasks.
unstarted: WeakSet[Any] = WeakSet()


def allowed_workers(scheduler: Any, ts: Any) -> set[Any]:
    """Return the workers that may run a task and have its resources, including paused workers."""
    able = {ws for ws in scheduler.workers.values() if _can_hold(ws, needs_of(ts))}
    named = able & named_workers(scheduler, ts)
    return able if ts.loose_restrictions and not named else named


def named_workers(scheduler: Any, ts: Any) -> set[Any]:
    """Return the workers that a task's worker and host restrictions allow; all if it has none."""
    workers = set(scheduler.workers.values())
    if not ts.worker_restrictions and not ts.host_restrictions:
        return workers
    addresses = ts.worker_restrictions or ()
    hosts = {scheduler.coerce_hostname(host) for host in ts.host_restrictions or ()}
    return {ws for ws in workers if ws.address in addresses or ws.host in hosts}


def _can_hold(ws: Any, needs: Mapping[str, float]) -> bool:
    """Return whether a worker has these resources, by Dask's rule: it must list each by name."""
    return all(name in ws.resources and ws.resources[name] >= n for name, n in needs.items())


def needs_of(ts: Any) -> Mapping[str, float]:
    """Return the units of resources that a task needs."""
    needs: Mapping[str, float] = ts.resource_restrictions or {}
    return needs


def is_restricted(ts: Any) -> bool:
    """Return whether a task has restrictions to workers, hosts or resources."""
    return bool(ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions)


def is_full(ws: Any, ts: Any) -> bool:
    """Return whether a task would wait on a worker for long tasks that belong to no gang."""
    long = [
        other
        for other, seconds in ws.executing.items()
        if seconds >= _LONG_S and other in ws.processing
        if not isinstance(other.run_spec, RankTask)
    ]
    in_threads = [other for other in long if other not in ws.long_running]
    return len(in_threads) >= ws.nthreads or not has_room(ws, ts, long)


def has_room(ws: Any, ts: Any, others: Iterable[Any]) -> bool:
    """Return whether a worker has the resources for a task in addition to these other tasks."""
    needs = needs_of(ts)
    left = dict(ws.resources)
    for other in others:
        for name, n in needs_of(other).items():
            left[name] = left.get(name, 0) - n
    return room(left, needs) >= 1


def place_rank(scheduler: Any, ts: Any) -> Any:
    """Return the worker for a rank of a gang; None if no worker can run it."""
    workers = scheduler.running
    if is_restricted(ts):
        allowed = workers & allowed_workers(scheduler, ts)
        if ts.loose_restrictions and not allowed:
            allowed = {ws for ws in workers if _can_hold(ws, needs_of(ts))}
        workers = allowed
    # The task that depends on all ranks leads to the other ranks.
    waiting = [each for each in ts.dependents if isinstance(each.run_spec, WaitTask)]
    siblings = set().union(*(each.dependencies for each in waiting)) - {ts}
    taken = Counter(sibling.processing_on for sibling in siblings)
    held_bytes = _held_bytes([ts])
    threads = sum(ws.nthreads for ws in workers)

    @cache
    def wanted_bytes() -> Counter[Any]:
        return _held_bytes(each for each in siblings if each.processing_on is None)

    def preference(ws: Any) -> tuple[Any, ...]:
        avoided = ts in unstarted and is_full(ws, ts)
        share = max(1, (len(siblings) + 1) * ws.nthreads // threads)
        return avoided, max(0, taken[ws] + 1 - share) / ws.nthreads, -held_bytes[ws]

    def among_equals(ws: Any) -> tuple[Any, ...]:
        loads = taken[ws] / ws.nthreads, ws.occupancy / ws.nthreads
        return wanted_bytes()[ws], *loads, ws.address

    if ts.resource_restrictions:
        by_preference = sorted(workers, key=lambda ws: (preference(ws), among_equals(ws)))
        workers = _with_room(scheduler, ts, siblings, by_preference) or workers
    preferences = {ws: preference(ws) for ws in workers}
    best = min(preferences.values(), default=None)
    equal = [ws for ws, found in preferences.items() if found == best]
    if len(equal) == 1:  # without a look at all siblings, for each of them
        return equal[0]
    return min(equal, key=among_equals, default=None)


def _held_bytes(tasks: Iterable[Any]) -> Counter[Any]:
    """Return the bytes of the tasks' inputs that each worker has."""
    held_bytes: Counter[Any] = Counter()
    for ts in tasks:
        for block in ts.dependencies:
            for ws in block.who_has or ():
                held_bytes[ws] += block.get_nbytes()
    return held_bytes


def _with_room(scheduler: Any, ts: Any, siblings: set[Any], workers: list[Any]) -> list[Any]:
    """Return a worker with room for this rank that leaves room for the others, as a list of one.

    If there is no such worker, return all workers with room for this rank.
    """
    placed: dict[Any, list[Any]] = {}
    for sibling in siblings:
        placed.setdefault(sibling.processing_on, []).append(sibling)
    roomy = [ws for ws in workers if has_room(ws, ts, placed.get(ws, ()))]
    to_come = [each for each in placed.get(None, ()) if needs_of(each) == needs_of(ts)]
    wants = Counter(frozenset(each) for each in allowed_of(scheduler, to_come))
    rooms = {
        ws.address: room(ws.resources, needs_of(ts)) - len(placed.get(ws, ()))
        for ws in scheduler.workers.values()
    }
    most = most_seated(wants, rooms)
    for ws in roomy:
        rooms[ws.address] -= 1
        if most_seated(wants, rooms) == most:
            return [ws]
        rooms[ws.address] += 1
    return roomy


def allowed_of(scheduler: Any, tasks: Iterable[Any]) -> list[frozenset[str]]:
    """Return the addresses of the workers that may run each task."""
    known: dict[Any, frozenset[str]] = {}
    found = []
    for ts in tasks:
        restrictions = ts.worker_restrictions, ts.host_restrictions, ts.resource_restrictions
        key = (*map(_hashable, restrictions), ts.loose_restrictions)
        if key not in known:
            known[key] = frozenset(ws.address for ws in allowed_workers(scheduler, ts))
        found.append(known[key])
    return found


def _hashable(restrictions: Any) -> frozenset[Any]:
    items = restrictions.items() if isinstance(restrictions, dict) else restrictions
    return frozenset(items or ())
