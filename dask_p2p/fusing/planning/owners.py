"""The owner of each task: the rank that runs it.

A task belongs to the rank that has most of the bytes that it reads. Among ranks with about as many
bytes, and for tasks without inputs, the position of the block in its array decides. Assembled
blocks of one array are spread evenly: there, bytes move in any case. Small values of several ranks
go to the rank of the one task that needs their combination. So the tree of a reduction takes one
exchange.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dask.task_spec import DataNode
from dask.utils import key_split

from dask_p2p.engine.task import AssembleTask
from dask_p2p.fusing.planning.sizes import read_bytes_of
from dask_p2p.fusing.planning.tasks import FusedTasks, name_of
from dask_p2p.types import Key

# The owner of each input that lies in the memory of a worker: a rank that will run on this worker.
#
# So Dask's worker fetches no block for a rank, and keeps none until the gang ends. The owner sends
# the block in the first superstep that reads it, and its receiver drops it after the last use.


@dataclass(frozen=True)
class Locations:
    """The workers that have the inputs of a graph."""

    holders: Mapping[Key, Collection[str]] = field(default_factory=dict)  # addresses, by input
    workers: int = 1  # number of the cluster's workers


UNKNOWN = Locations()


def located_owners(locations: Locations, preferred: Mapping[Key, int], size: int) -> dict[Key, int]:
    """Return the owner of each input that lies on a worker with a rank.

    `preferred` has the rank that reads most of each input. It owns the input if it runs on one of
    its workers. Inputs on other workers are left out.
    """
    addresses_of = {key: sorted(locations.holders.get(key, ())) for key in preferred}
    ranks_of = _ranks_of(addresses_of, preferred, size, max(1, size // locations.workers))
    owned = Counter[int]()
    owners = {}
    for key, workers in addresses_of.items():
        ranks = [rank for worker in workers for rank in ranks_of.get(worker, ())]
        if ranks:
            owner = min(ranks, key=lambda rank: (rank != preferred[key], owned[rank]))
            owners[key] = owner
            owned[owner] += 1
    return owners


def _ranks_of(
    addresses_of: Mapping[Key, Collection[str]],
    preferred: Mapping[Key, int],
    size: int,
    ranks_per_worker: int,
) -> Mapping[str, list[int]]:
    """Return the ranks that will run on each worker, at most `ranks_per_worker`.

    Dask's scheduler places a rank where most bytes of its inputs are. So the pairs of a worker and
    a rank with the most inputs come first. A worker that is left gets a rank that is left.
    """
    items = addresses_of.items()
    pairs = Counter((worker, preferred[key]) for key, workers in items for worker in workers)
    ranks_of, free = defaultdict[str, list[int]](list), dict.fromkeys(range(size))
    for worker, rank in sorted(pairs, key=lambda pair: (-pairs[pair], pair[1], pair[0])):
        if rank in free and len(ranks_of[worker]) < ranks_per_worker:
            ranks_of[worker].append(rank)
            del free[rank]
    for worker in sorted({worker for worker, _ in pairs} - {w for w in ranks_of if ranks_of[w]}):
        if free:
            ranks_of[worker].append(free.popitem()[0])
    return ranks_of


#: Largest literal value that the program of each rank contains that reads it.
MOST_LITERAL_BYTES = 2**12
#: A task that reads more bytes of several ranks is not moved to its reader.
_SMALL_BYTES = 2**16
#: With more ranks, one of them would receive too many messages.
_FEW_RANKS = 16
#: A rank with this part of the most bytes has about as many.
_ABOUT = 0.95
#: Most tasks for each input with a second choice of owners. With more, the choice takes longer than
#: the transfer of the input.
_FEW_TASKS = 16
#: The second choice is taken if ranks move less than this part of the bytes of the first.
_CLEARLY = 0.5
#: Then its busiest rank also makes at most this factor of the bytes of the first choice's.
_EVEN = 1.15


def owners_of(
    tasks: FusedTasks,
    size: int,
    sizes_bytes: Mapping[Key, int],
    pinned: Mapping[Key, int] = {},
    locations: Locations = UNKNOWN,
) -> dict[Key, int]:
    """Return the owner of each task and input, by key. Small literals have none.

    `pinned` has owners that are decided. An input in `locations` belongs to a rank on its worker.
    """
    if size == 1:
        return dict.fromkeys((*tasks.inputs, *tasks.nodes), 0)
    by_position = {**positions((*tasks.inputs, *tasks.nodes), size), **pinned}
    block_counts = Counter(
        name_of(key) for key, node in tasks.nodes.items() if isinstance(node, AssembleTask)
    )

    def choose_owners(inputs: Mapping[Key, int]) -> dict[Key, int]:
        owners, owned = dict(inputs), {name: [0] * size for name in block_counts}
        for key, node in tasks.nodes.items():
            at: defaultdict[int, int] = defaultdict(int)  # bytes that the task reads, by rank
            read_bytes = read_bytes_of(node, key, tasks, sizes_bytes)
            for read_key, count in zip(tasks.reads[key], read_bytes, strict=True):
                if read_key in owners:
                    at[owners[read_key]] += count
            if key in pinned:
                owners[key] = pinned[key]
            elif isinstance(node, AssembleTask):
                name = name_of(key)
                block_limit = -(-block_counts[name] // size)
                owners[key] = _with_room(at, by_position[key], owned[name], block_limit)
                owned[name][owners[key]] += 1
            elif not isinstance(node, DataNode) or sizes_bytes[key] > MOST_LITERAL_BYTES:
                owners[key] = _with_most(at, by_position[key])
        if size <= _FEW_RANKS:
            _move_to_readers(tasks, owners, sizes_bytes, pinned)
        return owners

    # Blocks that are neighbours stay together, wherever the inputs lie.
    inputs = {key: by_position[key] for key in tasks.inputs}
    owners = choose_owners(inputs)
    free = {key: rank for key, rank in inputs.items() if key not in pinned}
    located = located_owners(locations, free, size)
    owners |= located
    is_moved = any(inputs[key] != rank for key, rank in located.items())
    if is_moved and len(tasks.nodes) <= _FEW_TASKS * len(inputs):
        following = choose_owners(inputs | located)
        moved_bytes, most_bytes = _work_of(tasks, owners, sizes_bytes)
        other_moved_bytes, other_most_bytes = _work_of(tasks, following, sizes_bytes)
        is_even = other_most_bytes <= _EVEN * most_bytes
        if is_even and other_moved_bytes < _CLEARLY * moved_bytes:
            return following
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
        for read_key in tasks.reads[key]:
            readers[read_key] = None if read_key in readers else key
        reader, node = readers.get(key), tasks.nodes[key]
        if reader is None or key not in owners or owners[reader] == owners[key] or key in pinned:
            continue
        if isinstance(node, AssembleTask) or isinstance(tasks.nodes[reader], AssembleTask):
            continue
        read = [source for source in tasks.reads[key] if source in owners]
        is_small = sum(sizes_bytes.get(source, 1) for source in read) <= _SMALL_BYTES
        if is_small and len({owners[source] for source in read}) > 1:
            owners[key] = owners[reader]


def positions(keys: Iterable[Key], size: int) -> dict[Key, int]:
    """Return the rank of each key by its position among the keys of the same array.

    Keys may have words in addition to the index of a block: then those with the same words count.
    Keys of delayed values end in random tokens: then those of one function count, in their order.
    """
    alike: defaultdict[Any, list[Key]] = defaultdict(list)
    for key in keys:
        if isinstance(key, tuple):
            alike[len(key), *(word for word in key if isinstance(word, str))].append(key)
        else:
            alike[key_split(key)].append(key)
    rank_of = {}
    for kind, same in alike.items():
        ordered = same
        with suppress(TypeError):  # keys that have no order stay in that of the graph
            ordered = sorted(same) if isinstance(kind, tuple) else same
        for number, key in enumerate(ordered):
            rank_of[key] = number * size // len(same)
    return rank_of


def _work_of(
    tasks: FusedTasks, owners: Mapping[Key, int], sizes_bytes: Mapping[Key, int]
) -> tuple[int, int]:
    """Return the bytes that ranks send each other, and the most bytes that one of them makes."""
    moved = dict[tuple[Key, Key | int], int]()  # by key, and block or reader's rank
    made_bytes = Counter[int]()
    for key, node in tasks.nodes.items():
        if key not in owners:
            continue
        owner = owners[key]
        made_bytes[owner] += sizes_bytes.get(key, 1)
        read_bytes = read_bytes_of(node, key, tasks, sizes_bytes)
        for read_key, count in zip(tasks.reads[key], read_bytes, strict=True):
            if owners.get(read_key, owner) != owner:
                moved[read_key, key if isinstance(node, AssembleTask) else owner] = count
    return sum(moved.values()), max(made_bytes.values(), default=0)


def _with_room(
    at: Mapping[int, int], preferred: int, owned: Sequence[int], block_limit: int
) -> int:
    """Return a rank that owns fewer assembled blocks of an array than the limit."""
    free = {rank: count for rank, count in at.items() if owned[rank] < block_limit}
    owner = _with_most(free, preferred)
    # If none of its sources' owners is free, any rank.
    return owner if owned[owner] < block_limit else owned.index(min(owned))


def _with_most(at: Mapping[int, int], preferred: int) -> int:
    """Return a rank with about the most bytes; the preferred one if it is among them."""
    if not at:
        return preferred
    enough = _ABOUT * max(at.values())
    if at.get(preferred, -1) >= enough:
        return preferred
    return next(rank for rank, count in at.items() if count >= enough)
