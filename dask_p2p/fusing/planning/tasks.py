"""The tasks of Dask arrays: those that ranks run, and those that stay with Dask.

Tasks that may take very different times stay with Dask: reads of files, and functions without any
input. So do tasks with futures among their arguments, sections, shuffles, and all that these read.
Their results are the inputs of the gang.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask._task_spec import convert_legacy_graph
from dask.core import flatten
from dask.task_spec import Alias, DataNode, GraphNode, Task
from dask.utils import apply

from dask_p2p.backends import backend_for
from dask_p2p.config import Options
from dask_p2p.engine.assembly import OutputSpec
from dask_p2p.engine.task import AssembleTask, RankTask, WaitTask
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.graph import assemble_tasks, check_one_library
from dask_p2p.ops.arguments import check_array
from dask_p2p.plans.grid import redistribution
from dask_p2p.types import DaskArray, Key, Kind

# Functions of Dask and of `dask_array`, by name and module. The latter is never imported from here.
_GETTERS = (  # that read an array's blocks
    {"getter", "getter_inline", "getter_nofancy"},
    {"dask.array.core", "dask_array._core_utils"},
)
_SLICES = ({"getitem"}, {"_operator", "dask.array.chunk", "dask_array._chunk"})
_STORES = ({"load_store_chunk"}, {"dask.array.core", "dask_array.io._store"})
_BARRIER = "P2PBarrierTask"  # class of Dask's shuffles, imported only where Dask has made one
# Modules whose functions without inputs compute arrays from a few numbers.
_CREATING = (
    *("dask.array.chunk", "dask.array.creation", "dask.array.random", "dask.array.wrap"),
    *("dask_array._chunk", "dask_array.creation._utils", "dask_array.random._expr"),
)
_CREATING_NUMPY: tuple[Any, ...] = (
    *(np.diag, np.empty, np.eye, np.full, np.ones, np.zeros),
    *(np.empty_like, np.full_like, np.ones_like, np.zeros_like),  # of an empty array
)


@dataclass(frozen=True)
class FusedTasks:
    """The tasks that the ranks of a gang run, and those of the same graph that stay with Dask."""

    nodes: Mapping[Key, GraphNode]  # tasks by key, in an order that they can run in
    reads: Mapping[Key, Sequence[Key]]  # distinct keys that each task reads
    #: Keys of the tasks of Dask that ranks read.
    inputs: tuple[Key, ...]
    #: By array: keys of its blocks, in their order.
    outputs: tuple[tuple[Key, ...], ...]
    dask_tasks: Mapping[Key, Any]  # by key: tasks and futures that stay with Dask

    @property
    def widest(self) -> int:
        """Largest number of tasks of one array: more ranks would have nothing to do."""
        names = Counter(map(name_of, (*self.inputs, *self.nodes)))
        return max(names.values(), default=1)


def read_graph(
    graph: Mapping[Key, Any],
    outputs: Sequence[Iterable[Key]],
    known_keys: Container[Key] = (),  # keys of tasks that the scheduler has already
) -> FusedTasks:
    """Return the tasks of a graph that some outputs need, with those that ranks run set apart."""
    nodes = nodes_of(graph)
    output_keys = tuple(tuple(keys) for keys in outputs)
    position = {key: number for number, key in enumerate(graph)}
    reads: dict[Key, Sequence[Key]] = {}
    order = _depth_first(output_keys, nodes, reads, position)
    staying = _find_staying(order, graph, nodes, reads, known_keys)
    of_ranks = {key: nodes[key] for key in order if key not in staying}
    read = {key: reads[key] for key in of_ranks}
    used = [key for keys in (*read.values(), *output_keys) for key in keys]
    inputs = tuple(dict.fromkeys(key for key in used if key not in of_ranks))
    stays = {key: graph[key] for key in (*staying, *inputs) if key in graph}
    return FusedTasks(of_ranks, read, inputs, output_keys, stays)


def before_stores(
    graph: Mapping[Key, Any], outputs: Sequence[Key]
) -> tuple[Sequence[Key], dict[Key, Any]]:
    """Return the keys of all that tasks of `da.store` write, and these tasks with all after them.

    These tasks write to memory or files of their process, so they stay with Dask. Other outputs
    are among the keys, too.
    """
    nodes = nodes_of(graph)
    if not any(map(_stores, nodes.values())):
        return outputs, {}
    reads: dict[Key, Sequence[Key]] = {}
    order = _depth_first([outputs], nodes, reads, {})
    after = dict[Key, Any]()
    for key in order:
        if _stores(nodes[key]) or any(read_key in after for read_key in reads[key]):
            after[key] = graph[key]
    read = dict.fromkeys(source for key in after for source in reads[key] if source not in after)
    targets = {key: graph[key] for key in read if isinstance(nodes.get(key), DataNode)}
    written = [key for key in (*read, *outputs) if key in nodes and key not in after | targets]
    return [*dict.fromkeys(written)], targets | after


def name_of(key: Key) -> Any:
    """Return the name of the array, or of the value, that a task makes."""
    return key[0] if isinstance(key, tuple) and key else key


def keys_of(x: DaskArray) -> list[Key]:
    """Return the keys of an array's blocks, with the last axis fastest."""
    return list(flatten(x.__dask_keys__()))


