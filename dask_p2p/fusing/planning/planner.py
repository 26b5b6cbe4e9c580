"""Programs of ranks, made from the owner and the superstep of each task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from dask.task_spec import DataNode

from dask_p2p import tuning
from dask_p2p.engine.task import AssembleTask
from dask_p2p.fusing.planning.owners import UNKNOWN, Locations, owners_of
from dask_p2p.fusing.planning.sizes import (
    AssembledBlock,
    AssembleStep,
    Item,
    Program,
    Regions,
    Superstep,
    WholeValue,
    peak_bytes,
    read_bytes_of,
)
from dask_p2p.fusing.planning.tasks import FusedTasks, name_of
from dask_p2p.geometry import block_shape
from dask_p2p.plans import Plan
from dask_p2p.types import Key

#: Smallest memory of a rank that is worth a second plan, with smaller exchanges.
_LARGE_EXCHANGES_BYTES = 2**23
#: Programs of more exchanges are not planned again.
_FEW_EXCHANGES = 16
#: A smaller exchange brings a rank at least so many bytes for each rank, and this part of its
#: memory: it takes up to half a millisecond. Their senders pack as many, in addition to the blocks.
_EXCHANGED_BYTES, _PARTS = 2**18, 32
_WORTHWHILE = 0.9  # least ratio of memory that counts


def programs_of(
    tasks: FusedTasks,
    size: int,
    sizes_bytes: Mapping[Key, int],
    pinned: Mapping[Key, int] = {},
    locations: Locations = UNKNOWN,
) -> list[Program]:
    """Return the program of each rank, by rank; for the other arguments see `owners_of`."""
    owners = owners_of(tasks, size, sizes_bytes, pinned, locations)
    supersteps = supersteps_of(tasks, owners)
    programs = _Writer(tasks, size, owners, supersteps).programs(sizes_bytes)
    # Ranks on GPUs read regions in place, so they need no smaller exchanges.
    is_on_gpu = any(
        isinstance(node, AssembleTask) and node.output.kind != "numpy"
        for node in tasks.nodes.values()
    )
    if size > 1 and len(programs[0].supersteps) <= _FEW_EXCHANGES and not is_on_gpu:
        most_bytes = _most_bytes(programs, sizes_bytes)
        if most_bytes >= _LARGE_EXCHANGES_BYTES:
            part_bytes = max(_EXCHANGED_BYTES * size, most_bytes // _PARTS)
            parts = divided(tasks, owners, supersteps, sizes_bytes, part_bytes)
            smaller = _Writer(tasks, size, owners, parts).programs(sizes_bytes)
            if _most_bytes(smaller, sizes_bytes) < _WORTHWHILE * most_bytes:
                programs = smaller
    return [replace(p, declared_bytes=peak_bytes(p, sizes_bytes)) for p in programs]


def _most_bytes(programs: Sequence[Program], sizes_bytes: Mapping[Key, int]) -> int:
    """Return the most bytes of a rank, if each had as many inputs, which Dask keeps in any case."""
    inputs_bytes, most_bytes, present_sizes = 0, 0, {**sizes_bytes}
    for program in programs:
        input_sizes = {key: sizes_bytes.get(key, 1) for key in program.inputs}
        present_sizes |= dict.fromkeys(input_sizes, 0)
        most_bytes = max(most_bytes, peak_bytes(program, present_sizes, with_messages=True))
        present_sizes |= input_sizes  # other ranks may receive them
        inputs_bytes += sum(input_sizes.values())
    return most_bytes + inputs_bytes // len(programs)


class _Writer:
    """Writes the programs of all ranks, task by task in the order of the graph."""

    def __init__(
        self,
        tasks: FusedTasks,
        size: int,
        owners: Mapping[Key, int],  # by key; small literals have none
        supersteps: Mapping[Key, int],  # by key
    ) -> None:
        self._tasks, self._owners, self._supersteps = tasks, owners, supersteps
        count = max(supersteps.values(), default=0) + 1
        self._steps = [[Superstep() for _ in range(count)] for _ in range(size)]
        self._uses = [defaultdict[Key, int](int) for _ in range(size)]
        self._plans: dict[Plan, Plan] = {}  # one object for equal plans: it is pickled once
        self._wholes: dict[tuple[Key, int], int] = {}  # superstep, by key and receiver
        self._largest_bytes = 0

    def programs(self, sizes_bytes: Mapping[Key, int]) -> list[Program]:
        for key, node in self._tasks.nodes.items():
            if isinstance(node, AssembleTask):
                self._add_assembly(key, node)
            elif not isinstance(node, DataNode):
                self._add(key, node)
        for (key, rank), superstep in self._wholes.items():
            self._send(WholeValue(key), rank, superstep)
            self._largest_bytes = max(self._largest_bytes, sizes_bytes.get(key, 1))
        reads_memory = self._largest_bytes >= tuning.current.read_bytes
        return [self._program(rank, reads_memory) for rank in range(len(self._steps))]

    def _add(self, key: Key, node: Any) -> None:
        rank, superstep = self._owners[key], self._supersteps[key]
        for read_key in self._tasks.reads[key]:
            self._read(read_key, rank, superstep)
        self._steps[rank][superstep].steps.append(node)

    def _add_assembly(self, key: Key, node: AssembleTask) -> None:
        """Add the assembly of a block, and the regions that other ranks send for it."""
        rank, superstep = self._owners[key], self._supersteps[key]
        plan = self._plans.setdefault(node.plan, node.plan)
        output = node.output
        block = AssembledBlock(key, plan, node.index, output.dtype, output.epilogue)
        item_bytes = int(block.dtype.itemsize)
        local = []
        for number, (source_key, elements) in enumerate(node.reads()):
            if self._is_local(source_key, rank):
                self._uses[rank][source_key] += 1
                local.append((number, source_key))
            else:
                regions = Regions(source_key, number, block, elements * item_bytes)
                self._send(regions, rank, superstep)
        self._steps[rank][superstep].steps.append(AssembleStep(block, tuple(local)))
        size_bytes = prod(block_shape(plan.chunks, node.index)) * item_bytes
        self._largest_bytes = max(self._largest_bytes, size_bytes)

    def _program(self, rank: int, reads_memory: bool) -> Program:
        uses, owners = self._uses[rank], self._owners
        outputs = tuple(
            tuple(key for key in keys if owners.get(key, 0) == rank) for keys in self._tasks.outputs
        )
        for keys in outputs:
            for key in keys:
                uses[key] += 1
        inputs = tuple(key for key in self._tasks.inputs if uses.get(key) and owners[key] == rank)
        nodes = self._tasks.nodes
        literals = {
            key: nodes[key].value
            for key in uses
            if isinstance(nodes.get(key), DataNode) and self._is_local(key, rank)
        }
        supersteps = tuple(self._steps[rank])
        return Program(inputs, literals, supersteps, dict(uses), outputs, reads_memory)

    def _is_local(self, key: Key, rank: int) -> bool:
        return self._owners.get(key, rank) == rank

    def _read(self, key: Key, rank: int, superstep: int) -> None:
        self._uses[rank][key] += 1
        if not self._is_local(key, rank):
            first = self._wholes.get((key, rank), superstep)
            self._wholes[key, rank] = min(first, superstep)

    def _send(self, item: Item, rank: int, superstep: int) -> None:
        owner = self._owners[item.key]
        self._uses[owner][item.key] += 1
        self._steps[owner][superstep].sends.setdefault(rank, []).append(item)
        self._steps[rank][superstep].receives.setdefault(owner, []).append(item)


# The superstep of each task: the number of the exchange that precedes it.
#
# A task that reads a value of another rank is in a later superstep than this value. Layers follow
# each other depth first, and tasks of a layer wait for all layers before it except the last one. So
# branches of a graph run one after the other, and hold about as little memory as in the order of
# layers. The tasks of a layer that need no other rank run before the exchange. So a stencil of
# blocks that are made on the fly, and reduced, holds few of them at a time. Inputs of other ranks
# come with the first exchange, so that all ranks run the tasks of a layer in the same superstep.

_INPUT = -1  # superstep of inputs: the first exchange brings those of other ranks


def supersteps_of(tasks: FusedTasks, owners: Mapping[Key, int]) -> dict[Key, int]:
    """Return the superstep of each task, by key."""
    supersteps: dict[Key, int] = {}
    least = 0  # of the tasks of the present layer
    finished = 0  # largest superstep of the layers before
    present = 0  # largest superstep of the present layer so far
    layer: Any = None
    for key in _by_layer(tasks):
        if key not in owners:
            continue  # a literal of all ranks
        if layer != (layer := name_of(key)):
            least, finished, present = finished, max(finished, present), 0
        owner = owners[key]
        superstep = least
        for source in tasks.reads[key]:
            if source in owners:
                is_sent = owners[source] != owner
                superstep = max(superstep, supersteps.get(source, _INPUT) + is_sent)
        supersteps[key] = superstep
        present = max(present, superstep)
    return supersteps


def divided(
    tasks: FusedTasks,
    owners: Mapping[Key, int],
    supersteps: Mapping[Key, int],
    sizes_bytes: Mapping[Key, int],
    most_bytes: int,
) -> dict[Key, int]:
    """Return supersteps whose exchanges bring a rank about so many bytes of others at most.

    A superstep with more becomes several. Each of them has an exchange, and then the tasks that
    need nothing of a later one. So blocks that are reduced follow each other, as in Dask's order.
    """
    parts: dict[Key, tuple[int, int]] = {}  # superstep, and number of its part, by key
    present = defaultdict[tuple[int, int], int](int)  # part that is filled, by rank and superstep
    filled = defaultdict[tuple[int, int], int](int)  # its bytes
    received = set[tuple[Key, int]]()  # values of other ranks, with their readers
    for key, node in tasks.nodes.items():
        if key not in supersteps:
            continue
        owner, superstep = owners[key], supersteps[key]
        at, come_bytes, part = (owner, superstep), 0, 0
        read_bytes = read_bytes_of(node, key, tasks, sizes_bytes)
        for read_key, size_bytes in zip(tasks.reads[key], read_bytes, strict=True):
            if owners.get(read_key, owner) == owner:
                read_superstep, number = parts.get(read_key, (0, 0))
                part = max(part, number if read_superstep == superstep else 0)
            elif isinstance(node, AssembleTask) or (read_key, owner) not in received:
                come_bytes += size_bytes
                received.add((read_key, owner))
        if come_bytes:
            if filled[at] and filled[at] + come_bytes > most_bytes:
                present[at], filled[at] = present[at] + 1, 0
            filled[at] += come_bytes
            part = max(part, present[at])
        parts[key] = superstep, part
    numbers = {pair: number for number, pair in enumerate(sorted({*parts.values()}))}
    return {key: numbers[pair] for key, pair in parts.items()}


def _by_layer(tasks: FusedTasks) -> Iterable[Key]:
    """Return the keys of all tasks, layer after layer, depth first.

    If tasks of two layers read each other, return the keys in the order of the tasks.
    """
    layers: defaultdict[Any, list[Key]] = defaultdict(list)
    read: defaultdict[Any, dict[Any, None]] = defaultdict(dict)
    for key in tasks.nodes:
        layers[name := name_of(key)].append(key)
        read[name].update(dict.fromkeys(map(name_of, tasks.reads[key])))
    order: dict[Any, None] = {}
    begun = set[Any]()
    stack = list(dict.fromkeys(name_of(key) for keys in tasks.outputs for key in keys))[::-1]
    while stack:
        name = stack[-1]
        if name in order or name not in layers:
            stack.pop()
        elif name in begun:
            stack.pop()
            order[name] = None
        else:
            begun.add(name)
            unfinished = [x for x in read[name] if x != name and x not in order]
            if not begun.isdisjoint(unfinished):
                return tasks.nodes
            stack += reversed(unfinished)
    return [key for name in order for key in layers[name]]
