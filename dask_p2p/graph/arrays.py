"""From a plan to a lazy Dask array: one layer, one task an output block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dask.array.core import new_da_object
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from dask.tokenize import normalize_token

from dask_p2p.backends import backend_for
from dask_p2p.config import Options
from dask_p2p.engine.assembly import OutputSpec
from dask_p2p.engine.task import AssembleTask, Blocks
from dask_p2p.geometry import Chunks, Index, block_indices
from dask_p2p.plans import Plan, Source
from dask_p2p.plugins.registration import on_missing_plugin
from dask_p2p.types import Array
from dask_p2p.versioned import named_fields


@dataclass(frozen=True)
class Post:
    """What is done to each assembled block before its task ends."""

    function: Callable[[Any, Index], Any]  # of the assembled block and its index
    chunks: Chunks  # of what it returns
    meta: Array  # empty, of the type and dtype of what it returns

    def __dask_tokenize__(self) -> Any:
        # A CuPy array would be brought to the host, twice, and the class be pickled.
        kind = type(self.meta)
        meta = (kind.__module__, kind.__qualname__, self.meta.shape, self.meta.dtype)
        return normalize_token((named_fields(self.function), self.chunks, meta))


def planned_array(
    prefix: str,  # of the new array's name: what Dask calls its tasks
    arrays: Any,  # the input or several, of one dtype and one type of blocks
    plan: Plan,  # how the output's blocks are assembled from those of the inputs
    options: Options,  # what travels with the tasks
    post: Post | None = None,  # what is done to each assembled block
) -> Any:
    """Return the lazy Dask array of a plan's output: an array-expr one if the inputs are."""
    inputs = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
    first = inputs[0]
    if hasattr(first, "expr"):
        from dask_p2p.graph.expression import PlannedExpr

        return type(first)(PlannedExpr(plan, options, prefix, post, *(x.expr for x in inputs)))
    names = tuple(x.name for x in inputs)
    name = f"{prefix}-{tokenize(names, *map(named_fields, (plan, options, post)))}"
    tasks = assemble_tasks(name, plan, output_spec(names, first, options, post))
    # Blocks that are all empty are made of nothing; Dask checks that dependencies are depended on.
    keys = frozenset[Any]().union(*{task.dependencies for task in tasks.values()})
    read = {key[0] for key in keys}
    graph = HighLevelGraph.from_collections(
        name, tasks, dependencies=[x for x in inputs if x.name in read]
    )
    # The meta of a transpose has other dimensions; for the new array they are made from its ndim.
    chunks = plan.chunks if post is None else post.chunks
    meta = first._meta if post is None else post.meta
    return new_da_object(graph, name, chunks, meta=meta, dtype=meta.dtype)


def output_spec(
    arrays: tuple[str, ...], first: Any, options: Options, post: Post | None
) -> OutputSpec:
    """Return what all blocks of an output of these arrays have in common.

    `first` is the first of them, or its expression: the others have its dtype and type of blocks.
    """
    after = (None, None) if post is None else (post.function, post.chunks)
    return OutputSpec(arrays, first.dtype, backend_for(first._meta).name, options, *after)


def assemble_tasks(name: str, plan: Plan, output: OutputSpec) -> dict[Any, AssembleTask]:
    """Return the tasks that assemble the blocks of a plan's output, which has this name, by key."""
    shared: dict[Sequence[Source], Blocks] = {}
    tasks = {}
    for index in block_indices(plan.chunks):
        key = (name, *index)
        sources = plan.sources(index)
        blocks = shared.get(sources)
        if blocks is None:
            blocks = shared[sources] = Blocks(*map(output.key, sources))
        tasks[key] = AssembleTask.of(key, plan, index, output, blocks, on_missing=on_missing_plugin)
    return tasks