def nodes_of(graph: Mapping[Key, Any]) -> dict[Key, GraphNode]:
    """Return a graph's tasks in Dask's present form; futures are left out."""
    older = {key: task for key, task in graph.items() if not isinstance(task, GraphNode)}
    nodes = dict(graph)
    if older:
        all_nodes = graph | convert_legacy_graph(older, graph)
        nodes = {key: node for key, node in all_nodes.items() if isinstance(node, GraphNode)}
    # `dask.graph_manipulation` copies some tasks under other keys than their own.
    # Aliases would keep their own key in `substitute`.
    return nodes | {
        key: Alias(key, node.target) if isinstance(node, Alias) else node.substitute({}, key=key)
        for key, node in nodes.items()
        if node.key != key
    }


def _depth_first(
    outputs: Iterable[Iterable[Key]],
    nodes: Mapping[Key, GraphNode],
    reads: dict[Key, Sequence[Key]],  # filled: the keys that each task reads, by key
    position: Mapping[Key, int],  # in the graph, so that all clients get the same order
) -> list[Key]:
    """Return the keys of the tasks that outputs need, each after those that it reads."""
    order: dict[Key, None] = {}
    stack = [key for keys in reversed(list(outputs)) for key in reversed(list(keys))]
    while stack:
        key = stack[-1]
        if key in order or key not in nodes:
            stack.pop()
        elif key in reads:
            stack.pop()
            order[key] = None
        else:
            node = nodes[key]
            if isinstance(node, AssembleTask):
                reads[key] = node.blocks.items
            else:
                reads[key] = sorted(node.dependencies, key=lambda k: position.get(k, -1))
            stack += [read_key for read_key in reversed(reads[key]) if read_key not in order]
    return list(order)


def _find_staying(
    order: Sequence[Key],
    graph: Mapping[Key, Any],
    nodes: Mapping[Key, GraphNode],
    reads: Mapping[Key, Sequence[Key]],
    known_keys: Container[Key],
) -> set[Key]:
    staying = set[Key]()
    for key in reversed(order):
        read = reads[key]
        # A key outside of the graph is that of a future among the task's arguments.
        has_future = any(read_key not in graph for read_key in read)
        if key in staying or has_future or key in known_keys or _stays(nodes[key], nodes, read):
            staying.add(key)
            staying.update(read)
    return staying | _slices_of_reads(order, nodes, reads, staying)


def _slices_of_reads(
    order: Sequence[Key],
    nodes: Mapping[Key, GraphNode],
    reads: Mapping[Key, Sequence[Key]],
    staying: Container[Key],
) -> set[Key]:
    """Return the keys of slices that alone read a block that stays: Dask may read only these."""
    readers = Counter(read_key for read in reads.values() for read_key in read)
    sliced = set[Key]()
    for key in order:
        read, node = reads[key], nodes[key]
        if len(read) != 1 or key in staying or not _is_of(getattr(node, "func", None), _SLICES):
            continue
        source = nodes.get(read[0])
        is_read = read[0] in staying and _is_of(getattr(source, "func", None), _GETTERS)
        if readers[read[0]] == 1 and (is_read or read[0] in sliced):
            sliced.add(key)
    return sliced


