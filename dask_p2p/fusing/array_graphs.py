"""The graphs of arrays, which are layers, or expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_p2p.config import Options
from dask_p2p.fusing.planning.rechunks import tasks_of_layer
from dask_p2p.fusing.planning.tasks import keys_of, name_of
from dask_p2p.graph.arrays import is_expression, optimised_tasks
from dask_p2p.types import DaskArray, Key


@dataclass(frozen=True)
class ArraysGraph:
    """The tasks of some arrays together."""

    tasks_of: Mapping[str, Mapping[Key, Any]]  # by layer; expressions have one
    keys: Sequence[Sequence[Key]]  # of the blocks of each array
    layers: HighLevelGraph  # without layers where arrays are expressions

    @property
    def tasks(self) -> dict[Key, Any]:
        """All tasks by key."""
        return {key: task for tasks in self.tasks_of.values() for key, task in tasks.items()}


def graph_of(arrays: Sequence[DaskArray], options: Options) -> ArraysGraph:
    """Return the graph of some arrays. Raises `FuseError` as `tasks_of_layer`."""
    if is_expression(arrays[0]):
        tasks: dict[Key, Any] = {}
        keys = []
        for x in arrays:
            own, of_blocks = optimised_tasks(x)
            tasks |= own
            keys.append(of_blocks)
        return ArraysGraph({"": tasks}, keys, HighLevelGraph({}, {}))
    layers = HighLevelGraph.merge(*(x.__dask_graph__() for x in arrays))
    tasks_of = {name: tasks_of_layer(layer, options) for name, layer in layers.layers.items()}
    return ArraysGraph(tasks_of, [keys_of(x) for x in arrays], layers)


def named_graph(x: DaskArray) -> tuple[str, HighLevelGraph]:
    """Return the name that the keys of an array's blocks have in its graph, and the graph."""
    if not is_expression(x):
        return x.name, x.__dask_graph__()
    tasks, keys = optimised_tasks(x)
    name = str(name_of(keys[0]))
    return name, HighLevelGraph({name: MaterializedLayer(tasks)}, {name: set()})
