"""Tasks that Dask has fused, as the tasks that they consist of.

A fused task runs its tasks by a scheduler of its own, which takes longer than a rank's step for
each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dask.task_spec import Alias, Task

from dask_p2p.types import Key

_RUN_SUBGRAPH = "_execute_subgraph"  # name of Dask's function, which is private


def unfused(graph: Mapping[Key, Any]) -> dict[Key, Any]:
    """Return a graph with the parts of fused tasks in their place. Other tasks keep their keys."""
    made = dict[Key, Any]()
    for key, task in graph.items():
        parts = _parts(task) if isinstance(task, Task) else None
        made |= {key: task} if parts is None else parts
    return made | {key: task for key, task in graph.items() if key in made and not _is_fused(task)}


def _parts(task: Task) -> dict[Key, Any] | None:
    """Return the tasks of a fused task by key; None for others."""
    if not _is_fused(task):
        return None
    inner, last, names, *given = task.args
    if [*names] != [getattr(each, "key", None) for each in given]:
        return None  # its inputs have other keys than those that its parts read
    parts = dict(inner)
    if task.key != last:
        parts[task.key] = Alias(task.key, last)
    return parts


def _is_fused(task: Any) -> bool:
    return isinstance(task, Task) and getattr(task.func, "__name__", "") == _RUN_SUBGRAPH
