"""Changes to how Dask's scheduler treats this package's tasks; docs/design.md has the reasons.

The scheduler does not reject a task for the size of its whole dependencies, and it places a task by
the regions that the task reads. In a transpose all workers hold about the same number of these
bytes, so tasks are spread evenly. A worker that holds more, but not nearly all, gets its share.

An `Overlay` replaces each private method of Dask's scheduler, and forwards all other calls to the
original method. It stays when the plugin is removed, and then forwards all calls.
`tests/plugins/test_canary.py` detects changes of these methods in new Dask releases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import inf
from typing import Any
from weakref import WeakSet

from dask_p2p.engine.task import PLUGIN_NAME, RankTask, ReferenceTask, WaitTask

# Workers rank equal if they hold less than the best one by at most this fraction of a task's input.
# Slabs differ by a row, and a transpose must not send all tasks to the holder of the longest slab.
_TOLERANCE = 0.1
# A worker with this fraction of a task's input is preferred though it has its share of the layer.
_NEARLY_ALL = 0.75
_MOST_SOURCES = 4096  # most sources of a ranked task; with more, a task reads from all workers


class Overlay:
    """A function in place of Dask's or of an earlier overlay, while `is_wanted` returns True."""

    def __init__(
        self,
        replaced: Callable[..., Any],
        decide: Callable[..., Any],  # the replacement, called with Dask's function and arguments
        is_wanted: Callable[[], bool],
    ) -> None:
        self._original: Callable[..., Any] = getattr(replaced, "_original", replaced)
        self._decide, self._is_wanted = decide, is_wanted
        self.__name__ = getattr(self._original, "__name__", "overlay")  # Dask reads it of handlers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_wanted():
            return self._decide(self._original, *args, **kwargs)
        return self._original(*args, **kwargs)


def overlay_memory_check(
    scheduler: Any, is_wanted: Callable[[], bool], obstacle: Callable[[str], Exception | None]
) -> None:
    """Skip Dask's check of whole dependencies for this package's tasks; see `Overlay`.

    `obstacle` returns the error of a worker, by address, that cannot run such tasks; else None.
    """

    def decide(original: Any, ts: Any, ws: Any, stimulus_id: str) -> Any:
        is_ours = isinstance(ts.run_spec, ReferenceTask)
        if not is_ours or PLUGIN_NAME not in scheduler.worker_plugins:
            return original(ts, ws, stimulus_id=stimulus_id)
        limit_bytes, ws.memory_limit = ws.memory_limit, 0  # 0: no limit
        try:
            processing = original(ts, ws, stimulus_id=stimulus_id)
        finally:
            ws.memory_limit = limit_bytes
        error = obstacle(ws.address)
        return processing if error is None else _fail(scheduler, ts, ws, error, stimulus_id)

    scheduler._add_to_processing = Overlay(scheduler._add_to_processing, decide, is_wanted)


def overlay_placement(scheduler: Any, is_wanted: Callable[[], bool]) -> None:
    """Place this package's tasks by the regions that they read; see `Overlay`.

    Dask still selects the candidates: workers that hold a dependency, within restrictions and
    resources. Only their order changes. Work stealing is unchanged.
    """

    def is_placed_here(ts: Any) -> bool:
        task = ts.run_spec
        is_ours = isinstance(task, ReferenceTask)
        return is_ours and PLUGIN_NAME in scheduler.worker_plugins

    def is_rootish(original: Any, ts: Any) -> bool:
        if isinstance(ts.run_spec, RankTask):
            return False
        # Where few blocks become many, Dask would treat tasks as roots without dependencies.
        reads = bool(ts.dependencies) and is_placed_here(ts)
        return not reads and bool(original(ts))

    def place(original: Any, ts: Any) -> Any:
        if isinstance(ts.run_spec, RankTask):
            return place_rank(scheduler, ts)
        if not is_placed_here(ts) or not 0 < len(ts.dependencies) <= _MOST_SOURCES:
            return original(ts)
        elements_of = count_held_elements(
            ts.run_spec, {dep.key: dep.who_has or () for dep in ts.dependencies}
        )
        most_elements, total = max(elements_of.values(), default=0), sum(elements_of.values())
        enough = most_elements - _TOLERANCE * total
        preferred = [ws for ws, elements in elements_of.items() if elements >= enough]
        if len(preferred) < len(elements_of) and most_elements < _NEARLY_ALL * total:
            threads = sum(ws.nthreads for ws in elements_of)
            if all(_has_share(ts, ws, threads) for ws in preferred):
                enough = 0

        def objective(ts: Any, ws: Any) -> tuple[Any, ...]:
            return (elements_of[ws] < enough, ws.occupancy / ws.nthreads, ws.nbytes)

        before = vars(scheduler).get("worker_objective")
        scheduler.worker_objective = objective
        try:
            return original(ts)
        finally:
            if before is None:
                del scheduler.worker_objective
            else:
                scheduler.worker_objective = before

    scheduler.is_rootish = Overlay(scheduler.is_rootish, is_rootish, is_wanted)
    scheduler.decide_worker_non_rootish = Overlay(
        scheduler.decide_worker_non_rootish, place, is_wanted
    )


