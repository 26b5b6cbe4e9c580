"""`fused`: Dask arrays whose whole graph runs as one gang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_p2p.config import checked_options
from dask_p2p.fusing.arguments import ArraysGraph, graph_of
from dask_p2p.fusing.planning.owners import UNKNOWN, Locations
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.sizes import DeclaredBlocks, blocks_of_layers, sizes_of
from dask_p2p.fusing.planning.tasks import ReadGraph, check_arrays, kind_of, kinds_of
from dask_p2p.fusing.running.gang import fused_gang
from dask_p2p.graph.arrays import expression_array, is_expression
from dask_p2p.plugins.registration import current_client, register_if_possible
from dask_p2p.sections.api.graph import GangLayer, GangTasks, most_ranks
from dask_p2p.types import DaskArray


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
        Also if the graph has layers with annotations such as ``workers`` or ``retries``, or a
        peer-to-peer rechunk of Dask before a task that stays with Dask.
    SectionError
        At run time, if `p2p.attempts` attempts have failed, or if the workers can never run all
        ranks at the same time.

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
    most = most_ranks(ranks)
    register_if_possible()
    found = _fused(arrays, most)
    return found[0] if len(found) == 1 else tuple(found)


def _fused(arrays: Sequence[DaskArray], most: int) -> list[DaskArray]:
    """Return the arrays that a gang of at most this number of ranks computes."""
    options = checked_options()
    graph = graph_of(arrays, options)
    read = graph.read
    size = min(most, read.tasks.widest)
    sizes_bytes = sizes_of(read.tasks, declared=blocks_of_layers(graph.layers.layers))
    locations = _locations(read) if size > 1 else UNKNOWN
    programs = programs_of(read.tasks, size, sizes_bytes, locations=locations)
    names, kind = [x.name for x in arrays], kind_of(kinds_of(arrays), read)
    first = DeclaredBlocks(arrays[0].chunks, arrays[0].dtype)
    given = read.tasks, programs, names, first, kind, options, arrays
    if is_expression(arrays[0]):
        work = fused_gang(*given, kept=read.kept)
        return [expression_array(x, GangLayer(work, n), []) for n, x in enumerate(arrays)]
    gang = GangTasks.of(fused_gang(*given))
    inputs, dependencies = _input_layers(graph, gang.token)
    dependencies[gang.name] = {*inputs}
    inputs[gang.name] = MaterializedLayer(gang.tasks)
    before = HighLevelGraph(inputs, dependencies)
    return [gang.array(number, before) for number in range(len(arrays))]


def _locations(read: ReadGraph) -> Locations:
    """Return the workers that have inputs now. The scheduler is asked if any are computed."""
    client = current_client()
    kept = {key: read.kept[key] for key in read.tasks.inputs if key in read.kept}
    futures = {key: f for key, f in kept.items() if getattr(f, "status", "") == "finished"}
    if not futures or client is None or client.asynchronous:
        return UNKNOWN
    found = client.who_has([*futures.values()])
    holders = {key: found[future.key] for key, future in futures.items()}
    return Locations(holders, len(client.nthreads()))


def _input_layers(graph: ArraysGraph, token: str) -> tuple[dict[str, Any], dict[str, set[str]]]:
    """Return layers of the tasks that stay with Dask, and the layers that each depends on.

    Their names are new, since a layer of another array may have more tasks under the old name.
    """
    layers, names, kept = {}, {}, graph.read.kept
    for name, layer in graph.layers.layers.items():
        tasks = {key: kept[key] for key in graph.tasks_of[name] if key in kept}
        if tasks:
            names[name] = f"{name}-{token}"
            layers[names[name]] = made = MaterializedLayer(tasks)
            made.annotations = layer.annotations
    dependencies = {
        names[name]: {names[each] for each in graph.layers.dependencies[name] if each in names}
        for name in names
    }
    return layers, dependencies
