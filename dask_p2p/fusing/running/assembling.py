"""Blocks that a rank assembles from regions of its own values, and of other ranks' values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from dask.array.core import concatenate3

from dask_p2p.backends import as_array, checked_block
from dask_p2p.backends.host import IdentityCache
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.fusing.planning.sizes import AssembledBlock, AssembleStep, Regions, Superstep
from dask_p2p.geometry import box_slices
from dask_p2p.plans import BlockPlan, Piece
from dask_p2p.sections.exchange.device import HOST_ARRAYS, Lending, SourcePieces
from dask_p2p.types import Array, DType, Key

#: The plan of a block, and its pieces by source, always in the same order.
_Planned: TypeAlias = tuple[BlockPlan, Mapping[int, SourcePieces]]


def kept_plans(most_pieces: int) -> IdentityCache[_Planned]:
    """Return room for plans with so many pieces."""
    return IdentityCache(most_pieces, size=lambda planned: len(planned[0].pieces))


#: The plans of this process, 20 MB. The plans of 1,000 slabs have a million pieces. The plans of 32
#: blocks of 32 pieces take a rank 3.5 ms. Layers of an iteration have equal plans, and so have the
#: programs of a loop: a process reads equal plans once.
_PLANS = kept_plans(2**14)


class Assembling:
    """The blocks that a rank assembles in its present superstep."""

    def __init__(self, memories: Sequence[Lending] = (HOST_ARRAYS,)) -> None:
        self.memories = memories  # of arrays: that of the host first
        self._begun: dict[Key, Array] = {}  # blocks that have regions of other ranks, by key
        self._others: dict[Key, dict[int, Sequence[Any]]] = {}  # see `add_others`
        self._copied = defaultdict[Key, set[int]](set)  # see `begin_local`, by block

    @property
    def host(self) -> Lending:
        """The memory of the host."""
        return self.memories[0]

    def memory_of(self, value: Any) -> Lending | None:
        """Return the memory of a plain array without Python objects; None for other values."""
        for each in self.memories:  # a loop: a generator takes three times as long
            if each.holds(value):
                return each
        return None

    def is_lent(self, value: Any) -> bool:
        """Return whether other ranks may still be reading the memory of a value."""
        memory = self.memory_of(value)
        return memory is not None and memory.is_lent(value)

    def _memory(self, array: Array) -> Lending:
        memory = self.memory_of(array)
        assert memory is not None, "other values are not declared, and joined by Dask's function"
        return memory

    def source(self, block: AssembledBlock, shape: tuple[int, ...], key: Key, value: Any) -> Array:
        """Return a source of a block, declared with this shape, in its declared dtype.

        Values of undeclared arrays may be of any class. Raises `BlockMismatchError` or
        `UnsupportedArrayError` if another value differs from its array's declaration, or holds
        Python objects.
        """
        memory = self.memory_of(value)
        if memory is None and block.dtype is None:
            return value
        if memory is not None and value.shape == shape and value.dtype == block.dtype:
            return value
        checked: Array = checked_block(as_array(value), key, shape, block.dtype)
        if checked.dtype.hasobject:
            raise UnsupportedArrayError(
                f"block {key!r}: expected a dtype without Python objects in a fused graph, got "
                f"{checked.dtype}. Convert the array, x.astype(...), or compute it without fused."
            )
        return checked

    def add_others(self, block: AssembledBlock, number: int, regions: Sequence[Any]) -> None:
        """Add the regions of a source that differ in class or dtype from those of others."""
        self._others.setdefault(block.key, {})[number] = regions

    def begun(self, block: AssembledBlock, dtype: DType | None, memory: Lending) -> Array:
        """Return the array of a block, allocated with this dtype and memory at the first call.

        Raises `UnsupportedArrayError` if a declared block has regions in several memories.
        """
        out = self._begun.get(block.key)
        if out is None:
            assert dtype is not None, "no region of the block is here yet"
            out = self._begun[block.key] = self._filled(block, dtype, memory)
        if block.dtype is not None and not memory.holds(out):
            raise UnsupportedArrayError(
                f"block {block.key!r}: expected regions of one array library, got NumPy and CuPy "
                f"arrays. Convert the blocks first, map_blocks(cupy.asarray)."
            )
        return out

    def _filled(self, block: AssembledBlock, dtype: DType, memory: Lending) -> Array:
        """Return the array of a block with its constants."""
        plan = planned(block)[0]
        out = memory.backend.empty(plan.shape, dtype)
        if plan.fills:
            memory.fill(out, plan.fills)
        return out

    def begin_local(self, superstep: Superstep, values: Mapping[Key, Any]) -> None:
        """Copy regions of own values into blocks that also get regions of other ranks.

        During these copies messages arrive, and a GPU also reads memory of others. Values that are
        not there yet, or raise an error, are left to `finish`.
        """
        items = (item for each in superstep.receives.values() for item in each)
        keys = {item.block.key for item in items if isinstance(item, Regions)}
        if not keys:
            return
        for step in superstep.steps:
            is_begun = isinstance(step, AssembleStep) and step.block.key in keys
            if is_begun and step.block.dtype is not None:
                self._begin_local(step, values)

    def _begin_local(self, step: AssembleStep, values: Mapping[Key, Any]) -> None:
        block, (plan, pieces) = step.block, planned(step.block)
        for number, key in step.local:
            if key in values:
                with suppress(Exception):
                    source = self.source(block, plan.source_shapes[number], key, values[key])
                    self._copy(block, source, pieces[number], plan.axes)
                    self._copied[block.key].add(number)

    def _copy(
        self, block: AssembledBlock, source: Array, pieces: SourcePieces, axes: Sequence[int]
    ) -> None:
        memory = self._memory(source)
        memory.copy_pieces(self.begun(block, source.dtype, memory), source, pieces, axes)

    def drop(self, key: Key) -> None:
        """Drop the regions of a block that cannot be assembled."""
        self._copied.pop(key, None)
        self._begun.pop(key, None)
        self._others.pop(key, None)

    def finish(self, step: AssembleStep, values: Mapping[Key, Any]) -> Any:
        """Return a block without its epilogue, once the regions of other ranks are in it."""
        block, epilogue = step.block, step.block.epilogue
        plan, pieces = planned(block)
        copied = self._copied.pop(block.key, ())
        sources = {
            number: self.source(block, plan.source_shapes[number], key, values[key])
            for number, key in step.local
            if number not in copied
        }
        is_shuffle = block.dtype is None  # of Dask, which copies even whole blocks
        if plan.is_copy and sources and epilogue is None and not is_shuffle:
            return sources[0]
        if is_shuffle and self._has_others(block, sources):
            return self._joined(block, sources)
        for number, source in sources.items():
            self._copy(block, source, pieces[number], plan.axes)
        out = self._begun.pop(block.key, None)
        if out is None:  # it has constants alone
            assert block.dtype is not None, "rechunks of Dask have no constants"
            out = self._filled(block, block.dtype, self.memories[-1])
        self._memory(out).flush()
        return out

    def _has_others(self, block: AssembledBlock, sources: Mapping[int, Any]) -> bool:
        """Return whether the regions of a block differ in class, memory or dtype."""
        begun = self._begun.get(block.key)
        present = [each for each in (*sources.values(), begun) if each is not None]
        memories = [self.memory_of(each) for each in present]
        if block.key in self._others or None in memories:
            return True
        return len({*memories}) > 1 or len({each.dtype for each in present}) > 1

    def _joined(self, block: AssembledBlock, sources: Mapping[int, Any]) -> Any:
        """Return a block of a rechunk as Dask joins it, for blocks of any class and dtype."""
        (plan, pieces), out = planned(block), self._begun.pop(block.key, None)
        others = self._others.pop(block.key, {})
        regions = {}
        for number in range(len(plan.sources)):
            for position, (_, src, dst) in enumerate(pieces[number]):
                if number in sources:
                    region = sources[number][box_slices(src)]
                elif number in others:
                    region = others[number][position]
                else:
                    assert out is not None, "no region of the source is here yet"
                    region = out[box_slices(dst)]
                regions[tuple(start for start, _ in dst)] = region
        return concatenate3(nested(regions))


def planned(block: AssembledBlock) -> _Planned:
    """Return the plan of a block, and its pieces by source."""
    plan, position = block.plan, block.position

    def compute() -> _Planned:
        of_block, groups = plan.block(position), defaultdict[int, list[Piece]](list)
        for piece in of_block.pieces:
            groups[piece.source].append(piece)
        return of_block, {source: SourcePieces(group) for source, group in groups.items()}

    return _PLANS.get(plan, position, compute)


def nested(regions: Mapping[tuple[int, ...], Any]) -> Any:
    """Return regions as nested lists, by the position of each region in its block."""
    if () in regions:
        return regions[()]
    groups: dict[int, dict[tuple[int, ...], Any]] = {}
    for start in sorted(regions):
        groups.setdefault(start[0], {})[start[1:]] = regions[start]
    return [nested(group) for group in groups.values()]


@contextmanager
def in_task(key: Key) -> Iterator[None]:
    """Name the task in each exception that its function, or a check of its inputs, raises."""
    try:
        yield
    except BaseException as exc:  # also SystemExit
        name_task(exc, key)
        raise


def name_task(exc: BaseException, key: Key) -> None:
    """Name the task in an exception that it has raised."""
    exc.add_note(f"In task {key!r} of a fused graph.")
