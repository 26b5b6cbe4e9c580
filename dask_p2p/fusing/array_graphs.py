"""The graphs of arrays, which are layers, or expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dask
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.utils import ensure_dict

from dask_p2p.config import Options
from dask_p2p.fusing.arguments import reading_values
from dask_p2p.fusing.planning.rechunks import tasks_of_layer
from dask_p2p.fusing.planning.rules import check_annotations, check_tasks
from dask_p2p.fusing.planning.tasks import ReadGraph, is_random, keys_of, name_of, read_graph
from dask_p2p.graph.arrays import is_expression, optimised_tasks
from dask_p2p.types import DaskArray, Key


@dataclass(frozen=True)
class ArraysGraph:
    """The graph of some arrays together."""

    tasks_of: Mapping[str, Mapping[Key, Any]]  # by layer; expressions have one
    keys: Sequence[Sequence[Key]]  # of the blocks of each array
    layers: HighLevelGraph  # without layers where arrays are expressions
    read: ReadGraph  # all tasks, with those that ranks run set apart

    def random_layers(self) -> dict[Any, Any]:
        """Return the layers of `dask.array.random`, by name; None for those of expressions."""
        nodes = {**self.read.tasks.nodes, **self.read.kept}
        names = {name_of(key) for key, node in nodes.items() if is_random(node)}
        return {name: self.layers.layers.get(name) for name in names}


def graph_of(
    arrays: Sequence[DaskArray], options: Options, values: Sequence[DaskArray] = ()
) -> ArraysGraph:
    """Return the graph of some arrays, whose tasks read the `values` of a call.

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
    read = read_graph(reading_values(tasks, values), keys)
    check_tasks(read)
    check_annotations(layers.layers, read.tasks)
    return ArraysGraph(tasks_of, keys, layers, read)


def graph_as_optimised(arrays: Sequence[DaskArray]) -> tuple[list[str], HighLevelGraph]:
    """Return the names that the keys of arrays' blocks have in their graph, and this graph.

    It has the tasks that Dask computes, since the scheduler may have some of them under their keys.
    """
    if is_expression(arrays[0]):
        found, keys = zip(*map(optimised_tasks, arrays), strict=True)
        names = [str(name_of(of_array[0])) for of_array in keys]
        optimised = dict(zip(names, map(MaterializedLayer, found), strict=True))
        return names, HighLevelGraph(optimised, {name: set() for name in optimised})
    with dask.config.set({"p2p.fuse": "off"}):
        optimise = arrays[0].__dask_optimize__
    before = HighLevelGraph.merge(*(x.__dask_graph__() for x in arrays))
    tasks = ensure_dict(optimise(before, [x.__dask_keys__() for x in arrays]))
    # Each task is in the layer that it had, which may have annotations.
    layer_of = {key: name for name, layer in before.layers.items() for key in layer}
    layers: dict[Any, dict[Key, Any]] = {}
    dependencies: dict[Any, set[Any]] = {}
    for key, task in tasks.items():
        name = layer_of.get(key, key)
        layers.setdefault(name, {})[key] = task
        reads = getattr(task, "dependencies", ())
        before_task = {layer_of.get(read, read) for read in reads if read in tasks}
        dependencies.setdefault(name, set()).update(before_task - {name})
    annotations = {name: before.layers[name].annotations for name in before.layers}
    made = {
        name: MaterializedLayer(of_layer, annotations.get(name))
        for name, of_layer in layers.items()
    }
    return [x.name for x in arrays], HighLevelGraph(made, dependencies)