def count_held_elements(task: ReferenceTask, who_has: dict[Any, Any]) -> Counter[Any]:
    """Return, by worker, the number of a task's input elements that the worker holds.

    `who_has` maps the key of each dependency to its holders.
    """
    elements_of: Counter[Any] = Counter()
    for key, elements in task.reads():
        for worker in who_has[key]:
            elements_of[worker] += elements
    return elements_of


def _has_share(ts: Any, ws: Any, threads: int) -> bool:
    placed = sum(task.group is ts.group for task in ws.processing)
    return placed * threads >= len(ts.group) * int(ws.nthreads)


def _fail(scheduler: Any, ts: Any, ws: Any, error: Exception, stimulus_id: str) -> Any:
    """Set a task that was just placed to "erred", as Dask's own check does."""
    from distributed.protocol.pickle import dumps

    return scheduler._transition(
        ts.key,
        "erred",
        stimulus_id=stimulus_id,
        exception=dumps(error),
        cause=ts.key,
        worker=ws.address,
    )


# Placement of a gang's ranks: spread over all workers, and within the workers' resources.
#
# Dask places a task by its inputs, and a task that lacks units of a resource waits on its worker.
# A rank would wait there for ever if another rank of its gang held the units.

_LONG_S = 3.0  # running time of a long task, at least

#: Tasks of ranks that did not start on their last worker: they avoid workers full of long tasks.
unstarted: WeakSet[Any] = WeakSet()


def allowed_workers(scheduler: Any, ts: Any) -> set[Any]:
    """Return the workers that may run a task and have its resources, including paused workers."""
    able = {ws for ws in scheduler.workers.values() if _can_hold(ws, resource_needs(ts))}
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


def resource_needs(ts: Any) -> Mapping[str, float]:
    """Return the units of resources that a task needs."""
    needs: Mapping[str, float] = ts.resource_restrictions or {}
    return needs


def is_restricted(ts: Any) -> bool:
    """Return whether a task has restrictions to workers, hosts or resources."""
    return bool(ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions)


def is_full(ws: Any, ts: Any) -> bool:
    """Return whether a task would wait on a worker for long tasks that belong to no gang."""
    long = [
        task
        for task, seconds in ws.executing.items()
        if seconds >= _LONG_S and task in ws.processing
        if not isinstance(task.run_spec, RankTask)
    ]
    in_threads = [task for task in long if task not in ws.long_running]
    return len(in_threads) >= ws.nthreads or not has_room(ws, ts, long)


def has_room(ws: Any, ts: Any, placed_tasks: Iterable[Any]) -> bool:
    """Return whether a worker has the resources for a task in addition to these other tasks."""
    needs = resource_needs(ts)
    free_units = dict(ws.resources)
    for placed_task in placed_tasks:
        for name, n in resource_needs(placed_task).items():
            free_units[name] = free_units.get(name, 0) - n
    return room(free_units, needs) >= 1


