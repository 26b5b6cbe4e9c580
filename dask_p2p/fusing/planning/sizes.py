"""Sizes of the values of a fused graph, as far as they are known before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import inf, isnan, prod
from typing import Any

from dask.task_spec import DataNode, GraphNode, Task

from dask_p2p import tuning
from dask_p2p.engine.task import AssembleTask
from dask_p2p.fusing.planning.declared import DeclaredBlocks
from dask_p2p.fusing.planning.program import AssembleStep, Program, Regions, Superstep, WholeValue
from dask_p2p.fusing.planning.subgraphs import is_fused
from dask_p2p.fusing.planning.tasks import FusedTasks, name_of
from dask_p2p.geometry import Index, block_shape
from dask_p2p.plans import Plan
from dask_p2p.types import DType, Key

_ITEM_BYTES = 8  # of arrays whose dtype is unknown
_REDUCED = 16  # least elements along the axes of a reduction, as a guess


def sizes_of(
    tasks: FusedTasks,
    inputs_bytes: Mapping[Key, int] = {},
    declared: Mapping[str, DeclaredBlocks] = {},
) -> dict[Key, int]:
    """Return the size of each value; an upper bound or a guess where it is not declared.

    `inputs_bytes` has the sizes of inputs in memory, and `declared` the blocks of arrays by name.
    Values of unknown size are left out: they come from inputs of unknown size.
    """
    sizes_bytes = _input_bytes(tasks, inputs_bytes, declared)
    for key, node in tasks.nodes.items():
        size_bytes = _declared_bytes(key, node, declared)
        if size_bytes is None:
            size_bytes = _size_of(node, key, tasks, sizes_bytes)
        if size_bytes is not None:
            sizes_bytes[key] = size_bytes
    return sizes_bytes


def _input_bytes(
    tasks: FusedTasks, inputs_bytes: Mapping[Key, int], declared: Mapping[str, DeclaredBlocks]
) -> dict[Key, int]:
    """Return the sizes of inputs; that of the largest reader where an input declares none."""
    sizes_bytes, others = dict[Key, int](), set[Key]()
    for key in tasks.inputs:
        size_bytes = inputs_bytes.get(key) or _declared_bytes(key, None, declared)
        if size_bytes is None:
            others.add(key)
        else:
            sizes_bytes[key] = size_bytes
    for key, node in tasks.nodes.items() if others else ():
        for each in others.intersection(tasks.reads[key]):
            size_bytes = _declared_bytes(key, node, declared)
            if size_bytes is not None:
                sizes_bytes[each] = max(sizes_bytes.get(each, 1), size_bytes)
    return sizes_bytes


def _declared_bytes(
    key: Key, node: GraphNode | None, declared: Mapping[str, DeclaredBlocks]
) -> int | None:
    """Return the declared size of a block; None if it is unknown."""
    blocks = declared.get(name_of(key))
    if blocks is None or not isinstance(key, tuple) or len(key) != len(blocks.chunks) + 1:
        return None
    shape = list(block_shape(blocks.chunks, key[1:]))
    # Dask declares the blocks that a reduction begins with as if they were not reduced.
    keywords = _keywords(node)
    if keywords.get("keepdims") and isinstance(keywords.get("axis"), tuple):
        for axis in keywords["axis"]:
            shape[axis] = 1
    count = prod(shape)
    return None if isnan(count) else max(1, int(count) * item_bytes_of(blocks.dtype))


def _size_of(
    node: GraphNode, key: Key, tasks: FusedTasks, sizes_bytes: Mapping[Key, int]
) -> int | None:
    """Return an upper bound of the size of a task's result, or a guess; None: unknown."""
    if isinstance(node, AssembleTask):
        return prod(block_shape(node.plan.chunks, node.index)) * item_bytes_of(node.output.dtype)
    if isinstance(node, DataNode):
        return int(getattr(node.value, "nbytes", 1))
    if is_fused(node):
        return None  # its result may be larger than its inputs
    if not tasks.reads[key]:
        return _created_bytes(node)
    read = [sizes_bytes[each] for each in tasks.reads[key] if each in sizes_bytes]
    if not read:
        return None
    return max(1, max(read) // _REDUCED) if "keepdims" in _keywords(node) else max(read)


def item_bytes_of(dtype: DType | None) -> int:
    """Return the size of an element of an assembled block; a guess if the dtype is unknown."""
    return _ITEM_BYTES if dtype is None else int(dtype.itemsize)


class SourceElements:
    """The number of elements that assembled blocks read of each source, computed once."""

    def __init__(self) -> None:
        #: By plan and index of a block. Equal plans share one dictionary.
        self._found: dict[Plan, dict[Index, Sequence[int]]] = {}
        #: By identity: each plan with its dictionary. The hash of a plan takes long.
        self._by_id: dict[int, tuple[Plan, dict[Index, Sequence[int]]]] = {}

    def of(self, plan: Plan, index: Index) -> Sequence[int]:
        """Return the elements of each source of a block."""
        known = self._by_id.get(id(plan))
        if known is None:
            known = self._by_id[id(plan)] = plan, self._found.setdefault(plan, {})
        found = known[1].get(index)
        if found is None:
            found = known[1][index] = plan.source_elements(index)
        return found


def read_bytes_of(
    node: GraphNode,
    key: Key,
    tasks: FusedTasks,
    sizes_bytes: Mapping[Key, int],
    elements: SourceElements,
) -> Iterable[int]:
    """Return the number of bytes that a task reads of each key."""
    if not isinstance(node, AssembleTask):
        return (sizes_bytes.get(each, 1) for each in tasks.reads[key])
    item_bytes = item_bytes_of(node.output.dtype)
    return (count * item_bytes for count in elements.of(node.plan, node.index))


def peak_bytes(
    program: Program, sizes_bytes: Mapping[Key, int], elements: SourceElements | None = None
) -> int:
    """Return the most bytes that a rank has at the same time, by the sizes of its values.

    With `elements` they include the regions in messages, as for blocks in host memory.
    """
    uses = dict(program.uses)
    live = sum(sizes_bytes.get(key, 1) for key in (*program.inputs, *program.literals))
    peak = live

    def used(key: Key) -> int:
        uses[key] -= 1
        return 0 if uses[key] else sizes_bytes.get(key, 1)

    for superstep in program.supersteps:
        live += sum(sizes_bytes.get(key, 1) for key in _received(superstep))
        copied_bytes = 0 if elements is None else _copied_bytes(program, superstep, elements)
        peak = max(peak, live + copied_bytes)
        live -= sum(used(item.key) for items in superstep.sends.values() for item in items)
        begun = {
            item.block.key
            for items in superstep.receives.values()
            for item in items
            if not isinstance(item, WholeValue)
        }
        for step in superstep.steps:
            is_block = isinstance(step, AssembleStep)
            live += 0 if step.key in begun else sizes_bytes.get(step.key, 1)
            peak = max(peak, live)
            reads = [each for _, each in step.local] if is_block else step.dependencies
            live -= sum(map(used, reads))
    return peak


def _received(superstep: Superstep) -> set[Key]:
    """Return the keys of the values, and of the blocks, that an exchange allocates."""
    return {item.received_key for items in superstep.receives.values() for item in items}


def _copied_bytes(program: Program, superstep: Superstep, elements: SourceElements) -> int:
    """Return the bytes of regions that an exchange copies into and out of messages."""
    read_bytes = tuning.current.lent_read_bytes if program.reads_memory else inf
    total = 0
    for items in (*superstep.sends.values(), *superstep.receives.values()):
        for item in items:
            if isinstance(item, Regions):
                block = item.block
                item_bytes = item_bytes_of(block.dtype)
                size_bytes = elements.of(block.plan, block.position)[item.number] * item_bytes
                total += size_bytes if size_bytes < read_bytes else 0
    return total


def _created_bytes(node: GraphNode) -> int | None:
    """Return the size of an array that a function creates from its shape; None if none is found."""
    if not isinstance(node, Task):
        return 1
    shapes = [each for each in _values(node) if _is_shape(each)]
    return max((prod(shape) * _ITEM_BYTES for shape in shapes), default=None)


def _keywords(node: GraphNode | None) -> Mapping[str, Any]:
    """Return the keyword arguments of a task's function, as far as they are known."""
    if not isinstance(node, Task) or isinstance(node, AssembleTask):
        return {}
    bound = node.func.keywords if isinstance(node.func, partial) else {}
    return {**bound, **node.kwargs}


def _values(node: Task) -> list[Any]:
    """Return the arguments of a task, and those inside of them."""
    found: list[Any] = []
    stack = [*node.args, *node.kwargs.values()]
    while stack:
        value = stack.pop()
        if isinstance(value, DataNode):
            value = value.value
        if isinstance(value, Task):
            stack += [*value.args, *value.kwargs.values()]
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        found.append(value)
    return found


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(type(each) is int for each in value)
