"""Dask tasks on GPUs that end when their kernels end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask.array as da
from dask.core import flatten
from dask.task_spec import Alias, Task

__all__ = ["with_finished_kernels"]


def with_finished_kernels(y: Any) -> Any:
    """Return the lazy array with tasks that end when their CuPy blocks are made.

    Dask's own tasks end, and `distributed.wait` returns, when their kernels are queued.
    """
    tasks = dict(y.__dask_graph__())
    for key in flatten(y.__dask_keys__()):
        task = tasks[key]
        if not isinstance(task, Alias):  # an alias names a task that other tasks need too
            tasks[key] = Task(key, _run_and_wait, task.func, *task.args, **task.kwargs)
    return da.Array(tasks, y.name, y.chunks, meta=y._meta)


def _run_and_wait(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import cupy

    block = function(*args, **kwargs)
    cupy.cuda.get_current_stream().synchronize()
    return block
