"""The tasks of a plan."""

from __future__ import annotations

from typing import Any

from dask.task_spec import TaskRef

from dask_p2p.assemble import OutputSpec
from dask_p2p.backends import backend_for
from dask_p2p.config import Options
from dask_p2p.layout import block_indices
from dask_p2p.plan import Plan
from dask_p2p.registration import assemble
from dask_p2p.task import AssembleTask

__all__ = ["assemble_tasks"]


def assemble_tasks(name: str, x: Any, plan: Plan, options: Options) -> dict[Any, AssembleTask]:
    """Return the tasks that assemble the output blocks of a plan, by key.

    They share one `TaskRef` for each source block: to make and to pickle one for each edge takes
    several times as long.

    Parameters
    ----------
    name : str
        Of the output; the first part of its keys.
    x : dask.array.Array or dask.array expression
        The input.
    plan : Plan
        How the output's blocks are assembled from those of `x`.
    options : Options
        What travels with the tasks.
    """
    output = OutputSpec(x.name, x.dtype, backend_for(x._meta).name, options)
    refs = {source: TaskRef((output.source, *source)) for source in block_indices(plan.src_chunks)}
    tasks = {}
    for index in plan.indices():
        key = (name, *index)
        sources = [refs[source] for source in plan.sources(index)]
        tasks[key] = AssembleTask.of(key, plan, index, output, sources, assemble)
    return tasks
