"""From a plan to a lazy Dask array: one layer, one task an output block."""

from __future__ import annotations

from typing import Any

from dask.array.core import new_da_object
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from dask_p2p.config import Options
from dask_p2p.layer import assemble_tasks
from dask_p2p.plan import Plan

__all__ = ["planned_array"]


def planned_array(prefix: str, x: Any, plan: Plan, options: Options) -> Any:
    """Return the lazy Dask array of a plan's output.

    Parameters
    ----------
    prefix : str
        Of the new array's name: what Dask calls its tasks.
    x : dask.array.Array
        The input. The output is an array-expr array if `x` is one.
    plan : Plan
        How the output's blocks are assembled from those of `x`.
    options : Options
        What travels with the tasks.
    """
    if hasattr(x, "expr"):
        from dask_p2p.expression import PlannedExpr

        return type(x)(PlannedExpr(x.expr, plan, options, prefix))
    name = f"{prefix}-{tokenize(x.name, plan, options)}"
    tasks = assemble_tasks(name, x, plan, options)
    # Blocks that are all empty are made of nothing; Dask checks that dependencies are depended on.
    reads = any(task.dependencies for task in tasks.values())
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=[x] if reads else [])
    # The meta of a transpose has other dimensions; for the new array they are made from its ndim.
    return new_da_object(graph, name, plan.dst_chunks, meta=x._meta, dtype=x.dtype)
