"""An array in other blocks, with permuted axes: its plan, and the lazy array of this plan."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from dask.array.core import Array as GraphArray
from dask.array.core import new_da_object
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph

from dask_p2p.config import Options, checked_options
from dask_p2p.geometry import Chunks
from dask_p2p.graph.arrays import planned_array
from dask_p2p.graph.libraries import rechunk_by_tasks
from dask_p2p.plans import GridPlan, grouped, redistribution
from dask_p2p.plugins.registration import cluster_size, register_if_possible
from dask_p2p.types import DaskArray


def redistributed(x: DaskArray, order: tuple[int, ...], after: Chunks) -> DaskArray:
    """Return an array with other chunks and axis order; the caller has checked all arguments."""
    same = tuple(range(x.ndim))
    if after == x.chunks and order == same:
        return x
    if (before := _before_transpose(x)) is not None:  # read its blocks, and permute them once
        x, axes = before
        return redistributed(x, tuple(axes[axis] for axis in order), after)
    register_if_possible()
    options = checked_options()
    prefix = "p2p-rechunk" if order == same else "p2p-transpose"
    plan = plan_redistribution(x.chunks, order, after, options)
    x = planned_array(prefix, x, plan, options)
    # Larger blocks than requested are only split: views, on the same worker.
    return x if plan.chunks == after else rechunk_by_tasks(x, after)


def cluster_threads() -> int | None:
    """Return the total number of threads of the current client's workers; None without a client."""
    size = cluster_size()
    return None if size is None else prod(size)


def plan_redistribution(
    before: Chunks,
    axes: tuple[int, ...],
    after: Chunks,
    options: Options,
    threads: Callable[[], int | None] = cluster_threads,
) -> GridPlan:
    """Return the plan of a redistribution.

    The plan's blocks may be larger than the chunks `after`, to limit the graph's edges. Then the
    caller splits them.
    """
    return grouped(redistribution(before, axes, after), options.groups, threads)


def _before_transpose(x: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Return the array that `x` is the lazy transpose of, and the order of its axes in `x`.

    None if `x` is no lazy transpose, or an expression.
    """
    if not isinstance(x, GraphArray):
        return None
    layer = x.dask.layers.get(x.name)
    if not isinstance(layer, Blockwise) or layer.annotations or len(layer.indices) != 1:
        return None
    ((before, indices),) = layer.indices
    axes = tuple(map(indices.index, layer.output_indices))
    if before not in x.dask.layers or not _permutes(layer.task, axes):
        return None
    return _below(x, before, axes), axes


def _permutes(task: Any, axes: tuple[int, ...]) -> bool:
    """Return whether a task only permutes the axes of its block in this order."""
    function, keywords = getattr(task, "func", None), getattr(task, "kwargs", {})
    if function is np.transpose:
        return keywords == {"axes": axes}
    if function is not np.swapaxes or keywords.keys() != {"axis1", "axis2"}:
        return False
    order = [*range(len(axes))]
    first, second = keywords["axis1"], keywords["axis2"]
    order[first], order[second] = second, first
    return axes == tuple(order)


def _below(x: Any, before: str, axes: tuple[int, ...]) -> Any:
    """Return the array of the layer `before`; `x` is its transpose."""
    layers = {name: layer for name, layer in x.dask.layers.items() if name != x.name}
    graph = HighLevelGraph(layers, {name: x.dask.dependencies[name] for name in layers})
    inverse = tuple(map(axes.index, range(len(axes))))
    chunks = tuple(x.chunks[axis] for axis in inverse)
    return new_da_object(graph, before, chunks, meta=x._meta.transpose(inverse), dtype=x.dtype)
