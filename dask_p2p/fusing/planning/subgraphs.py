"""Tasks that Dask has fused, as the tasks that they consist of.

A fused task runs its tasks by a scheduler of its own, which takes longer than a rank's step for
each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dask.task_spec import Task

from dask_p2p.types import Key

_RUN_SUBGRAPH = "_execute_subgraph"  # name of Dask's function, which is private


def unfused(graph: Mapping[Key, Any]) -> dict[Key, Any]:
    """Return a graph with the parts of fused tasks in their place. Other tasks stay.

    The last part of a fused task gets its key.
    """
    made = dict[Key, Any]()
    for key, task in graph.items():
        parts = parts_of(task) if isinstance(task, Task) else {}
        # An alias with the key of a part may lead to a task that needs the part.
        made |= parts if parts and graph.keys().isdisjoint({*parts} - {key}) else {key: task}
    return made


def is_fused(task: Any) -> bool:
    """Return whether Dask has made a task of several."""
    return isinstance(task, Task) and getattr(task.func, "__name__", "") == _RUN_SUBGRAPH


def parts_of(task: Task) -> dict[Key, Any]:
    """Return the tasks of a fused task by key; none for others."""
    if not is_fused(task):
        return {}
    inner, last, names, *given = task.args
    if [*names] != [getattr(each, "key", None) for each in given]:
        return {}  # its inputs have other keys than those that its parts read
    return {**{key: each for key, each in inner.items() if key != last}, task.key: inner[last]}