def _stays(node: GraphNode, nodes: Mapping[Key, GraphNode], read: Iterable[Key]) -> bool:
    """Return whether a task stays with Dask, apart from futures among its inputs."""
    if isinstance(node, DataNode):
        return not _is_in_memory(node.value)
    if isinstance(node, (RankTask, WaitTask)):  # of a section: its ranks wait for all workers
        return True
    if any(type(neighbour).__name__ == _BARRIER for neighbour in (node, *map(nodes.get, read))):
        return True
    if not isinstance(node, Task) or isinstance(node, AssembleTask):
        return False
    if _is_of(node.func, _GETTERS):
        source = node.args[0]
        if node.dependencies:
            source = nodes.get(source.key)
        return not _is_in_memory(source.value if isinstance(source, DataNode) else source)
    if node.dependencies:
        return False
    function = _function(node)  # ranks make arrays of a few numbers
    is_creator = any(function is creator for creator in _CREATING_NUMPY)
    return not is_creator and getattr(function, "__module__", "") not in _CREATING


def _stores(node: GraphNode) -> bool:
    if not isinstance(node, Task):
        return False
    if parts := parts_of(node):
        return any(map(_stores, parts.values()))
    return _is_of(_function(node), _STORES)


def _is_of(function: Any, names_and_modules: tuple[set[str], set[str]]) -> bool:
    names, modules = names_and_modules
    is_named = getattr(function, "__name__", "") in names
    return is_named and getattr(function, "__module__", "") in modules


def _function(task: Task) -> Any:
    function = task.args[0] if task.func is apply else task.func
    while hasattr(function, "func"):  # of `functools.partial` and `toolz.curry`
        function = function.func
    return function


def is_random(node: Any) -> bool:
    """Return whether a task draws random numbers for an array of `dask.array.random`."""
    if not isinstance(node, Task):
        return False
    if parts := parts_of(node):
        return any(map(is_random, parts.values()))
    package, *modules = str(getattr(_function(node), "__module__", "")).split(".")
    return package in ("dask", "dask_array") and "random" in modules


def _is_in_memory(value: Any) -> bool:  # neither an array in a file nor a proxy
    return type(value) is np.ndarray or not hasattr(value, "dtype") or isinstance(value, np.generic)


# Tasks that Dask has fused, as the tasks that they consist of.
#
# A fused task runs its tasks by a scheduler of its own, which takes longer than a rank's step for
# each of them.

_RUN_SUBGRAPH = "_execute_subgraph"  # name of Dask's function, which is private


def unfused(graph: Mapping[Key, Any]) -> dict[Key, Any]:
    """Return a graph with the parts of fused tasks in their place. Other tasks stay.

    The last part of a fused task gets its key.
    """
    tasks = dict[Key, Any]()
    for key, task in graph.items():
        parts = parts_of(task) if isinstance(task, Task) else {}
        # An alias with the key of a part may lead to a task that needs the part.
        tasks |= parts if parts and graph.keys().isdisjoint({*parts} - {key}) else {key: task}
    return tasks


def is_fused(task: Any) -> bool:
    """Return whether Dask has made a task of several."""
    return isinstance(task, Task) and getattr(task.func, "__name__", "") == _RUN_SUBGRAPH


def parts_of(task: Task) -> dict[Key, Any]:
    """Return the tasks of a fused task by key; none for others."""
    if not is_fused(task):
        return {}
    inner, last, names, *inputs = task.args
    if [*names] != [getattr(source, "key", None) for source in inputs]:
        return {}  # its inputs have other keys than those that its parts read
    return {**{key: part for key, part in inner.items() if key != last}, task.key: inner[last]}


