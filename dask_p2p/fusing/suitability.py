"""The rules of `p2p.fuse: auto`: graphs that one gang runs about as fast as Dask, or faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NoReturn
from uuid import uuid4

from dask.array.optimization import optimize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import Alias, DataNode, Task
from dask.utils import ensure_dict, format_bytes

from dask_p2p import tuning
from dask_p2p.config import Options
from dask_p2p.engine.task import AssembleTask
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.fusing.planning.owners import UNKNOWN, Locations
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.sizes import (
    Declared,
    Program,
    blocks_of_layers,
    peak_bytes,
    sizes_of,
)
from dask_p2p.fusing.planning.tasks import (
    FusedTasks,
    before_stores,
    check_tasks,
    kind_of,
    name_of,
    nodes_of,
    read_graph,
    tasks_of_layer,
    unfused,
)
from dask_p2p.fusing.running.gang import fused_gang
from dask_p2p.inputs import pluralize
from dask_p2p.sections.api.graph import GangTasks
from dask_p2p.sections.gang.rank import output_tasks
from dask_p2p.types import Key, Kind

#: A gang costs about as much as this number of Dask's tasks a rank, and its output tasks.
_LEAST_TASKS = 4
#: Cost of a further input of a task, in tasks.
_COST_OF_INPUT = 0.1
#: With this number of exchanges, fewer tasks are enough: Dask transfers blocks more slowly.
_LEAST_EXCHANGES = 3
#: Largest part of a worker's memory that the values of its ranks may take. Dask fills 60 % with
#: results before it spills any (`distributed.worker.memory.target`), and kills workers at 95 %.
#: The results of one gang may wait for their output tasks while the next one runs.
_MOST_MEMORY = 0.2
#: Memory of a worker's process without data.
_PROCESS_BYTES = 2**27
#: Part of a small worker's memory that ranks may take in any case.
_LEAST_MEMORY = 0.05
#: Largest part of a GPU's memory that the values of its rank may take.
_MOST_DEVICE_MEMORY = 0.5
#: Largest ratio of a rank's bytes to the mean of all ranks.
_MOST_UNEVEN = 2.0
#: Functions of arrays of this size run in parallel in the threads of one process.
_LARGE_BYTES = 2**20


@dataclass(frozen=True)
class Cluster:
    """The properties of a cluster that decide whether a gang runs a graph."""

    workers: int
    threads: int  # of all workers
    memory_bytes: int  # smallest memory limit of a worker; 0: no limit
    has_resources: bool  # whether a worker has resources, such as GPUs
    device_bytes: int = 0  # smallest memory of a worker's GPU; 0: none is known


def ranks_for(
    tasks: FusedTasks, sizes_bytes: Mapping[Key, int], cluster: Cluster, kind: Kind = "numpy"
) -> int:
    """Return the number of ranks for a graph.

    Large NumPy arrays use all threads. Small operations of two threads would wait for Python's
    lock, and operations of a GPU for each other.
    """
    is_large = kind == "numpy" and max(sizes_bytes.values(), default=0) >= _LARGE_BYTES
    return max(1, min(cluster.threads if is_large else cluster.workers, tasks.widest))


def check_count(tasks: FusedTasks) -> None:
    """Refuse a graph of very many tasks: `UnsupportedArrayError`."""
    if len(tasks.nodes) > (task_limit := tuning.current.fused_tasks):
        raise UnsupportedArrayError(
            f"expected at most {task_limit:,} tasks, got {len(tasks.nodes):,}: their programs "
            f"take as long to make as they save. Use larger chunks."
        )


def _check_gain(tasks: FusedTasks, programs: Sequence[Program]) -> None:
    """Refuse a graph of few tasks: `UnsupportedArrayError`."""
    exchanges, outputs = exchanges_of(programs), sum(map(len, tasks.outputs))
    further = max(0.0, tasks_of_dask(tasks) - outputs)
    if exchanges < _LEAST_EXCHANGES and further < _LEAST_TASKS * len(programs):
        count = f"about {pluralize(round(further), 'task')}" if round(further) else "no tasks"
        raise UnsupportedArrayError(
            f"too small to gain: {pluralize(exchanges, 'exchange')} "
            f"({_LEAST_EXCHANGES} needed), and {count} besides "
            f"the {pluralize(outputs, 'output')} ({_LEAST_TASKS} for each of "
            f"{pluralize(len(programs), 'rank')} needed). Compute more operations together."
        )


def check_suitable(
    tasks: FusedTasks,
    programs: Sequence[Program],
    sizes_bytes: Mapping[Key, int],
    cluster: Cluster,
    kind: Kind,
) -> float:
    """Return the most bytes that the values of a rank may take.

    Refuses a graph that Dask probably runs faster, or in less memory: `UnsupportedArrayError`.
    """
    if cluster.has_resources:
        raise UnsupportedArrayError(
            "expected workers without resources, got some that have them: each rank would need "
            "those that the call requests. Call dask_p2p.fused(x)."
        )
    _check_gain(tasks, programs)
    most_bytes = _check_memory(tasks, programs, sizes_bytes, cluster, kind)
    _check_balance(programs, sizes_bytes)
    return most_bytes


def _check_memory(
    tasks: FusedTasks,
    programs: Sequence[Program],
    sizes_bytes: Mapping[Key, int],
    cluster: Cluster,
    kind: Kind,
) -> float:
    limit_bytes, place = cluster.memory_bytes, "a worker"
    least_bytes = int(_LEAST_MEMORY * limit_bytes)
    most_bytes = max(least_bytes, int(_MOST_MEMORY * limit_bytes) - _PROCESS_BYTES)
    if kind == "cupy":
        limit_bytes, place = cluster.device_bytes, "a worker's GPU"
        most_bytes = int(_MOST_DEVICE_MEMORY * limit_bytes)
    if not limit_bytes:
        return inf
    unknown = (key for key in (*tasks.inputs, *tasks.nodes) if key not in sizes_bytes)
    if (key := next(unknown, None)) is not None:
        raise UnsupportedArrayError(
            f"expected values of known sizes, got {key!r} of unknown size: ranks may need more "
            f"memory than Dask, which spills. Give chunk sizes, or call dask_p2p.fused(x)."
        )
    in_host_memory = kind == "numpy"
    peaks = (peak_bytes(p, sizes_bytes, with_messages=in_host_memory) for p in programs)
    peak = max(peaks, default=0)
    # Each thread may run a rank, of this gang or of another one at the same time.
    ranks = -(-max(len(programs), cluster.threads) // max(1, cluster.workers))
    of_worker = peak * ranks
    if of_worker > most_bytes:
        raise UnsupportedArrayError(
            f"expected values of at most {format_bytes(most_bytes)} in the memory of {place}, "
            f"{format_bytes(limit_bytes)}, next to results of Dask, got "
            f"{format_bytes(of_worker)}, which Dask cannot spill while ranks run. Use smaller "
            f"chunks, or workers with more memory."
        )
    return most_bytes / ranks


def _check_balance(programs: Sequence[Program], sizes_bytes: Mapping[Key, int]) -> None:
    steps = ([step for part in program.supersteps for step in part.steps] for program in programs)
    made_bytes = [sum(sizes_bytes.get(step.key, 1) for step in of_rank) for of_rank in steps]
    mean = sum(made_bytes) / max(1, len(made_bytes))
    if max(made_bytes, default=0) > _MOST_UNEVEN * mean:
        raise UnsupportedArrayError(
            f"expected about the same work for all ranks, got {format_bytes(max(made_bytes))} of "
            f"values for one rank and {format_bytes(int(mean))} on average. Reduce the array "
            f"later, or use smaller chunks."
        )


def exchanges_of(programs: Sequence[Program]) -> int:
    """Return the number of exchanges; one in parts counts once, since no part needs another."""
    count, made_keys = 0, set[Key]()  # values since the last exchange began
    for supersteps in zip(*(program.supersteps for program in programs), strict=True):
        sends = [items for superstep in supersteps for items in superstep.sends.values()]
        sent = {item.key for items in sends for item in items}
        if sent and (not count or not sent.isdisjoint(made_keys)):
            count, made_keys = count + 1, set()
        made_keys.update(step.key for superstep in supersteps for step in superstep.steps)
    return count


def tasks_of_dask(tasks: FusedTasks) -> float:
    """Return about the number of tasks that Dask would run, after its fusion of operations.

    Dask fuses elementwise operations with those that no other task reads. A task of many inputs
    costs as much as several of one.
    """
    readers = Counter(read_key for read in tasks.reads.values() for read_key in read)
    fused = set[Key]()
    for key, node in tasks.nodes.items():
        read = tasks.reads[key]
        is_elementwise = all(_index(read_key) in (_index(key), ()) for read_key in read)
        if is_elementwise and not isinstance(node, AssembleTask):
            fused.update(read_key for read_key in read if readers[read_key] == 1)
    return sum(
        1 + _COST_OF_INPUT * max(0, len(tasks.reads[key]) - 1)
        for key, node in tasks.nodes.items()
        if isinstance(node, AssembleTask) or not (isinstance(node, DataNode) or key in fused)
    )


def _index(key: Key) -> object:
    return key[1:] if isinstance(key, tuple) else ()


@dataclass(frozen=True)
class Known:
    """The part of a graph that the scheduler has already."""

    tasks: Mapping[Key, Any] = field(default_factory=dict)  # with all that these read
    sizes_bytes: Mapping[Key, int] = field(default_factory=dict)  # of values in memory
    locations: Locations = UNKNOWN


@dataclass(frozen=True)
class Choice:
    """The programs that run a graph; none if all of its tasks stay with Dask."""

    tasks: FusedTasks
    programs: Sequence[Program] = ()
    kind: Kind = "numpy"  # of the blocks that ranks compute with
    after: Mapping[Key, Any] = field(default_factory=dict)  # tasks of Dask that read the outputs
    most_bytes: float | None = None  # of a rank's values; None: `p2p.fuse` is not "auto"
    known_tasks: Mapping[Key, Any] = field(default_factory=dict)  # tasks that the scheduler has
    arrays: Sequence[Declared] = ()  # the first output; empty: unknown

    def __str__(self) -> str:
        if not self.programs:
            return "by Dask's tasks: all tasks stay with Dask"
        return (
            f"by one gang: {len(self.tasks.nodes):,} tasks, {len(self.programs)} ranks, "
            f"{exchanges_of(self.programs)} exchanges"
        )


def choice_of(
    graph: Any,
    keys: Any,
    cluster: Cluster,
    options: Options,
    kinds: Iterable[Kind],  # of the blocks of the arrays
    known_tasks: Known = Known(),
    is_auto: bool = True,
    declared: Mapping[str, Declared] = {},
) -> Choice:
    """Return the programs for a graph. Only obstacles count, unless `is_auto`.

    `declared` has the blocks of arrays by name, if the graph has no layers.

    Raises `UnsupportedArrayError` if Dask runs the graph.
    """
    layers: Mapping[str, Any] = {}
    if isinstance(graph, HighLevelGraph):
        layers = graph.layers
        tasks_of = [tasks_of_layer(layer, options) for layer in layers.values()]
        all_tasks = {key: task for layer_tasks in tasks_of for key, task in layer_tasks.items()}
    else:
        all_tasks = unfused(graph)
    all_tasks |= known_tasks.tasks
    fused_keys, after = before_stores(all_tasks, list(flatten([keys])))
    tasks = read_graph(all_tasks, [fused_keys], known_tasks.tasks)
    # Outputs that stay with Dask have their tasks already.
    outputs = tuple(key for key in tasks.outputs[0] if key in tasks.nodes)
    tasks = replace(tasks, outputs=(outputs,))
    if not outputs:
        return Choice(tasks)
    check_tasks(tasks, layers)
    declared = declared or blocks_of_layers(layers)
    sizes_bytes = sizes_of(tasks, declared, known_tasks.sizes_bytes)
    kind = kind_of(kinds, tasks)
    size = ranks_for(tasks, sizes_bytes, cluster, kind)
    if is_auto:
        check_count(tasks)
    programs = programs_of(tasks, size, sizes_bytes, locations=known_tasks.locations)
    most_bytes = None
    if is_auto:
        most_bytes = check_suitable(tasks, programs, sizes_bytes, cluster, kind)
    name = name_of(outputs[0])
    arrays = [declared[name]] if name in declared else []
    return Choice(tasks, programs, kind, after, most_bytes, known_tasks.tasks, arrays)


def optimized(keys: Any, choice: Choice, options: Options) -> tuple[dict[Key, Any], str]:
    """Return the graph of a gang and of the tasks that stay with Dask, and the gang's name."""
    tasks = choice.tasks
    names, most_bytes = [tasks.outputs, sorted(map(str, tasks.dask_tasks))], choice.most_bytes
    programs, kind, arrays = choice.programs, choice.kind, choice.arrays
    work = fused_gang(tasks, programs, kind, options, names, arrays, most_bytes=most_bytes)
    gang = GangTasks.for_inputs(work)
    outputs = output_tasks(gang.name, 0, [rank.outputs[0] for rank in work.ranks])
    all_tasks = {**tasks.dask_tasks, **gang.tasks, **outputs, **choice.after}
    # Dask would fuse the tasks that the scheduler has under new names.
    old_tasks = {key: all_tasks.pop(key) for key in choice.known_tasks if key in all_tasks}
    new_keys = [key for key in flatten([keys]) if key in all_tasks]
    return old_tasks | ensure_dict(optimize(all_tasks, new_keys)), gang.name


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
