"""The lazy Dask array of a plan: a layer of a graph, or an expression."""

from __future__ import annotations

from typing import Any

from dask.array.core import new_da_object
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from dask_p2p.config import Options
from dask_p2p.graph.layer import Epilogue, assemble_tasks, output_spec
from dask_p2p.plans import Plan
from dask_p2p.versioned import named_fields


def planned_array(
    prefix: str,  # prefix of the new array's name, and so of its tasks
    arrays: Any,  # one or several inputs, of one dtype and one type of blocks
    plan: Plan,  # assembly of the output's blocks from the inputs' blocks
    options: Options,  # options that are sent with the tasks
    epilogue: Epilogue | None = None,  # function of the assembled blocks
) -> Any:
    """Return the lazy Dask array of a plan's output; an expression if the inputs are."""
    inputs = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
    first = inputs[0]
    if hasattr(first, "expr"):
        # Only here: the module imports private parts of Dask.
        from dask_p2p.graph.expression import PlannedExpr

        return type(first)(PlannedExpr(plan, options, prefix, epilogue, *(x.expr for x in inputs)))
    names = tuple(x.name for x in inputs)
    name = f"{prefix}-{tokenize(names, *map(named_fields, (plan, options, epilogue)))}"
    tasks = assemble_tasks(name, plan, output_spec(names, first, options, epilogue))
    # Dask checks that each dependency is used. Empty output blocks have no input blocks.
    keys = frozenset[Any]().union(*{task.dependencies for task in tasks.values()})
    read = {key[0] for key in keys}
    graph = HighLevelGraph.from_collections(
        name, tasks, dependencies=[x for x in inputs if x.name in read]
    )
    # An input's meta may have other dimensions: Dask adapts it to the chunks of the new array.
    chunks = plan.chunks if epilogue is None else epilogue.chunks
    meta = first._meta if epilogue is None else epilogue.meta
    return new_da_object(graph, name, chunks, meta=meta, dtype=meta.dtype)
