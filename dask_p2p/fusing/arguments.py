"""Arrays that stand for the arguments of a compiled function."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from dask.base import tokenize
from dask.task_spec import DataNode, Task, TaskRef

from dask_p2p.errors import FuseError, InputError
from dask_p2p.fusing.planning.declared import Declared, DeclaredValue
from dask_p2p.fusing.planning.program import CallValue
from dask_p2p.fusing.planning.subgraphs import is_fused
from dask_p2p.fusing.planning.tasks import ReadGraph, keys_of, name_of
from dask_p2p.fusing.running.gang import array_of_tasks
from dask_p2p.types import DaskArray, Key

_PREFIX = "p2p-argument"  # of the names of these arrays


def argument(
    x: Declared | DeclaredValue, number: int, like: DaskArray, parameter: str
) -> DaskArray:
    """Return an array of the library of `like` that stands for an argument.

    Its tasks are replaced in each call.
    """
    if isinstance(x, Declared):
        chunks, meta = x.chunks, x.meta
    else:
        chunks = tuple((length,) for length in x.shape)
        meta = np.empty_like(like._meta, x.dtype, shape=(0,) * len(x.shape))
    name = f"{_PREFIX}-{number}-{tokenize(chunks, x.dtype, number)}"
    keys: list[Key] = [
        (name, *index) for index in product(*(range(len(sizes)) for sizes in chunks))
    ]
    tasks = {key: Task(key, _no_value, parameter) for key in keys}
    return array_of_tasks(like, name, chunks, meta, tasks)


def reading_values(tasks: Mapping[Key, Any], values: Sequence[DaskArray]) -> dict[Key, Any]:
    """Return tasks that read the values of a call also where they are keywords of `map_blocks`.

    Dask copies the tasks of such keywords into others, or leaves them out of the graph.
    """
    own = {key: task for x in values for key, task in x.__dask_graph__().items()}
    return own | {key: _without_copies(task, own) for key, task in tasks.items()}


def _without_copies(task: Any, own: Container[Any]) -> Any:
    if not own or not isinstance(task, Task) or not _has_copy(task):
        return task
    if not is_fused(task):
        arguments = [_without_copies(each, own) for each in task.args]
        return Task(task.key, task.func, *arguments, **task.kwargs)
    inner, last, names, *inputs = task.args
    copies = [key for key in inner if key in own]
    inner = {key: each for key, each in inner.items() if key not in own}
    names = (*names, *copies)
    return Task(task.key, task.func, inner, last, names, *inputs, *map(TaskRef, copies))


def with_call_values(read: ReadGraph, values: Mapping[str, CallValue]) -> ReadGraph:
    """Return a graph whose arguments of these names are literals that come with each call."""
    of_values = {key: values[name_of(key)] for key in read.kept if name_of(key) in values}
    tasks = read.tasks
    literals = {key: DataNode(key, of_call) for key, of_call in of_values.items()}
    nodes = {**literals, **tasks.nodes}
    reads = {**dict.fromkeys(literals, ()), **tasks.reads}
    inputs = tuple(key for key in tasks.inputs if key not in literals)
    kept = {key: task for key, task in read.kept.items() if key not in literals}
    return ReadGraph(replace(tasks, nodes=nodes, reads=reads, inputs=inputs), kept)


def array_of_value(like: DaskArray, declared: Declared, value: Any) -> DaskArray:
    """Return the Dask array of one block that a NumPy array is."""
    name = f"{_PREFIX}-value-{tokenize(value)}"
    key = (name, *(0 for _ in value.shape))
    return array_of_tasks(like, name, declared.chunks, declared.meta, {key: DataNode(key, value)})


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
