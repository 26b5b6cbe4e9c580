"""From a plan to a lazy Dask array: one layer, one task an output block."""

from __future__ import annotations

from typing import Any

from dask.array.core import new_da_object
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from dask_p2p.config import Options
from dask_p2p.graph.layer import Post, assemble_tasks, output_spec
from dask_p2p.plans import Plan
from dask_p2p.versioned import named_fields

__all__ = ["Post", "planned_array"]


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
