"""Sizes of the values of a fused graph, as far as they are known before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf, isnan, prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from dask.task_spec import DataNode, GraphNode, Task

from dask_p2p import tuning
from dask_p2p.engine.task import AssembleTask
from dask_p2p.errors import InputError
from dask_p2p.fusing.planning.tasks import FusedTasks, is_fused, name_of
from dask_p2p.geometry import Chunks, Index, block_shape
from dask_p2p.plans import Plan
from dask_p2p.types import DaskArray, DType, Key, Kind

_REDUCED = 16  # least elements along the axes of a reduction, as a guess


def sizes_of(
    tasks: FusedTasks,
    declared: Mapping[str, Declared],
    inputs_bytes: Mapping[Key, int] = {},
) -> dict[Key, int]:
    """Return the size of each value; an upper bound or a guess where it is not declared.

    `declared` has the blocks of arrays by name, and `inputs_bytes` the sizes of inputs in memory.
    Values of unknown size are left out.
    """
    sizes_bytes = _input_bytes(tasks, inputs_bytes, declared)
    for key, node in tasks.nodes.items():
        size_bytes = _declared_bytes(key, node, declared)
        if size_bytes is None:
            size_bytes = _size_of(node, key, tasks, sizes_bytes)
        if size_bytes is None and isinstance(key, tuple) and "extra" in key[1:2]:
            # Cumulative operations of Dask begin with this part of a block of theirs.
            size_bytes = _declared_bytes((key[0], *key[2:]), None, declared)
        if size_bytes is not None:
            sizes_bytes[key] = size_bytes
    return sizes_bytes


def _input_bytes(
    tasks: FusedTasks, inputs_bytes: Mapping[Key, int], declared: Mapping[str, Declared]
) -> dict[Key, int]:
    """Return the sizes of inputs; that of the largest reader where an input declares none."""
    sizes_bytes, undeclared = dict[Key, int](), set[Key]()
    for key in tasks.inputs:
        size_bytes = inputs_bytes.get(key) or _declared_bytes(key, None, declared)
        if size_bytes is None:
            undeclared.add(key)
        else:
            sizes_bytes[key] = size_bytes
    for key, node in tasks.nodes.items() if undeclared else ():
        for input_key in undeclared.intersection(tasks.reads[key]):
            size_bytes = _declared_bytes(key, node, declared)
            if size_bytes is not None:
                sizes_bytes[input_key] = max(sizes_bytes.get(input_key, 1), size_bytes)
    return sizes_bytes


def _declared_bytes(
    key: Key, node: GraphNode | None, declared: Mapping[str, Declared]
) -> int | None:
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
    return None if isnan(count) else max(1, int(count) * int(blocks.dtype.itemsize))


def _size_of(
    node: GraphNode, key: Key, tasks: FusedTasks, sizes_bytes: Mapping[Key, int]
) -> int | None:
    """Return an upper bound of the size of a task's result, or a guess; None: unknown."""
    if isinstance(node, AssembleTask):
        return prod(block_shape(node.plan.chunks, node.index)) * int(node.output.dtype.itemsize)
    if isinstance(node, DataNode):
        return int(getattr(node.value, "nbytes", 1))
    if is_fused(node):
        return None  # its result may be larger than its inputs
    read = [sizes_bytes[read_key] for read_key in tasks.reads[key] if read_key in sizes_bytes]
    if not read:
        return None
    return max(1, max(read) // _REDUCED) if "keepdims" in _keywords(node) else max(read)


def read_bytes_of(
    node: GraphNode, key: Key, tasks: FusedTasks, sizes_bytes: Mapping[Key, int]
) -> Iterable[int]:
    """Return the number of bytes that a task reads of each key."""
    if not isinstance(node, AssembleTask):
        return (sizes_bytes.get(read_key, 1) for read_key in tasks.reads[key])
    item_bytes = int(node.output.dtype.itemsize)
    return (count * item_bytes for count in node.plan.source_elements(node.index))


def peak_bytes(
    program: Program, sizes_bytes: Mapping[Key, int], *, with_messages: bool = False
) -> int:
    """Return the most bytes that a rank has at the same time, by the sizes of its values.

    `with_messages` they include the regions in messages, as for blocks in host memory.
    """
    uses = dict(program.uses)
    live = sum(sizes_bytes.get(key, 1) for key in (*program.inputs, *program.literals))
    peak = live

    def used(key: Key) -> int:
        uses[key] -= 1
        return 0 if uses[key] else sizes_bytes.get(key, 1)

    for superstep in program.supersteps:
        items = [item for items in superstep.receives.values() for item in items]
        live += sum(sizes_bytes.get(key, 1) for key in {item.received_key for item in items})
        copied_bytes = _copied_bytes(program, superstep) if with_messages else 0
        peak = max(peak, live + copied_bytes)
        live -= sum(used(item.key) for items in superstep.sends.values() for item in items)
        begun = {item.block.key for item in items if not isinstance(item, WholeValue)}
        for step in superstep.steps:
            is_block = isinstance(step, AssembleStep)
            live += 0 if step.key in begun else sizes_bytes.get(step.key, 1)
            peak = max(peak, live)
            reads = [source_key for _, source_key in step.local] if is_block else step.dependencies
            live -= sum(map(used, reads))
    return peak


def _copied_bytes(program: Program, superstep: Superstep) -> int:
    """Return the bytes of regions that an exchange copies into and out of messages."""
    read_bytes = tuning.current.lent_read_bytes if program.reads_memory else inf
    total = 0
    for items in (*superstep.sends.values(), *superstep.receives.values()):
        for item in items:
            if isinstance(item, Regions) and item.size_bytes < read_bytes:
                total += item.size_bytes
    return total


def _keywords(node: GraphNode | None) -> Mapping[str, Any]:
    if not isinstance(node, Task) or isinstance(node, AssembleTask):
        return {}
    bound = node.func.keywords if isinstance(node.func, partial) else {}
    return {**bound, **node.kwargs}


#: Largest size of a value that comes with a call: each rank gets a copy.
MOST_VALUE_BYTES = 2**12


def blocks_of_layers(layers: Mapping[str, Any]) -> dict[str, Declared]:
    """Return the blocks of the arrays that layers belong to, by name.

    Dask keeps the properties of an array with its layer. Other layers are left out.
    """
    blocks = {}
    for name, layer in layers.items():
        annotations = getattr(layer, "collection_annotations", None) or {}
        if annotations.get("chunks") is not None and "dtype" in annotations:
            blocks[name] = Declared(annotations["chunks"], annotations["dtype"])
    return blocks


def blocks_of_expression(expr: Any) -> dict[str, Declared]:
    """Return the blocks of the arrays that an expression consists of, by name."""
    blocks, stack, visited = dict[str, Declared](), [expr], set[str]()
    while stack:
        part = stack.pop()
        if part._name in visited:
            continue
        visited.add(part._name)
        # Merged operations of `dask_array` have their parts as `exprs`.
        stack += [*part.dependencies(), *getattr(part, "exprs", ())]
        with suppress(AttributeError, NotImplementedError):  # no array
            blocks[part._name] = Declared(part.chunks, part.dtype)
    return blocks


@dataclass(frozen=True)
class Declared:
    """The declared properties of an array in a graph, of an argument, or of a result."""

    chunks: Chunks
    dtype: DType
    meta: Any = None  # None: not needed

    @classmethod
    def from_array(cls, x: DaskArray) -> Declared:
        return cls(x.chunks, x.dtype, x._meta)

    @property
    def takes_values(self) -> bool:
        """True if an argument may be a number or a small NumPy array: it has one small block."""
        count = prod(map(sum, self.chunks))
        is_one = all(len(sizes) == 1 for sizes in self.chunks) and not isnan(count)
        is_small = is_one and count * self.dtype.itemsize <= MOST_VALUE_BYTES
        return is_small and isinstance(self.meta, np.ndarray)

    def value_of(self, number: int, x: Any) -> Any:
        return DeclaredValue(tuple(map(sum, self.chunks)), self.dtype).value_of(number, x)

    def check(self, number: int, x: Any) -> None:
        """Refuse an argument, by its number, of other chunks or of another dtype."""
        if x.chunks != self.chunks:
            raise InputError(
                f"argument {number}: expected the chunks of the example, {self.chunks}, got "
                f"{x.chunks}. Call x.rechunk, or compile the function for these chunks."
            )
        if x.dtype != self.dtype:
            raise InputError(
                f"argument {number}: expected the dtype of the example, {self.dtype}, got "
                f"{x.dtype}. Call x.astype, or compile the function for this dtype."
            )


@dataclass(frozen=True)
class DeclaredValue:
    """The properties of an argument that is a number, or a small NumPy array."""

    shape: tuple[int, ...]
    dtype: DType

    @classmethod
    def from_example(cls, x: Any, dtypes: Iterable[DType]) -> DeclaredValue:
        """Return the properties of an example.

        A number of Python has the precision of the arrays, whose dtypes are given: as in NumPy, a
        product with it keeps their dtype.
        """
        dtype = np.asarray(x).dtype
        inexact = [array_dtype for array_dtype in dtypes if array_dtype.kind in "fc"]
        if type(x) in (float, complex) and inexact:
            dtype = np.result_type(*inexact, x)
            if type(x) is float and dtype.kind == "c":
                dtype = np.empty(0, dtype).real.dtype
        return cls(np.shape(x), dtype)

    def value_of(self, number: int, x: Any) -> Any:
        """Return an argument, by its number, as a NumPy array.

        Raises `InputError` for other arguments than values, for another shape, or for a value that
        the dtype cannot hold.
        """
        if not is_value(x):
            raise InputError(
                f"argument {number}: expected a number or a NumPy array of at most 4 KiB, as in "
                f"compile, got {type(x).__name__}. For results of calls compile the function with "
                f"a Dask array: da.from_array(np.array(0.0))."
            )
        value = np.asarray(x)
        if value.shape != self.shape:
            raise InputError(
                f"argument {number}: expected a value of the shape of the example, {self.shape}, "
                f"got {value.shape}. Compile the function for this shape."
            )
        if np.can_cast(value.dtype, self.dtype, "same_kind"):
            with np.errstate(over="ignore", invalid="ignore"):
                converted = value.astype(self.dtype, order="C")
            if self.dtype.kind not in "iu" or (converted == value).all():
                return converted
        raise InputError(
            f"argument {number}: expected a value for the dtype of the example, {self.dtype}, got "
            f"{x!r:.80}. Compile the function with an example of this type, such as 0.0."
        )


def is_value(x: Any) -> bool:
    """Return whether an argument is a number, or a small NumPy array."""
    if isinstance(x, (np.ndarray, np.generic)):
        return bool(x.nbytes <= MOST_VALUE_BYTES and x.dtype.kind in "?biufcmM")
    return isinstance(x, (bool, int, float, complex))


class AssembledBlock(NamedTuple):
    """A block that one rank assembles from regions of blocks, perhaps of other ranks."""

    key: Key
    plan: Plan  # assembly of the whole array
    position: Index  # index of the block
    dtype: DType  # of the sources, and of the assembled block
    epilogue: Callable[[Any, Index], Any] | None  # see `OutputSpec.epilogue`


class AssembleStep(NamedTuple):
    """The assembly of a block by its owner."""

    block: AssembledBlock
    local: tuple[tuple[int, Key], ...]  # sources of the same rank: position in the plan, and key

    @property
    def key(self) -> Key:
        return self.block.key


class WholeValue(NamedTuple):
    """A message's item: a whole value, for tasks of another rank."""

    key: Key

    @property
    def received_key(self) -> Key:
        return self.key


class Regions(NamedTuple):
    """A message's item: all regions of a value that an assembled block of another rank needs."""

    key: Key  # of the source
    number: int  # position of the source in the block's plan
    block: AssembledBlock
    size_bytes: int

    @property
    def received_key(self) -> Key:
        return self.block.key


Item: TypeAlias = WholeValue | Regions
#: Items by the rank at the other end. Both ends list the same items in the same order.
Items: TypeAlias = dict[int, list[Item]]


@dataclass
class Superstep:
    """One exchange with other ranks, and then the tasks that need nothing later of them."""

    sends: Items = field(default_factory=dict)
    receives: Items = field(default_factory=dict)
    steps: list[Any] = field(default_factory=list)  # Dask's tasks and `AssembleStep`, in order


class CallValue(NamedTuple):
    """A literal that comes with each call of a compiled function: a number, or a small array."""

    number: int  # of the argument
    kind: Kind  # of the array that functions get


@dataclass(frozen=True)
class Program:
    """The program of one rank.

    A value has as many *uses* as local tasks and items of messages read it, and one more as an
    output. The rank drops it after its last use.
    """

    inputs: tuple[Key, ...]  # keys of the blocks that Dask passes to the rank
    literals: dict[Key, Any]  # values that the graph contains, or `CallValue` in their place
    supersteps: tuple[Superstep, ...]
    uses: Mapping[Key, int]
    outputs: tuple[tuple[Key, ...], ...]  # by array: keys of the rank's output blocks
    reads_memory: bool  # whether ranks read large values in each other's memory, if they can
    declared_bytes: int = 0  # most bytes of its values at the same time, as far as declared

    @property
    def call_values(self) -> dict[Key, CallValue]:
        literals = self.literals.items()
        return {key: literal for key, literal in literals if isinstance(literal, CallValue)}
