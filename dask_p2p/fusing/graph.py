"""Graphs of several collections, whose tasks one gang runs under the keys that they had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn
from uuid import uuid4

from dask.array.optimization import optimize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.task_spec import Alias, Task
from dask.utils import ensure_dict

from dask_p2p.config import Options
from dask_p2p.fusing.planning.declared import DeclaredBlocks, blocks_of_layers
from dask_p2p.fusing.planning.located import UNKNOWN, Locations
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.program import Program
from dask_p2p.fusing.planning.rechunks import tasks_of_layer
from dask_p2p.fusing.planning.rules import check_annotations, check_tasks, kind_of
from dask_p2p.fusing.planning.sizes import sizes_of
from dask_p2p.fusing.planning.subgraphs import unfused
from dask_p2p.fusing.planning.tasks import (
    ReadGraph,
    before_stores,
    name_of,
    nodes_of,
    read_graph,
)
from dask_p2p.fusing.running.gang import fused_gang
from dask_p2p.fusing.suitability import (
    Cluster,
    check_count,
    check_gain,
    check_suitable,
    exchanges_of,
    ranks_for,
)
from dask_p2p.sections.api.graph import GangTasks
from dask_p2p.sections.gang.tasks import output_tasks
from dask_p2p.types import Key, Kind


@dataclass(frozen=True)
class Known:
    """The part of a graph that the scheduler has already."""

    tasks: Mapping[Key, Any] = field(default_factory=dict)  # with all that these read
    sizes_bytes: Mapping[Key, int] = field(default_factory=dict)  # of values in memory
    locations: Locations = UNKNOWN


@dataclass(frozen=True)
class Choice:
    """The programs that run a graph; none if all of its tasks stay with Dask."""

    read: ReadGraph
    programs: Sequence[Program] = ()
    kind: Kind = "numpy"  # of the blocks that ranks compute with
    after: Mapping[Key, Any] = field(default_factory=dict)  # tasks of Dask that read the outputs
    most_bytes: float | None = None  # of a rank's values; None: `p2p.fuse` is not "auto"
    is_known: bool = False  # whether the scheduler has some of the tasks, and all stay with Dask
    first: DeclaredBlocks | None = None  # blocks of the first output; None: unknown

    def __str__(self) -> str:
        if not self.programs:
            return "by Dask's tasks: all tasks stay with Dask"
        return (
            f"by one gang: {len(self.read.tasks.nodes):,} tasks, {len(self.programs)} ranks, "
            f"{exchanges_of(self.programs)} exchanges"
        )


def choice_of(
    graph: Any,
    keys: Any,
    cluster: Cluster,
    options: Options,
    kinds: Iterable[Kind],  # of the blocks of the arrays
    known: Known = Known(),
    is_auto: bool = True,
    declared: Mapping[str, DeclaredBlocks] = {},
) -> Choice:
    """Return the programs for a graph. Only obstacles count, unless `is_auto`.

    `declared` has the blocks of arrays by name, if the graph has no layers.

    Raises `FuseError` or `UnsupportedArrayError` if Dask runs the graph.
    """
    tasks, layers = _tasks(graph, options)
    tasks |= known.tasks
    wanted, after = before_stores(tasks, list(flatten([keys])))
    read = read_graph(tasks, [wanted], known.tasks)
    # Outputs that stay with Dask have their tasks already.
    outputs = tuple(key for key in read.tasks.outputs[0] if key in read.tasks.nodes)
    read = replace(read, tasks=replace(read.tasks, outputs=(outputs,)))
    if not outputs:
        return Choice(read, is_known=bool(known.tasks) and not after)
    check_tasks(read)
    check_annotations(layers, read.tasks)
    declared = declared or blocks_of_layers(layers)
    sizes_bytes = sizes_of(read.tasks, known.sizes_bytes, declared)
    kind = kind_of(kinds, read)
    size = ranks_for(read.tasks, sizes_bytes, cluster, kind)
    if is_auto:
        check_count(read.tasks)
        check_gain(read.tasks, size)  # before programs are made
    programs = programs_of(read.tasks, size, sizes_bytes, locations=known.locations)
    most_bytes = None
    if is_auto:
        most_bytes = check_suitable(read.tasks, programs, sizes_bytes, cluster, kind)
    first = declared.get(name_of(outputs[0]))
    return Choice(read, programs, kind, after, most_bytes, first=first)


def optimized(graph: Any, keys: Any, choice: Choice, options: Options) -> tuple[Any, str | None]:
    """Return the graph that Dask runs, and the name of its gang.

    Without a gang it is the same graph by Dask's own tasks, and the name is None.
    """
    read = choice.read
    if not choice.programs:
        return optimize(dict(read.kept) if choice.is_known else graph, keys), None
    names = [read.tasks.outputs, sorted(map(str, read.kept))]
    described = read.tasks, choice.programs, names, choice.first, choice.kind, options
    gang = GangTasks.of(work := fused_gang(*described, (), {}, choice.most_bytes))
    found = output_tasks(gang.name, 0, [each.outputs[0] for each in work.ranks])
    layers = {
        f"{gang.name}-inputs": MaterializedLayer(dict(read.kept)),
        gang.name: MaterializedLayer(gang.tasks),
        f"{gang.name}-outputs": MaterializedLayer(found),
        f"{gang.name}-after": MaterializedLayer(dict(choice.after)),
    }
    inputs, own, outputs, after = layers
    dependencies = {inputs: set(), own: {inputs}, outputs: {own}, after: {inputs, outputs}}
    return optimize(HighLevelGraph(layers, dependencies), keys), gang.name


def substitute_tasks(graph: Any, outputs: Sequence[Key]) -> Mapping[Key, Any]:
    """Return the tasks that compute the outputs of a gang without it."""
    return nodes_of(ensure_dict(optimize(graph, list(outputs))))


def failing(keys: Any, error: Exception) -> dict[Key, Task]:
    """Return a graph whose tasks with these keys all fail with an error.

    Without tasks Dask would lose the keys, and cancel later graphs that read arrays of `persist`
    for "lost dependencies".
    """
    name = f"fuse-error-{uuid4().hex}"  # of no value that the scheduler has
    return {name: Task(name, _raised, error)} | {key: Alias(key, name) for key in flatten([keys])}


def _raised(error: Exception) -> NoReturn:
    raise error


def _tasks(graph: Any, options: Options) -> tuple[dict[Key, Any], Mapping[str, Any]]:
    """Return the tasks of a graph, and its layers."""
    if not isinstance(graph, HighLevelGraph):
        return unfused(graph), {}
    layers = {name: tasks_of_layer(layer, options) for name, layer in graph.layers.items()}
    tasks = {key: task for each in layers.values() for key, task in each.items()}
    return tasks, graph.layers
