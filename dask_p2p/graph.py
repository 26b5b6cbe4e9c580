"""Lazy arrays in other blocks, from a plan or other tasks: a layer of a graph, or an expression.

The libraries of lazy arrays are `dask.array`, with graphs or expressions, and `dask_array`. The
package `dask_array` replaces `dask.array`; its arrays are expressions. It is never imported from
here first: an array of it exists only where the user has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import dask.array as da
import numpy as np
from dask import config
from dask.array.core import Array as GraphArray
from dask.array.core import new_da_object
from dask.array.utils import meta_from_array
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.tokenize import normalize_token, tokenize

from dask_p2p.backends import backend_for
from dask_p2p.config import Options, checked_options
from dask_p2p.engine.assembly import OutputSpec
from dask_p2p.engine.task import AssembleTask, Blocks, assemble_block
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.geometry import Chunks, Index, block_indices
from dask_p2p.plans import GridPlan, Plan, group_blocks, redistribution
from dask_p2p.plugins.registration import cluster_size, on_missing_plugin, register_if_possible
from dask_p2p.shared import named_fields
from dask_p2p.types import Array, DaskArray
from dask_p2p.versions import check_dask_array

# Bound at import: `install` may replace Dask's function by this package's.
_rechunk = partial(da.rechunk, method="tasks")


def redistribute(x: DaskArray, order: tuple[int, ...], after: Chunks) -> DaskArray:
    """Return an array with other chunks and axis order; the caller has checked all arguments."""
    same = tuple(range(x.ndim))
    if after == x.chunks and order == same:
        return x
    if (before := _undo_transpose(x)) is not None:  # read its blocks, and permute them once
        x, axes = before
        return redistribute(x, tuple(axes[axis] for axis in order), after)
    register_if_possible()
    options = checked_options()
    prefix = "p2p-rechunk" if order == same else "p2p-transpose"
    plan = plan_redistribution(x.chunks, order, after, options)
    x = array_of_plan(prefix, x, plan, options)
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
    return group_blocks(redistribution(before, axes, after), options.groups, threads)


def _undo_transpose(x: Any) -> tuple[Any, tuple[int, ...]] | None:
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
    if before not in x.dask.layers or not _is_permutation(layer.task, axes):
        return None
    layers = {name: layer for name, layer in x.dask.layers.items() if name != x.name}
    graph = HighLevelGraph(layers, {name: x.dask.dependencies[name] for name in layers})
    inverse = tuple(map(axes.index, range(len(axes))))
    chunks = tuple(x.chunks[axis] for axis in inverse)
    meta = x._meta.transpose(inverse)
    return new_da_object(graph, before, chunks, meta=meta, dtype=x.dtype), axes


def _is_permutation(task: Any, axes: tuple[int, ...]) -> bool:
    function, keywords = getattr(task, "func", None), getattr(task, "kwargs", {})
    if function is np.transpose:
        return keywords == {"axes": axes}
    if function is not np.swapaxes or keywords.keys() != {"axis1", "axis2"}:
        return False
    order = [*range(len(axes))]
    first, second = keywords["axis1"], keywords["axis2"]
    order[first], order[second] = second, first
    return axes == tuple(order)


def array_of_plan(
    prefix: str,  # prefix of the new array's name, and so of its tasks
    x: Any,
    plan: Plan,  # assembly of the output's blocks from those of `x`
    options: Options,  # options that are sent with the tasks
    epilogue: Epilogue | None = None,  # function of the assembled blocks
) -> Any:
    """Return the lazy array of a plan's output, of the library of `x`."""
    layer = PlannedLayer(prefix, plan, options, epilogue)
    if is_expression(x):
        return array_of_layer(x, layer, [x])
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
        fix_blocks(x) if plan.chunks == x.chunks else array_of_plan("p2p-overlap", x, plan, options)
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


# --- the libraries


def is_dask_array(x: Any) -> bool:
    """Return whether `x` is a lazy array of one of the libraries."""
    return library_of(x) is not None


