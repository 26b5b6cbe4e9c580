"""Arrays that stand for the arguments of a compiled function."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from dask.base import tokenize
from dask.task_spec import Task

from dask_p2p.errors import FuseError, InputError
from dask_p2p.fusing.planning.tasks import ReadGraph, keys_of, name_of
from dask_p2p.fusing.running.gang import array_of_tasks
from dask_p2p.types import DaskArray, Key

_PREFIX = "p2p-argument"  # of the names of these arrays


def argument(x: DaskArray, number: int, parameter: str) -> DaskArray:
    """Return an array that stands for an argument; its tasks are replaced in each call."""
    name = f"{_PREFIX}-{number}-{tokenize(x.chunks, x.dtype, number)}"
    tasks = dict[Key, Any]()
    for key in keys_of(x):
        own = (name, *key[1:])
        tasks[own] = Task(own, _no_value, parameter)
    return array_of_tasks(x, name, x.chunks, x._meta, tasks)


def _no_value(parameter: str) -> Any:
    raise InputError(
        f"expected a function that builds lazy arrays only, got one that reads values of its "
        f"argument {parameter!r}, which has none in compile. Move compute(), float() and `if` out "
        f"of the function, and test for convergence between calls."
    )


def pinned(
    given: Sequence[DaskArray],
    outputs: Sequence[DaskArray],
    output_keys: Sequence[Sequence[Key]],  # of the blocks of each output
    size: int,
) -> dict[Key, int]:
    """Return the owner of each block of the arguments, and of results with the chunks of one.

    So such a result can be an argument of the next call on the same ranks.
    """
    chunks = [x.chunks for x in given]
    alike = [keys for x, keys in zip(outputs, output_keys, strict=True) if x.chunks in chunks]
    return {
        key: number * size // len(keys)
        for keys in (*map(keys_of, given), *alike)
        for number, key in enumerate(keys)
    }


def check_reads(read: ReadGraph, arguments: Container[Any]) -> None:
    """Refuse tasks that cannot read an argument: `FuseError`.

    These are tasks that stay with Dask, and those with a copy of an argument's task, as Dask makes
    them where it optimises a graph before the end.
    """
    for key, task in {**read.tasks.nodes, **read.kept}.items():
        if name_of(key) not in arguments and _has_copy(task):
            raise FuseError(
                f"expected only lazy arrays between arguments and results, got the task {key!r} of "
                f"a delayed function, or of a Dask array among the keywords of map_blocks. Give "
                f"arrays by position, map_blocks(f, x, y). Call delayed functions outside of the "
                f"compiled function."
            )
    for key, task in read.kept.items():
        reads = getattr(task, "dependencies", ())
        if name_of(key) not in arguments and any(name_of(each) in arguments for each in reads):
            raise FuseError(
                f"expected only tasks of ranks between arguments and results, got the task "
                f"{key!r}, which stays with Dask: that of a section, of a shuffle or of a future. "
                f"Call it outside of the compiled function."
            )


def _has_copy(task: Any) -> bool:
    """Return whether a task has that of an argument among its own arguments."""
    if isinstance(task, (list, tuple)):
        return any(map(_has_copy, task))
    if isinstance(task, dict):
        return any(map(_has_copy, task.values()))
    return isinstance(task, Task) and (task.func is _no_value or _has_copy(task.args))
