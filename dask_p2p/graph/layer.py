"""The layer of a plan: one task for each output block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