def library_of(x: Any) -> str | None:
    """Return the name of the library that `x` is a lazy array of; None for other values."""
    if isinstance(x, GraphArray):
        return "dask.array"
    if isinstance(x, da.Array):
        return "dask.array with query planning"
    if is_of_dask_array(x):
        return "dask_array"
    return None


def is_of_dask_array(x: Any) -> bool:
    """Return whether `x` is an array of the package `dask_array`."""
    kind = getattr(sys.modules.get("dask_array"), "Array", None)  # None while it is imported
    return kind is not None and isinstance(x, kind)


def functions_of(x: Any) -> Any:
    """Return the module whose functions make arrays like `x`; `dask.array` for other values."""
    return sys.modules["dask_array"] if is_of_dask_array(x) else da


def check_one_library(arrays: Iterable[Any]) -> None:
    """Raise `UnsupportedArrayError` for lazy arrays of several libraries."""
    names = dict.fromkeys(filter(None, map(library_of, arrays)))
    if len(names) > 1:
        raise UnsupportedArrayError(
            f"expected arrays of one library in a call, got arrays of {' and of '.join(names)}. "
            f"Make all of them with one library."
        )


def fix_blocks(x: Any) -> Any:
    """Return the array, whose optimiser keeps its chunks; `dask_array` may choose others."""
    return x.freeze_chunks() if is_of_dask_array(x) else x


def rechunk_by_tasks(x: Any, chunks: Any, **options: Any) -> Any:
    """Return the array in other blocks, rechunked by tasks of its own library."""
    if is_of_dask_array(x):
        return x.rechunk(chunks, method="tasks", **options)
    return _rechunk(x, chunks, **options)


# --- arrays that are expressions


def is_expression(x: Any) -> bool:
    """Return whether a lazy array is an expression, in place of a graph."""
    return hasattr(x, "expr")


def array_of_layer(like: Any, layer: Any, inputs: Sequence[Any]) -> Any:
    """Return the array of a layer, as an expression of the library of `like`.

    The inputs keep their chunks when they are optimised. Raises `RegistrationError` if the release
    of `dask_array` is not supported.
    """
    _ = layer.token  # outside of the expression, which refuses functions without a token
    if is_package := is_of_dask_array(like):
        check_dask_array()
    kind = _expression_class("PackageExpr" if is_package else "DaskExpr")
    return type(like)(kind(layer, *[fix_blocks(x).expr for x in inputs]))


class LayerExpr:
    """An array of a layer, its first operand; a base of the libraries' expressions.

    The layer has the attributes and methods of `PlannedLayer`. The other operands are its inputs.
    Tasks are made when Dask requests the graph, since planning may first replace the inputs by
    equal ones with another name and equal chunks.
    """

    _parameters = ("lazy_layer",)
    # Parameters, and attributes of all expressions.
    lazy_layer: PlannedLayer
    deterministic_token: str
    dependencies: Callable[[], list[Any]]

    @cached_property
    def _name(self) -> str:
        return self.lazy_layer.name(self.deterministic_token)

    @cached_property
    def chunks(self) -> Chunks:
        return self.lazy_layer.chunks

    @cached_property
    def _meta(self) -> Any:
        meta = self.lazy_layer.meta(next(iter(self.dependencies()), None))
        return meta_from_array(meta, len(self.chunks), meta.dtype)

    def _layer(self) -> Mapping[Any, Any]:
        return self.lazy_layer.tasks(self._name, self.dependencies())


def __getattr__(name: str) -> Any:
    """Return a class of expressions, whose library is only imported where it has an array."""
    if name in ("DaskExpr", "PackageExpr"):
        return _expression_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _expression_class(name: str) -> Any:
    """Return the class of expressions of `dask.array`, or of the package `dask_array`.

    Both bases are private. Threads that call this at the same time get the same class.
    """
    if name not in globals():
        methods: dict[str, Any] = {"__module__": __name__}
        if name == "PackageExpr":
            from dask_array._expr import ArrayExpr
        else:
            from dask.array._array_expr._expr import ArrayExpr

            methods["_simplify_up"] = _align_elementwise
        globals().setdefault(name, type(name, (LayerExpr, ArrayExpr), methods))
    return globals()[name]