# Peer-to-peer rechunks of Dask, as tasks that assemble blocks from regions.
#
# With a client Dask itself chooses this method for many arrays, also where it aligns the blocks of
# ``x + y``. Its tasks wait for each other on the workers, so ranks cannot run them.

#: Name of the class of Dask's layers, which is imported only where Dask has made one.
_LAYER = "P2PRechunkLayer"
_KINDS: Mapping[Any, Kind] = {"numpy.ndarray": "numpy", "cupy.ndarray": "cupy"}  # by class


def tasks_of_layer(layer: Mapping[Key, Any], options: Options) -> Mapping[Key, Any]:
    """Return the tasks of a layer; for a peer-to-peer rechunk, `AssembleTask` under the same keys.

    The rechunk stays with Dask if its array declares blocks of another class, Python objects,
    unknown chunk sizes or empty blocks.
    """
    if type(layer).__name__ != _LAYER:
        return layer
    rechunk: Any = layer
    declared = rechunk.collection_annotations or {}
    kind, dtype = _KINDS.get(declared.get("chunk_type")), declared.get("dtype")
    before, after = rechunk.chunks_input, rechunk.chunks
    are_known = all(size > 0 for sizes in (*before, *after) for size in sizes)
    if kind is None or dtype is None or dtype.hasobject or not are_known:
        return layer
    plan = redistribution(before, range(len(before)), after)
    output = OutputSpec((rechunk.name_input,), dtype, kind, options)
    return assemble_tasks(rechunk.name, plan, output)


#: Annotations of layers that a gang cannot follow for some of its tasks only.
ANNOTATIONS = ("workers", "allow_other_workers", "resources", "retries", "priority")


def check_arrays(arrays: Sequence[DaskArray]) -> None:
    """Refuse arrays of unsuitable blocks.

    Raises `InputError` without an array, and `UnsupportedArrayError` for an argument that is no
    Dask array of NumPy or CuPy blocks, or has Python objects.
    """
    if not arrays:
        raise InputError("expected at least one Dask array, got none. Call fused(x).")
    for x in arrays:
        check_array(x)
        backend_for(x._meta)  # raises its error for other blocks
        _check_dtype(x.dtype, f"array {x.name}")
    check_one_library(arrays)


def kind_of(kinds: Iterable[Kind], tasks: FusedTasks) -> Kind:
    """Return the kind of the blocks that ranks compute with: CuPy's if any of them are.

    `kinds` are those of some arrays in the graph.
    """
    nodes = tasks.nodes.values()
    assembled = {node.output.kind for node in nodes if isinstance(node, AssembleTask)}
    return "cupy" if "cupy" in {*kinds, *assembled} else "numpy"


def kinds_of(arrays: Iterable[DaskArray]) -> set[Kind]:
    """Return the kinds of the blocks of arrays."""
    return {backend_for(x._meta).name for x in arrays}


def check_tasks(tasks: FusedTasks, layers: Mapping[str, Any]) -> None:
    """Refuse tasks that ranks cannot run: `UnsupportedArrayError`.

    Ranks take no Python objects, and no layer that Dask has to run under conditions of its own.
    """
    for key, node in tasks.nodes.items():
        if isinstance(node, AssembleTask):
            _check_dtype(node.output.dtype, f"task {key!r}")
    for name, layer in layers.items():
        annotations = {k: v for k, v in (layer.annotations or {}).items() if k in ANNOTATIONS}
        if annotations and any(key in tasks.nodes for key in layer):
            values = ", ".join(f"{key}={value!r}" for key, value in annotations.items())
            raise UnsupportedArrayError(
                f"layer {name!r} is annotated with {values}, which one gang for all tasks cannot "
                f"honour. Build the array outside of dask.annotate. Annotate only the call of "
                f"fused."
            )


def _check_dtype(dtype: Any, where: str) -> None:
    if dtype.hasobject:
        raise UnsupportedArrayError(
            f"{where}: expected a dtype without Python objects in a fused graph, got {dtype}. "
            f"Convert it, x.astype(...), or compute it without fused."
        )
