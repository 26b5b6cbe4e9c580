"""Changes to how Dask's scheduler treats this package's tasks; docs/design.md has the reasons.

The scheduler does not reject a task for the size of its whole dependencies, and it places a task by
the regions that the task reads. In a transpose all workers hold about the same number of these
bytes, so tasks are spread evenly. `dask_p2p.plugins.seating` places the ranks of a gang.

An `Overlay` replaces each private method of Dask's scheduler, and forwards all other calls to the
original method.
`tests/plugins/test_canary.py` detects changes of these methods in new Dask releases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from dask_p2p.engine.task import PLUGIN_NAME, RankTask, ReferenceTask
from dask_p2p.plugins.seating import place_rank

#: Method of Dask's scheduler that rejects tasks larger than a worker's memory.
MEMORY_CHECK = "_add_to_processing"
_PLACE = "decide_worker_non_rootish"
_ROOTISH = "is_rootish"
# Workers rank equal if they hold less than the best one by at most this fraction of a task's input.
# Slabs differ by a row, and a transpose must not send all tasks to the holder of the longest slab.
_TOLERANCE = 0.1
_MOST_SOURCES = 4096  # most sources of a ranked task; with more, a task reads from all workers


class Overlay:
    """Replaces one method of Dask's scheduler, until `is_wanted` returns False."""

    def __init__(
        self,
        scheduler: Any,
        method: str,
        decide: Callable[..., Any],  # the replacement, called with Dask's method and the arguments
        is_wanted: Callable[[], bool],  # called each time; if False, the overlay removes itself
    ) -> None:
        current = getattr(scheduler, method)
        # An earlier overlay is no longer wanted, and has not been called since.
        self.original: Callable[..., Any] = (
            current.original if isinstance(current, Overlay) else current
        )
        self._scheduler, self._method = scheduler, method
        self._decide, self._is_wanted = decide, is_wanted
        setattr(scheduler, method, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_wanted():
            return self._decide(self.original, *args, **kwargs)
        self.remove()
        return self.original(*args, **kwargs)

    def remove(self) -> None:
        """Restore the method, unless other code has replaced it since."""
        if vars(self._scheduler).get(self._method) is self:
            delattr(self._scheduler, self._method)
            if getattr(self._scheduler, self._method) != self.original:  # other code's
                setattr(self._scheduler, self._method, self.original)


def overlay_memory_check(
    scheduler: Any,
    is_wanted: Callable[[], bool],
    obstacle: Callable[[str], Exception | None],
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

    Overlay(scheduler, MEMORY_CHECK, decide, is_wanted)


def overlay_placement(scheduler: Any, is_wanted: Callable[[], bool]) -> None:
    """Place this package's tasks by the regions that they read; see `Overlay`.

    Dask still selects the candidates: workers that hold a dependency, within restrictions and
    resources. Only their order changes. Work stealing is unchanged.
    """

    def is_placed_here(ts: Any) -> bool:
        task = ts.run_spec
        is_ours = isinstance(task, ReferenceTask) and task.is_readable
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
        held = held_elements(ts.run_spec, {dep.key: dep.who_has or () for dep in ts.dependencies})
        enough = max(held.values(), default=0) - _TOLERANCE * sum(held.values())

        def objective(ts: Any, ws: Any) -> tuple[Any, ...]:
            return (held[ws] < enough, ws.occupancy / ws.nthreads, ws.nbytes)

        before = vars(scheduler).get("worker_objective")
        scheduler.worker_objective = objective
        try:
            return original(ts)
        finally:
            if before is None:
                del scheduler.worker_objective
            else:
                scheduler.worker_objective = before

    Overlay(scheduler, _ROOTISH, is_rootish, is_wanted)
    Overlay(scheduler, _PLACE, place, is_wanted)


def held_elements(task: ReferenceTask, who_has: dict[Any, Any]) -> Counter[Any]:
    """Return, by worker, the number of a task's input elements that the worker holds.

    `who_has` maps the key of each dependency to its holders.
    """
    held: Counter[Any] = Counter()
    for key, elements in task.reads():
        for worker in who_has[key]:
            held[worker] += elements
    return held


def _fail(scheduler: Any, ts: Any, ws: Any, error: Exception, stimulus_id: str) -> Any:
    """Set a task that was just placed to "erred", as Dask's own check does."""
    from distributed.protocol.pickle import dumps

    return scheduler._transition(
        ts.key,
        "erred",
        exception=dumps(error),
        cause=ts.key,
        stimulus_id=stimulus_id,
        worker=ws.address,
    )
