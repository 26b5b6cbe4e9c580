"""The lazy Dask array of a plan: one layer with one task per output block."""

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


def output_spec(
    arrays: tuple[str, ...], first: Any, options: Options, epilogue: Epilogue | None
) -> OutputSpec:
    """Return the properties that all output blocks share.

    `first` is the first input array, or its expression. All inputs have the same dtype and type of
    blocks.
    """
    after = (None, None) if epilogue is None else (epilogue.function, epilogue.chunks)
    return OutputSpec(arrays, first.dtype, backend_for(first._meta).name, options, *after)


def assemble_tasks(name: str, plan: Plan, output: OutputSpec) -> dict[Any, AssembleTask]:
    """Return the tasks, by key, that assemble a plan's output blocks. The output has this name."""
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
