"""`fused`: Dask arrays whose whole graph runs as one gang."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, overload

import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.task_spec import DataNode, Task, TaskRef

from dask_p2p.config import Options, checked_options
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.fusing.planning.owners import UNKNOWN, Locations
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.sizes import (
    CallValue,
    Declared,
    DeclaredValue,
    blocks_of_expression,
    blocks_of_layers,
    sizes_of,
)
from dask_p2p.fusing.planning.tasks import (
    FusedTasks,
    check_arrays,
    check_tasks,
    is_fused,
    is_random,
    keys_of,
    kind_of,
    kinds_of,
    name_of,
    read_graph,
    tasks_of_layer,
)
from dask_p2p.fusing.running.gang import array_of_tasks, fused_gang
from dask_p2p.graph import array_of_layer, is_expression, optimize_tasks
from dask_p2p.plugins.registration import current_client, register_if_possible
from dask_p2p.sections.api.graph import GangLayer, GangTasks, most_ranks
from dask_p2p.types import DaskArray, Key


@overload
def fused(x: DaskArray, /, *, ranks: int | None = ...) -> DaskArray: ...


@overload
def fused(
    x: DaskArray, y: DaskArray, /, *arrays: DaskArray, ranks: int | None = ...
) -> tuple[DaskArray, ...]: ...


# The number of arrays is known only at run time: one array, or a tuple.
@overload
def fused(*arrays: DaskArray, ranks: int | None = ...) -> DaskArray | Any: ...


def fused(*arrays: DaskArray, ranks: int | None = None) -> DaskArray | tuple[DaskArray, ...]:
    """Return the same arrays, computed by one gang in place of a task for each block and operation.

    Each worker runs one *rank*, which does its part of all tasks. Ranks exchange blocks, and
    regions of blocks, directly. Dask's scheduler sees one task for each rank, one for their commit
    and one for each block of the result. If a worker is lost, all ranks run again.

    Tasks that read files, functions without array arguments, and tasks with futures among their
    arguments remain tasks of Dask, as do sections, shuffles, arrays that are persisted, and all
    that these read. Their blocks are inputs of the gang.

    Parameters
    ----------
    *arrays : dask.array.Array
        Arrays of NumPy or CuPy blocks, computed by operations of this package and of Dask.
    ranks : int, optional
        Largest number of ranks. By default the number of the cluster's workers that have the
        resources of `dask.annotate`. It is 1 without a cluster, with an asynchronous client, and
        in the function of a section.

    Returns
    -------
    dask.array.Array, or tuple of them
        Lazy arrays with the shapes, chunks and dtypes of `arrays`. Their blocks are equal bit for
        bit, apart from products of matrices, which BLAS may round in another way in each call.

    Raises
    ------
    InputError
        If there is no array, or `ranks` is invalid here.
    UnsupportedArrayError
        If an argument is not a Dask array of NumPy or CuPy blocks, or an array has Python objects.
        Also if the graph has layers with annotations such as ``workers`` or ``retries``.
    SectionError
        At run time, if `p2p.attempts` attempts have failed, or if the workers can never run all
        ranks at the same time.

    See Also
    --------
    compile : Fuse a function once, and call it many times.
    explain : The decision of the option ``p2p.fuse: auto``.

    Notes
    -----
    An exception of a task arrives as itself, with a note that names the task. All tasks run, even
    if only some blocks of the result are needed. A function that waits for other tasks of Dask may
    wait for ever, since the gang occupies the workers.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((6, 4), chunks=(2, 4))
    >>> y = fused((x.T + 1).rechunk((2, 6)).sum(axis=0))
    >>> y.compute(scheduler="sync")
    array([8., 8., 8., 8., 8., 8.])
    """
    check_arrays(arrays)
    size_limit = most_ranks(ranks)
    register_if_possible()
    fused_arrays = _fused(arrays, size_limit)
    return fused_arrays[0] if len(fused_arrays) == 1 else tuple(fused_arrays)


def _fused(arrays: Sequence[DaskArray], size_limit: int) -> list[DaskArray]:
    """Return the arrays that a gang of at most this number of ranks computes."""
    options = checked_options()
    graph = graph_of(arrays, options)
    tasks = graph.tasks
    size = min(size_limit, tasks.widest)
    sizes_bytes = sizes_of(tasks, graph.declared)
    locations = _locations(tasks) if size > 1 else UNKNOWN
    programs = programs_of(tasks, size, sizes_bytes, locations=locations)
    kind = kind_of(kinds_of(arrays), tasks)
    # An expression has no other layers, for the tasks that stay with Dask.
    dask_tasks = tasks.dask_tasks if is_expression(arrays[0]) else {}
    names, declared = [x.name for x in arrays], [*map(Declared.from_array, arrays)]
    work = fused_gang(tasks, programs, kind, options, names, declared, dask_tasks)
    if is_expression(arrays[0]):
        return [array_of_layer(x, GangLayer(work, n), []) for n, x in enumerate(arrays)]
    gang = GangTasks.for_inputs(work)
    inputs, dependencies = _input_layers(graph, gang.token)
    dependencies[gang.name] = {*inputs}
    inputs[gang.name] = MaterializedLayer(gang.tasks)
    before = HighLevelGraph(inputs, dependencies)
    return [gang.array(number, before) for number in range(len(arrays))]


def _locations(tasks: FusedTasks) -> Locations:
    """Return the workers that have inputs now. The scheduler is asked if any are computed."""
    client = current_client()
    input_tasks = {key: tasks.dask_tasks[key] for key in tasks.inputs if key in tasks.dask_tasks}
    futures = {key: f for key, f in input_tasks.items() if getattr(f, "status", "") == "finished"}
    if not futures or client is None or client.asynchronous:
        return UNKNOWN
    addresses = client.who_has([*futures.values()])
    holders = {key: addresses[future.key] for key, future in futures.items()}
    return Locations(holders, len(client.nthreads()))


def _input_layers(graph: ArraysGraph, token: str) -> tuple[dict[str, Any], dict[str, set[str]]]:
    """Return layers of the tasks that stay with Dask, and the layers that each depends on.

    Their names are new, since a layer of another array may have more tasks under the old name.
    """
    layers, names, kept_tasks = {}, {}, graph.tasks.dask_tasks
    for name, layer in graph.layers.layers.items():
        tasks = {key: kept_tasks[key] for key in graph.tasks_of[name] if key in kept_tasks}
        if tasks:
            names[name] = f"{name}-{token}"
            layers[names[name]] = new_layer = MaterializedLayer(tasks)
            new_layer.annotations = layer.annotations
    dependencies = {
        new_name: {names[before] for before in graph.layers.dependencies[name] if before in names}
        for name, new_name in names.items()
    }
    return layers, dependencies


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


def _without_copies(task: Any, argument_tasks: Container[Any]) -> Any:
    if not argument_tasks or not isinstance(task, Task) or not _has_copy(task):
        return task
    if not is_fused(task):
        arguments = [_without_copies(value, argument_tasks) for value in task.args]
        return Task(task.key, task.func, *arguments, **task.kwargs)
    inner, last, names, *inputs = task.args
    copies = [key for key in inner if key in argument_tasks]
    inner = {key: part for key, part in inner.items() if key not in argument_tasks}
    names = (*names, *copies)
    return Task(task.key, task.func, inner, last, names, *inputs, *map(TaskRef, copies))


def with_call_values(tasks: FusedTasks, values: Mapping[str, CallValue]) -> FusedTasks:
    """Return tasks whose arguments of these names are literals that come with each call."""
    of_values = {key: values[name_of(key)] for key in tasks.dask_tasks if name_of(key) in values}
    literals = {key: DataNode(key, of_call) for key, of_call in of_values.items()}
    return replace(
        tasks,
        nodes={**literals, **tasks.nodes},
        reads={**dict.fromkeys(literals, ()), **tasks.reads},
        inputs=tuple(key for key in tasks.inputs if key not in literals),
        dask_tasks={key: task for key, task in tasks.dask_tasks.items() if key not in literals},
    )


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
    arguments: Sequence[DaskArray],
    outputs: Sequence[DaskArray],
    output_keys: Sequence[Sequence[Key]],  # of the blocks of each output
    size: int,
) -> dict[Key, int]:
    """Return the owner of each block of the arguments, and of results with the chunks of one.

    So such a result can be an argument of the next call on the same ranks.
    """
    chunks = [x.chunks for x in arguments]
    alike = [keys for x, keys in zip(outputs, output_keys, strict=True) if x.chunks in chunks]
    return {
        key: number * size // len(keys)
        for keys in (*map(keys_of, arguments), *alike)
        for number, key in enumerate(keys)
    }


def check_reads(tasks: FusedTasks, arguments: Container[Any]) -> None:
    """Refuse tasks that cannot read an argument: `UnsupportedArrayError`.

    These are tasks that stay with Dask, and those with a copy of an argument's task, as Dask makes
    them where it optimises a graph before the end.
    """
    for key, task in {**tasks.nodes, **tasks.dask_tasks}.items():
        if name_of(key) not in arguments and _has_copy(task):
            raise UnsupportedArrayError(
                f"expected only lazy arrays between arguments and results, got the task {key!r} of "
                f"a delayed function, or of a Dask array among the keywords of map_blocks. Give "
                f"arrays by position, map_blocks(f, x, y). Call delayed functions outside of the "
                f"compiled function."
            )
    for key, task in tasks.dask_tasks.items():
        reads = getattr(task, "dependencies", ())
        if name_of(key) not in arguments and any(name_of(source) in arguments for source in reads):
            raise UnsupportedArrayError(
                f"expected only tasks of ranks between arguments and results, got the task "
                f"{key!r}, which stays with Dask: that of a section, of a shuffle or of a future. "
                f"Call it outside of the compiled function."
            )


def _has_copy(task: Any) -> bool:
    if isinstance(task, (list, tuple)):
        return any(map(_has_copy, task))
    if isinstance(task, dict):
        return any(map(_has_copy, task.values()))
    return isinstance(task, Task) and (task.func is _no_value or _has_copy(task.args))


@dataclass(frozen=True)
class ArraysGraph:
    """The graph of some arrays together."""

    tasks_of: Mapping[str, Mapping[Key, Any]]  # by layer; expressions have one
    keys: Sequence[Sequence[Key]]  # of the blocks of each array
    layers: HighLevelGraph  # without layers where arrays are expressions
    tasks: FusedTasks  # of all layers
    declared: Mapping[str, Declared]  # all arrays, by name

    def random_layers(self) -> dict[Any, Any]:
        nodes = {**self.tasks.nodes, **self.tasks.dask_tasks}
        names = {name_of(key) for key, node in nodes.items() if is_random(node)}
        return {name: self.layers.layers.get(name) for name in names}


def graph_of(
    arrays: Sequence[DaskArray], options: Options, values: Sequence[DaskArray] = ()
) -> ArraysGraph:
    """Return the graph of some arrays, whose tasks read the `values` of a call.

    Raises `UnsupportedArrayError` if ranks cannot run it.
    """
    tasks_of: dict[str, Mapping[Key, Any]]
    if is_expression(arrays[0]):
        graphs, keys, exprs = zip(*map(optimize_tasks, arrays), strict=True)
        layers = HighLevelGraph({}, {})
        tasks_of = {"": {key: task for graph in graphs for key, task in graph.items()}}
        declared = {k: v for expr in exprs for k, v in blocks_of_expression(expr).items()}
    else:
        keys = tuple(map(keys_of, arrays))
        layers = HighLevelGraph.merge(*(x.__dask_graph__() for x in arrays))
        tasks_of = {name: tasks_of_layer(layer, options) for name, layer in layers.layers.items()}
        declared = blocks_of_layers(layers.layers)
    tasks = {key: task for layer_tasks in tasks_of.values() for key, task in layer_tasks.items()}
    # Dask copies the tasks of values that are keywords of `map_blocks` into others, or leaves them
    # out of the graph.
    value_tasks = {key: task for x in values for key, task in x.__dask_graph__().items()}
    without_copies = {key: _without_copies(task, value_tasks) for key, task in tasks.items()}
    fused_tasks = read_graph(value_tasks | without_copies, keys)
    check_tasks(fused_tasks, layers.layers)
    return ArraysGraph(tasks_of, keys, layers, fused_tasks, declared)
