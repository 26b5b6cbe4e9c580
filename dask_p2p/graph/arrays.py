"""The lazy array of a plan: a layer of a graph, or an expression."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from dask import config
from dask.array.core import new_da_object
from dask.base import tokenize
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_p2p.config import Options
from dask_p2p.geometry import Chunks
from dask_p2p.graph.redistribution import (
    Epilogue,
    LazyLayer,
    PlannedLayer,
    Planner,
    is_of_dask_array,
    with_fixed_blocks,
)
from dask_p2p.plans import Plan
from dask_p2p.shared import named_fields
from dask_p2p.types import Array
from dask_p2p.versions import check_dask_array


def planned_array(
    prefix: str,  # prefix of the new array's name, and so of its tasks
    x: Any,
    plan: Plan,  # assembly of the output's blocks from those of `x`
    options: Options,  # options that are sent with the tasks
    epilogue: Epilogue | None = None,  # function of the assembled blocks
) -> Any:
    """Return the lazy array of a plan's output, of the library of `x`."""
    layer = PlannedLayer(prefix, plan, options, epilogue)
    if is_expression(x):
        return expression_array(x, layer, [x])
    name = layer.name(tokenize(x.name, *map(named_fields, (plan, options, epilogue))))
    tasks = layer.tasks(name, [x])
    # Dask checks that each dependency is used. Empty output blocks have no input blocks.
    is_read = any(task.dependencies for task in tasks.values())
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=[x] if is_read else [])
    # The meta of `x` may have other dimensions: Dask adapts it to the chunks of the new array.
    meta = layer.meta(x)
    return new_da_object(graph, name, layer.chunks, meta=meta, dtype=meta.dtype)


def arrays_with_halos(
    arrays: Sequence[Any],
    plans: Sequence[Plan],  # of blocks with halos, by array
    options: Options,  # sent with the tasks
) -> list[Any]:
    """Return arrays of blocks with halos. Arrays without a halo keep their blocks."""
    return [
        with_fixed_blocks(x)
        if plan.chunks == x.chunks
        else planned_array("p2p-overlap", x, plan, options)
        for x, plan in zip(arrays, plans, strict=True)
    ]


def layered_array(
    name: str,
    tasks: Mapping[Any, Any],  # by key: they make the blocks
    chunks: Chunks,
    meta: Array,  # empty array like the blocks
    before: HighLevelGraph,
    reads: Iterable[str] = (),  # layers of that graph that the tasks read
) -> Any:
    """Return the array of a new layer after a graph."""
    layers = {**before.layers, name: MaterializedLayer(tasks)}
    graph = HighLevelGraph(layers, {**before.dependencies, name: {*reads}})
    return new_da_object(graph, name, chunks, meta=meta, dtype=meta.dtype)


def is_expression(x: Any) -> bool:
    """Return whether a lazy array is an expression, in place of a graph."""
    return hasattr(x, "expr")


def expression_array(like: Any, layer: LazyLayer, inputs: Sequence[Any]) -> Any:
    """Return the array of a layer, as an expression of the library of `like`."""
    _ = layer.token  # outside of the expression, which refuses functions without a token
    return type(like)(_expressions_of(like).layer_expr(layer, [x.expr for x in inputs]))


def redistributed_expression(x: Any, axes: tuple[int, ...], after: Chunks, planner: Planner) -> Any:
    """Return an array that is an expression in other blocks, with permuted axes."""
    return type(x)(_expressions_of(x).redistribute_expr(x.expr, axes, after, planner))


def _expressions_of(x: Any) -> Any:
    """Return the module of the expressions of an array's library.

    Raises `RegistrationError` if the release of `dask_array` is not supported.
    """
    # Only here: the modules import private parts of the libraries.
    if is_of_dask_array(x):
        check_dask_array()
        from dask_p2p.graph import dask_array_expr

        return dask_array_expr
    from dask_p2p.graph import expression

    return expression


def optimised_tasks(x: Any) -> tuple[dict[Any, Any], list[Any]]:
    """Return the tasks of an expression after its optimisation, and the keys of its blocks.

    Tasks of several operations are not merged. The blocks have the chunks of the array.
    """
    if is_of_dask_array(x):
        expr = with_fixed_blocks(x).expr.optimize(fuse=False)
        with config.set({"array.optimize-graph": False}):  # it is optimised
            tasks = expr.__dask_graph__()
    else:
        expr = x.expr.optimize()
        tasks = expr.__dask_graph__()
    return tasks, list(flatten(expr.__dask_keys__()))


def layer_of(x: Any) -> Any:
    """Return the `LazyLayer` of an array that is an expression; None for other arrays."""
    return getattr(getattr(x, "expr", None), "lazy_layer", None)


def before_transpose(x: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Return the array that `x` is the lazy transpose of, and the order of its axes in `x`.

    None if `x` is no lazy transpose, or an expression: optimisers merge these.
    """
    if is_expression(x):
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
    function, given = getattr(task, "func", None), getattr(task, "kwargs", {})
    if function is np.transpose:
        return given == {"axes": axes}
    if function is not np.swapaxes or given.keys() != {"axis1", "axis2"}:
        return False
    swapped = [*range(len(axes))]
    first, second = given["axis1"], given["axis2"]
    swapped[first], swapped[second] = second, first
    return axes == tuple(swapped)


def _below(x: Any, before: str, axes: tuple[int, ...]) -> Any:
    """Return the array of the layer `before`; `x` is its transpose."""
    layers = {name: layer for name, layer in x.dask.layers.items() if name != x.name}
    graph = HighLevelGraph(layers, {name: x.dask.dependencies[name] for name in layers})
    inverse = tuple(map(axes.index, range(len(axes))))
    chunks = tuple(x.chunks[axis] for axis in inverse)
    return new_da_object(graph, before, chunks, meta=x._meta.transpose(inverse), dtype=x.dtype)
