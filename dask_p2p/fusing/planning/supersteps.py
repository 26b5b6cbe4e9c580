"""The superstep of each task: the number of the exchange that precedes it.

A task that reads a value of another rank is in a later superstep than this value. Layers follow
each other depth first, and tasks of a layer wait for all layers before it except the last one. So
branches of a graph run one after the other, and hold about as little memory as in the order of
layers. The tasks of a layer that need no other rank run before the exchange. So a stencil of blocks
that are made on the fly, and reduced, holds few of them at a time. Inputs of other ranks
come with the first exchange, so that all ranks run the tasks of a layer in the same superstep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from dask_p2p.engine.task import AssembleTask
from dask_p2p.fusing.planning.sizes import SourceElements, read_bytes_of
from dask_p2p.fusing.planning.tasks import FusedTasks, name_of
from dask_p2p.types import Key

_INPUT = -1  # superstep of inputs: the first exchange brings those of other ranks


def supersteps_of(tasks: FusedTasks, owners: Mapping[Key, int]) -> dict[Key, int]:
    """Return the superstep of each task, by key."""
    supersteps: dict[Key, int] = {}
    least = 0  # of the tasks of the present layer
    done = 0  # largest superstep of the layers before
    present = 0  # largest superstep of the present layer so far
    layer: Any = None
    for key in _by_layer(tasks):
        if key not in owners:
            continue  # a literal of all ranks
        if layer != (layer := name_of(key)):
            least, done, present = done, max(done, present), 0
        owner = owners[key]
        superstep = least
        for each in tasks.reads[key]:
            if each in owners:
                superstep = max(superstep, supersteps.get(each, _INPUT) + (owners[each] != owner))
        supersteps[key] = superstep
        present = max(present, superstep)
    return supersteps


def late_supersteps_of(tasks: FusedTasks, owners: Mapping[Key, int]) -> dict[Key, int]:
    """Return the superstep of each task, as late as its readers allow.

    The last readers have the earliest superstep that they can have. So stencils that are reduced
    first compute the blocks that other ranks need. The others follow one by one after the last
    exchange, up to the reduction. They take little memory if exchanges are few.
    """
    supersteps: dict[Key, int] = {}
    for key in tasks.nodes:
        if key in owners:
            read = [each for each in tasks.reads[key] if each in owners]
            after = [supersteps.get(each, _INPUT) + (owners[each] != owners[key]) for each in read]
            supersteps[key] = max([0, *after])
    latest: dict[Key, int] = {}
    for key in reversed(supersteps):
        latest[key] = superstep = latest.get(key, supersteps[key])
        for each in tasks.reads[key]:
            if each in supersteps:
                late = superstep - (owners[each] != owners[key])
                latest[each] = min(late, latest.get(each, late))
    return latest


def divided(
    tasks: FusedTasks,
    owners: Mapping[Key, int],
    supersteps: Mapping[Key, int],
    sizes_bytes: Mapping[Key, int],
    elements: SourceElements,
    most_bytes: int,
) -> dict[Key, int]:
    """Return supersteps whose exchanges bring a rank about so many bytes of others at most.

    A superstep with more becomes several. Each of them has an exchange, and then the tasks that
    need nothing of a later one. So blocks that are reduced follow each other, as in Dask's order.
    """
    parts: dict[Key, tuple[int, int]] = {}  # superstep, and number of its part, by key
    present = defaultdict[tuple[int, int], int](int)  # part that is filled, by rank and superstep
    filled = defaultdict[tuple[int, int], int](int)  # its bytes
    here = set[tuple[Key, int]]()  # values of other ranks, with their readers
    for key, node in tasks.nodes.items():
        if key not in supersteps:
            continue
        owner, superstep = owners[key], supersteps[key]
        at, come_bytes, part = (owner, superstep), 0, 0
        read_bytes = read_bytes_of(node, key, tasks, sizes_bytes, elements)
        for each, size_bytes in zip(tasks.reads[key], read_bytes, strict=True):
            if owners.get(each, owner) == owner:
                of, number = parts.get(each, (0, 0))
                part = max(part, number if of == superstep else 0)
            elif isinstance(node, AssembleTask) or (each, owner) not in here:
                come_bytes += size_bytes
                here.add((each, owner))
        if come_bytes:
            if filled[at] and filled[at] + come_bytes > most_bytes:
                present[at], filled[at] = present[at] + 1, 0
            filled[at] += come_bytes
            part = max(part, present[at])
        parts[key] = superstep, part
    numbers = {each: number for number, each in enumerate(sorted({*parts.values()}))}
    return {key: numbers[each] for key, each in parts.items()}


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
            others = [each for each in read[name] if each not in order and each != name]
            if any(each in begun for each in others):
                return tasks.nodes
            stack += reversed(others)
    return [key for name in order for key in layers[name]]
