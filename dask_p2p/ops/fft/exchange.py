"""One exchange of a transform: assembles blocks in a given axis order and transforms them."""

from __future__ import annotations

from collections import deque
from typing import Any

from dask_p2p.config import checked_options
from dask_p2p.engine.task import AssembleTask
from dask_p2p.geometry import Chunks
from dask_p2p.graph.arrays import is_expression, planned_array
from dask_p2p.graph.layer import Epilogue, PlannedLayer
from dask_p2p.graph.libraries import rechunk_by_tasks
from dask_p2p.ops.rechunk import plan_redistribution
from dask_p2p.plans.reordered import ReorderedPlan
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.types import DaskArray

PREFIX = "p2p-fft"


def assembled(x: DaskArray, grid: Chunks, order: tuple[int, ...], epilogue: Epilogue) -> DaskArray:
    """Return the array of transformed blocks; `order` is the order of a block's axes in memory."""
    register_if_possible()
    options = checked_options()
    in_memory = tuple(grid[axis] for axis in order)
    plan = plan_redistribution(x.chunks, order, in_memory, options)
    reordered = ReorderedPlan(plan, order)
    together = tuple(
        sizes if larger == before else larger
        for sizes, larger, before in zip(epilogue.chunks, reordered.chunks, grid, strict=True)
    )
    x = planned_array(
        PREFIX, x, reordered, options, Epilogue(epilogue.function, together, epilogue.meta)
    )
    return rechunk_by_tasks(x, epilogue.chunks)  # views, where the plan made larger blocks


def chunks_before(x: DaskArray) -> Chunks | None:
    """Return the chunks of the array whose transform `x` was computed from; None if not found.

    The search goes up the graph through the tasks that changed the spectrum.
    """
    if is_expression(x):
        return _chunks_before_expression(x.expr)
    layers = getattr(x.dask, "layers", {})
    waiting = deque([x.name])
    seen = {x.name}
    while waiting:
        name = waiting.popleft()
        found = None
        while name.startswith(PREFIX) and name in layers:
            task = next(iter(layers[name].values()))
            if not isinstance(task, AssembleTask) or not isinstance(task.plan, ReorderedPlan):
                break
            found, (name,) = task.plan.plan.src_chunks, task.output.array
        if found is not None:
            return found
        new = x.dask.dependencies.get(name, set()) - seen if layers else set()
        seen |= new
        waiting += sorted(new)
    return None


def _chunks_before_expression(expr: Any) -> Chunks | None:
    """Return the same for an array that is an expression."""
    waiting, seen = deque([expr]), {expr._name}
    while waiting:
        found, expr = None, waiting.popleft()
        while (plan := _reordered_plan(expr)) is not None:
            found, (expr,) = plan.plan.src_chunks, expr.dependencies()
            while type(expr).__name__ == "ChunksFreeze":
                (expr,) = expr.dependencies()
        if found is not None:
            return found
        new = [each for each in expr.dependencies() if each._name not in seen]
        seen.update(each._name for each in new)
        waiting += new
    return None


def _reordered_plan(expr: Any) -> ReorderedPlan | None:
    layer = getattr(expr, "lazy_layer", None)
    plan = layer.plan if isinstance(layer, PlannedLayer) and layer.prefix == PREFIX else None
    return plan if isinstance(plan, ReorderedPlan) else None
