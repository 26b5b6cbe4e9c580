"""The owner of each task: the rank that runs it.

A task belongs to the rank that has most of the bytes that it reads. Among ranks with about as many
bytes, and for tasks without inputs, the position of the block in its array decides. Assembled
blocks of one array are spread evenly: there, bytes move in any case. Small values of several ranks
go to the rank of the one task that needs their combination. So the tree of a reduction takes one
exchange.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from dask.task_spec import DataNode, GraphNode
from dask.utils import key_split

from dask_p2p.engine.task import AssembleTask
from dask_p2p.fusing.planning.sizes import SourceElements, read_bytes_of, sizes_of
from dask_p2p.fusing.planning.tasks import FusedTasks, name_of
from dask_p2p.types import Key

#: Largest literal value that the program of each rank contains that reads it.
MOST_LITERAL_BYTES = 2**12
#: A task that reads more bytes of several ranks is not moved to its reader.
_SMALL_BYTES = 2**16
_FEW_RANKS = 16  # with more, one rank would receive too many messages
_ABOUT = 0.95  # a rank with this part of the most bytes has about as many


def owners_of(
    tasks: FusedTasks,
    size: int,
    sizes_bytes: Mapping[Key, int] | None = None,
    pinned: Mapping[Key, int] = {},
    source_elements: SourceElements | None = None,
) -> dict[Key, int]:
    """Return the owner of each task and input, by key. Small literals have none.

    `sizes_bytes` has the sizes of all values; by default those of `sizes_of`. `pinned` has owners
    that are decided.
    """
    by_position = {**positions((*tasks.inputs, *tasks.nodes), size), **pinned}
    owners = {key: by_position[key] for key in tasks.inputs}
    if size == 1:
        return owners | dict.fromkeys(tasks.nodes, 0)
    sizes_bytes = sizes_of(tasks) if sizes_bytes is None else sizes_bytes
    elements = source_elements or SourceElements()
    shares = _Shares(tasks.nodes, size)
    for key, node in tasks.nodes.items():
        at: defaultdict[int, int] = defaultdict(int)  # bytes that the task reads, by rank
        read_bytes = read_bytes_of(node, key, tasks, sizes_bytes, elements)
        for each, count in zip(tasks.reads[key], read_bytes, strict=True):
            if each in owners:
                at[owners[each]] += count
        if key in pinned:
            owners[key] = pinned[key]
        elif not isinstance(node, DataNode) or sizes_bytes[key] > MOST_LITERAL_BYTES:
            owners[key] = shares.chosen(key, node, at, by_position[key])
    if size <= _FEW_RANKS:
        _move_to_readers(tasks, owners, sizes_bytes, pinned)
    return owners


def _move_to_readers(
    tasks: FusedTasks,
    owners: dict[Key, int],  # changed
    sizes_bytes: Mapping[Key, int],
    pinned: Mapping[Key, int],
) -> None:
    """Move each task that reads few bytes of several ranks to the rank of its only reader."""
    readers: dict[Key, Key | None] = {key: None for keys in tasks.outputs for key in keys}
    for key in reversed([*tasks.nodes]):
        for each in tasks.reads[key]:
            readers[each] = None if each in readers else key
        reader, node = readers.get(key), tasks.nodes[key]
        if reader is None or key not in owners or owners[reader] == owners[key] or key in pinned:
            continue
        if isinstance(node, AssembleTask) or isinstance(tasks.nodes[reader], AssembleTask):
            continue
        read = [each for each in tasks.reads[key] if each in owners]
        is_small = sum(sizes_bytes.get(each, 1) for each in read) <= _SMALL_BYTES
        if is_small and len({owners[each] for each in read}) > 1:
            owners[key] = owners[reader]


def positions(keys: Iterable[Key], size: int) -> dict[Key, int]:
    """Return the rank of each key by its position among the keys of the same array.

    Keys may have words in addition to the index of a block: then those with the same words count.
    Keys of delayed values end in random tokens: then those of one function count, in their order.
    """
    alike: defaultdict[Any, list[Key]] = defaultdict(list)
    for key in keys:
        if isinstance(key, tuple):
            alike[len(key), *(each for each in key if isinstance(each, str))].append(key)
        else:
            alike[key_split(key)].append(key)
    found = {}
    for kind, same in alike.items():
        ordered = same
        with suppress(TypeError):  # keys that have no order stay in that of the graph
            ordered = sorted(same) if isinstance(kind, tuple) else same
        for number, key in enumerate(ordered):
            found[key] = number * size // len(same)
    return found


class _Shares:
    """The number of assembled blocks of each array that each rank has so far."""

    def __init__(self, nodes: Mapping[Key, GraphNode], size: int) -> None:
        counts = Counter(name_of(key) for key, n in nodes.items() if isinstance(n, AssembleTask))
        self._most = {name: -(-count // size) for name, count in counts.items()}
        self._owned = {name: [0] * size for name in counts}

    def chosen(self, key: Key, node: GraphNode, at: Mapping[int, int], preferred: int) -> int:
        """Return the owner of a task, from the bytes that it reads of each rank."""
        if not isinstance(node, AssembleTask):
            return _with_most(at, preferred)
        name = name_of(key)
        owned, most = self._owned[name], self._most[name]
        free = {rank: count for rank, count in at.items() if owned[rank] < most}
        owner = _with_most(free, preferred)
        if owned[owner] >= most:  # none of its sources' owners is free
            owner = owned.index(min(owned))
        owned[owner] += 1
        return owner


def _with_most(at: Mapping[int, int], preferred: int) -> int:
    """Return a rank with about the most bytes; the preferred one if it is among them."""
    if not at:
        return preferred
    enough = _ABOUT * max(at.values())
    if at.get(preferred, -1) >= enough:
        return preferred
    return next(rank for rank, count in at.items() if count >= enough)
