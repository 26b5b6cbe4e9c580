"""The tasks of a plan."""

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
from dask_p2p.plugins.registration import assemble
from dask_p2p.types import Array
from dask_p2p.versioned import named_fields

__all__ = ["Post", "assemble_tasks", "output_spec"]


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
        tasks[key] = AssembleTask.of(key, plan, index, output, blocks, assemble)
    return tasks