def place_rank(scheduler: Any, ts: Any) -> Any:
    """Return the worker for a rank of a gang; None if no worker can run it."""
    workers = scheduler.running
    if is_restricted(ts):
        allowed = workers & allowed_workers(scheduler, ts)
        if ts.loose_restrictions and not allowed:
            allowed = {ws for ws in workers if _can_hold(ws, resource_needs(ts))}
        workers = allowed
    # The task that depends on all ranks leads to the other ranks.
    waiting = [dependent for dependent in ts.dependents if isinstance(dependent.run_spec, WaitTask)]
    siblings = set().union(*(dependent.dependencies for dependent in waiting)) - {ts}
    rank_counts = Counter(sibling.processing_on for sibling in siblings)
    held_bytes = _count_held_bytes([ts])
    threads = sum(ws.nthreads for ws in workers)

    @cache
    def wanted_bytes() -> Counter[Any]:
        return _count_held_bytes(sibling for sibling in siblings if sibling.processing_on is None)

    def preference(ws: Any) -> tuple[Any, ...]:
        avoided = ts in unstarted and is_full(ws, ts)
        share = max(1, (len(siblings) + 1) * ws.nthreads // threads)
        return avoided, max(0, rank_counts[ws] + 1 - share) / ws.nthreads, -held_bytes[ws]

    def among_equals(ws: Any) -> tuple[Any, ...]:
        loads = rank_counts[ws] / ws.nthreads, ws.occupancy / ws.nthreads
        return wanted_bytes()[ws], *loads, ws.address

    if ts.resource_restrictions:
        by_preference = sorted(workers, key=lambda ws: (preference(ws), among_equals(ws)))
        workers = _find_roomy_worker(scheduler, ts, siblings, by_preference) or workers
    preferences = {ws: preference(ws) for ws in workers}
    best = min(preferences.values(), default=None)
    equal = [ws for ws, worker_preference in preferences.items() if worker_preference == best]
    if len(equal) == 1:  # without a look at all siblings, for each of them
        return equal[0]
    return min(equal, key=among_equals, default=None)


def _count_held_bytes(tasks: Iterable[Any]) -> Counter[Any]:
    held_bytes: Counter[Any] = Counter()
    for ts in tasks:
        for block in ts.dependencies:
            for ws in block.who_has or ():
                held_bytes[ws] += block.get_nbytes()
    return held_bytes


def _find_roomy_worker(
    scheduler: Any, ts: Any, siblings: set[Any], workers: list[Any]
) -> list[Any]:
    """Return a worker with room for this rank that leaves room for the others, as a list of one.

    If there is no such worker, return all workers with room for this rank.
    """
    placed: dict[Any, list[Any]] = {}
    for sibling in siblings:
        placed.setdefault(sibling.processing_on, []).append(sibling)
    roomy = [ws for ws in workers if has_room(ws, ts, placed.get(ws, ()))]
    to_come = [
        sibling for sibling in placed.get(None, ()) if resource_needs(sibling) == resource_needs(ts)
    ]
    wants = Counter(frozenset(addresses) for addresses in allowed_addresses(scheduler, to_come))
    rooms = {
        ws.address: room(ws.resources, resource_needs(ts)) - len(placed.get(ws, ()))
        for ws in scheduler.workers.values()
    }
    rank_limit = max_matching(wants, rooms)
    for ws in roomy:
        rooms[ws.address] -= 1
        if max_matching(wants, rooms) == rank_limit:
            return [ws]
        rooms[ws.address] += 1
    return roomy


def allowed_addresses(scheduler: Any, tasks: Iterable[Any]) -> list[frozenset[str]]:
    """Return the addresses of the workers that may run each task."""
    cache: dict[Any, frozenset[str]] = {}
    addresses = []
    for ts in tasks:
        restrictions = ts.worker_restrictions, ts.host_restrictions, ts.resource_restrictions
        # Names, or resources with their units.
        hashable = (
            frozenset(names.items() if isinstance(names, dict) else names or ())
            for names in restrictions
        )
        key = (*hashable, ts.loose_restrictions)
        if key not in cache:
            cache[key] = frozenset(ws.address for ws in allowed_workers(scheduler, ts))
        addresses.append(cache[key])
    return addresses


_ROUNDING = 1e-9  # of units that are fractions, like 0.1


def room(units: Mapping[str, float], needs: Mapping[str, float]) -> float:
    """Return how many ranks with these needs a worker with these units can run at a time.

    >>> room({"GPU": 2, "memory": 10}, {"GPU": 1, "memory": 8})
    1
    """
    counts = [int(units.get(name, 0) / n + _ROUNDING) for name, n in needs.items() if n > 0]
    return min(counts, default=inf)


def ranks_for(threads: Sequence[int], size_bytes: int, least_bytes: int) -> int:
    """Return the number of ranks for an array, on workers with these numbers of threads.

    Each worker runs at least one rank, and at most one in each thread. It runs several ranks only
    if each of them gets `least_bytes` of the array.

    >>> [ranks_for([4, 4], mib << 20, 1 << 20) for mib in (1, 4, 100)]
    [2, 4, 8]
    """
    ranks_per_worker = size_bytes // (least_bytes * max(1, len(threads)))
    return max(1, sum(max(1, min(count, ranks_per_worker)) for count in threads))


def max_matching(wants: Mapping[frozenset[str], int], rooms: Mapping[str, float]) -> int:
    """Return how many ranks find room, if they are placed as well as possible.

    `wants` has the number of ranks by the workers that may run them, `rooms` the ranks that each
    worker can run.

    >>> max_matching({frozenset("ab"): 1, frozenset("a"): 1}, {"a": 1, "b": 1})
    2
    """
    free = {worker: rooms[worker] for workers in wants for worker in workers}
    seats: dict[frozenset[str], Counter[str]] = {workers: Counter() for workers in wants}
    seated = 0
    for workers, count in wants.items():
        for worker in workers:  # most find room without a move
            rank_count = max(0, int(min(free[worker], count)))
            free[worker] -= rank_count
            seats[workers][worker] += rank_count
            count -= rank_count
            seated += rank_count
        while count and _augment(workers, free, seats):
            count -= 1
            seated += 1
    return seated


def _augment(
    workers: frozenset[str], free: dict[str, float], seats: dict[frozenset[str], Counter[str]]
) -> bool:
    """Seat one more rank, by moving ranks that others workers may run, too."""
    predecessors: dict[frozenset[str], tuple[frozenset[str], str] | None] = {workers: None}
    queue, visited = [workers], set[str]()
    for group in queue:
        for worker in group - visited:
            visited.add(worker)
            if free[worker] > 0:
                free[worker] -= 1
                # On the way to it, a rank of each group takes the seat that one of the next left.
                while (step := predecessors[group]) is not None:
                    before, freed_worker = step
                    seats[group][worker] += 1
                    seats[group][freed_worker] -= 1
                    group, worker = before, freed_worker
                seats[group][worker] += 1
                return True
            for neighbour, seat_counts in seats.items():
                if neighbour not in predecessors and seat_counts[worker] > 0:
                    predecessors[neighbour] = group, worker
                    queue.append(neighbour)
    return False
