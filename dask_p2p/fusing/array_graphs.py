"""The graphs of arrays, which are layers, or expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_p2p.config import Options
from dask_p2p.fusing.planning.rechunks import tasks_of_layer
from dask_p2p.fusing.planning.rules import check_annotations, check_tasks
from dask_p2p.fusing.planning.tasks import ReadGraph, keys_of, name_of, read_graph
from dask_p2p.graph.arrays import is_expression, optimised_tasks
from dask_p2p.types import DaskArray, Key


@dataclass(frozen=True)
class ArraysGraph:
    """The graph of some arrays together."""

    tasks_of: Mapping[str, Mapping[Key, Any]]  # by layer; expressions have one
    keys: Sequence[Sequence[Key]]  # of the blocks of each array
    layers: HighLevelGraph  # without layers where arrays are expressions
    read: ReadGraph  # all tasks, with those that ranks run set apart


def graph_of(arrays: Sequence[DaskArray], options: Options) -> ArraysGraph:
    """Return the graph of some arrays.

    Raises `FuseError` or `UnsupportedArrayError` if ranks cannot run it.
    """
    tasks_of: dict[str, Mapping[Key, Any]]
    if is_expression(arrays[0]):
        found, keys = zip(*map(optimised_tasks, arrays), strict=True)
        layers = HighLevelGraph({}, {})
        tasks_of = {"": {key: task for each in found for key, task in each.items()}}
    else:
        keys = tuple(map(keys_of, arrays))
        layers = HighLevelGraph.merge(*(x.__dask_graph__() for x in arrays))
        tasks_of = {name: tasks_of_layer(each, options) for name, each in layers.layers.items()}
    tasks = {key: task for each in tasks_of.values() for key, task in each.items()}
    read = read_graph(tasks, keys)
    check_tasks(read)
    check_annotations(layers.layers, read.tasks)
    return ArraysGraph(tasks_of, keys, layers, read)


def named_graph(x: DaskArray) -> tuple[str, HighLevelGraph]:
    """Return the name that the keys of an array's blocks have in its graph, and the graph."""
    if not is_expression(x):
        return x.name, x.__dask_graph__()
    tasks, keys = optimised_tasks(x)
    name = str(name_of(keys[0]))
    return name, HighLevelGraph({name: MaterializedLayer(tasks)}, {name: set()})
