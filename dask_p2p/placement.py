"""How Dask's scheduler treats this package's tasks differently.

Memory
    Dask refuses a task whose whole dependencies are larger than the memory of its worker. For this
    package's tasks only regions move, and each task checks on its worker that they fit
    (`dask_p2p.memory`).
Place
    Dask places a task by the bytes of its whole dependencies, and weighs them against the time that
    other tasks take. A block with rims would often go where only a rim is. Here the worker that
    holds most of the *regions* comes first, then the one that has least to do. In a transpose all
    workers hold about as much, so only the latter counts, and tasks are spread evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from dask_p2p.overlay import Overlay, has_method
from dask_p2p.task import PLUGIN_NAME, AssembleTask

__all__ = ["held_elements", "overlay_memory_check", "overlay_placement"]

_MEMORY_CHECK = "_add_to_processing"
_PLACE = "decide_worker_non_rootish"
_ROOTISH = "is_rootish"
# A worker counts as good as the best one if it holds less by at most this share of what is read.
# Slabs differ by a row, and a transpose must not send all tasks to the holder of the longest one.
_TOLERANCE = 0.1
_MOST_SOURCES = 4096  # of a task that is ranked; one that reads from more reads from everywhere


def overlay_memory_check(
    scheduler: Any,
    is_wanted: Callable[[], bool],
    obstacle: Callable[[str], Exception | None],
) -> Overlay | None:
    """Leave Dask's check of whole dependencies out for this package's tasks.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    is_wanted : callable
        See `Overlay`.
    obstacle : callable
        Returns why a worker, by address, cannot be sent such a task; None if it can.

    Returns
    -------
    Overlay or None
        None if this Dask has another check, or none: then it is left alone.
    """
    if not has_method(scheduler, _MEMORY_CHECK, ["ts", "ws", "stimulus_id"]):
        return None

    def decide(original: Any, ts: Any, ws: Any, stimulus_id: str) -> Any:
        if not isinstance(ts.run_spec, AssembleTask) or PLUGIN_NAME not in scheduler.worker_plugins:
            return original(ts, ws, stimulus_id=stimulus_id)
        limit_bytes, ws.memory_limit = ws.memory_limit, 0  # that is, none
        try:
            processing = original(ts, ws, stimulus_id=stimulus_id)
        finally:
            ws.memory_limit = limit_bytes
        error = obstacle(ws.address)
        return processing if error is None else _fail(scheduler, ts, ws, error, stimulus_id)

    return Overlay(scheduler, _MEMORY_CHECK, decide, is_wanted)


def overlay_placement(scheduler: Any, is_wanted: Callable[[], bool]) -> list[Overlay]:
    """Place this package's tasks by the regions that they read.

    Dask's own choice among the workers stands: those that hold something, within restrictions and
    resources. Only their order changes. Stealing goes on as it does for other tasks.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    is_wanted : callable
        See `Overlay`.

    Returns
    -------
    list of Overlay
        Empty if this Dask places tasks in another way: then it is left alone.
    """
    if not (
        has_method(scheduler, _PLACE, ["ts"])
        and has_method(scheduler, _ROOTISH, ["ts"])
        and has_method(scheduler, "worker_objective", ["ts", "ws"])
    ):
        return []

    def is_placed_here(ts: Any) -> bool:
        task = ts.run_spec
        is_ours = isinstance(task, AssembleTask) and task.is_readable
        return is_ours and PLUGIN_NAME in scheduler.worker_plugins

    def is_rootish(original: Any, ts: Any) -> bool:
        # Few blocks that become many: Dask would take them for tasks that read nothing.
        reads = bool(ts.dependencies) and is_placed_here(ts)
        return not reads and bool(original(ts))

    def place(original: Any, ts: Any) -> Any:
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

    return [
        Overlay(scheduler, _ROOTISH, is_rootish, is_wanted),
        Overlay(scheduler, _PLACE, place, is_wanted),
    ]


def held_elements(task: AssembleTask, who_has: dict[Any, Any]) -> Counter[Any]:
    """Return how much of what a task reads each worker holds, in elements.

    Parameters
    ----------
    task
        Whose input blocks are to be read.
    who_has
        For each of their keys the workers that hold it.
    """
    held: Counter[Any] = Counter()
    plan, index, blocks = task.plan, task.index, task.blocks
    for key, elements in zip(blocks.items, plan.source_elements(index), strict=True):
        for worker in who_has[key]:
            held[worker] += elements
    return held


def _fail(scheduler: Any, ts: Any, ws: Any, error: Exception, stimulus_id: str) -> Any:
    """Fail a task that has just been placed, as Dask's own check does."""
    from distributed.protocol.pickle import dumps

    return scheduler._transition(
        ts.key,
        "erred",
        exception=dumps(error),
        cause=ts.key,
        stimulus_id=stimulus_id,
        worker=ws.address,
    )