def _align_elementwise(_: Any, parent: Any, __: Any) -> Any:
    """Return an elementwise operation of blocks that are aligned; None for others.

    Dask 2026.7.1 fails to align them: it counts the indices of axes as operands.
    """
    from dask.array._array_expr._blockwise import Elemwise
    from dask.array._array_expr._expr import unify_chunks_expr

    if type(parent) is not Elemwise or parent.where is not True:
        return None
    _, operands, is_changed = unify_chunks_expr(*parent.args)
    if not is_changed:
        return None
    return Elemwise(*parent.operands[: len(Elemwise._parameters)], *operands)


def optimize_tasks(x: Any) -> tuple[dict[Any, Any], list[Any], Any]:
    """Return an array's tasks, and keys of its blocks, and its expression, after optimisation.

    Tasks of several operations are not merged. The blocks have the chunks of the array.
    """
    if is_of_dask_array(x):
        expr = fix_blocks(x).expr.optimize(fuse=False)
        with config.set({"array.optimize-graph": False}):  # it is optimised
            tasks = expr.__dask_graph__()
    else:
        expr = x.expr.optimize()
        tasks = expr.__dask_graph__()
    return tasks, list(flatten(expr.__dask_keys__())), expr


# --- layers


@dataclass(frozen=True)
class Epilogue:
    """A function that each task applies to its assembled block."""

    function: Callable[[Any, Index], Any]  # function of the assembled block and its index
    chunks: Chunks  # chunks of the function's results
    meta: Array  # empty array of the results' type and dtype

    def __dask_tokenize__(self) -> Any:
        # By default Dask would copy a CuPy array to the host, twice, and pickle the class.
        kind = type(self.meta)
        meta = (kind.__module__, kind.__qualname__, self.meta.shape, self.meta.dtype)
        return normalize_token((named_fields(self.function), self.chunks, meta))


@dataclass(frozen=True)
class PlannedLayer:
    """The tasks that assemble the blocks of a plan."""

    prefix: str  # prefix of the array's name, and so of its tasks
    plan: Plan
    options: Options  # sent with the tasks
    epilogue: Epilogue | None = None

    @cached_property
    def token(self) -> str:
        """Token that identifies the layer, without its inputs."""
        values = map(named_fields, (self.plan, self.options, self.epilogue))
        return str(tokenize(self.prefix, *values))

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.token

    @property
    def chunks(self) -> Chunks:
        return self.plan.chunks if self.epilogue is None else self.epilogue.chunks

    def meta(self, first: Any) -> Array:
        """Return an empty array like the blocks; `first` is the first input, or None."""
        return first._meta if self.epilogue is None else self.epilogue.meta

    def name(self, token: str) -> str:
        """Return the name of the array; `token` identifies the layer and its inputs."""
        return f"{self.prefix}-{token}"

    def tasks(self, name: str, inputs: Sequence[Any]) -> dict[Any, AssembleTask]:
        """Return the tasks by key; `inputs` are arrays or expressions."""
        (x,) = inputs
        kind, epilogue = backend_for(x._meta).name, self.epilogue
        after = (None, None) if epilogue is None else (epilogue.function, epilogue.chunks)
        output = OutputSpec((x.name,), x.dtype, kind, self.options, *after)
        return assemble_tasks(name, self.plan, output)


def assemble_tasks(name: str, plan: Plan, output: OutputSpec) -> dict[Any, AssembleTask]:
    """Return the tasks, by key, that assemble a plan's output blocks. The output has this name."""
    shared: dict[tuple[Index, ...], Blocks] = {}
    tasks = {}
    for index in block_indices(plan.chunks):
        key = (name, *index)
        sources = plan.sources(index)
        blocks = shared.get(sources)
        if blocks is None:
            blocks = shared[sources] = Blocks(*map(output.key, sources))
        tasks[key] = AssembleTask(
            key, assemble_block, key, plan, index, output, blocks, on_missing_plugin
        )
    return tasks
