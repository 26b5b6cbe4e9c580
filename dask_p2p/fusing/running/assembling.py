"""Blocks that a rank assembles from regions of its own values, and of other ranks' values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from dask_p2p.backends import as_array, checked_block
from dask_p2p.backends.host import IdentityCache
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.fusing.planning.sizes import AssembledBlock, AssembleStep, Regions, Superstep
from dask_p2p.plans import BlockPlan, Piece
from dask_p2p.sections.exchange.device import HOST_ARRAYS, Lending, SourcePieces
from dask_p2p.types import Array, Key

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
        self.memories, self.host = memories, memories[0]  # of arrays: that of the host first
        self._begun: dict[Key, Array] = {}  # blocks that have regions of other ranks, by key
        self._copied = defaultdict[Key, set[int]](set)  # see `begin_local`, by block

    def memory_of(self, value: Any) -> Lending | None:
        """Return the memory of a plain array without Python objects; None for other values."""
        for memory in self.memories:  # a loop: a generator takes three times as long
            if memory.holds(value):
                return memory
        return None

    def is_lent(self, value: Any) -> bool:
        memory = self.memory_of(value)
        return memory is not None and memory.is_lent(value)

    def _memory(self, array: Array) -> Lending:
        memory = self.memory_of(array)
        assert memory is not None, "sources are plain arrays"
        return memory

    def source(self, block: AssembledBlock, shape: tuple[int, ...], key: Key, value: Any) -> Array:
        """Return a source of a block, declared with this shape, in its declared dtype.

        Raises `BlockMismatchError` if a value differs from its array's declaration.
        """
        memory = self.memory_of(value)
        if memory is not None and value.shape == shape and value.dtype == block.dtype:
            return value
        checked: Array = checked_block(as_array(value), key, shape, block.dtype)
        return checked

    def begun(self, block: AssembledBlock, memory: Lending) -> Array:
        """Return the array of a block, allocated in this memory at the first call.

        Raises `UnsupportedArrayError` if the block has regions in several memories.
        """
        out = self._begun.get(block.key)
        if out is None:
            out = self._begun[block.key] = self._filled(block, memory)
        if not memory.holds(out):
            raise UnsupportedArrayError(
                f"block {block.key!r}: expected regions of one array library, got NumPy and CuPy "
                f"arrays. Convert the blocks first, map_blocks(cupy.asarray)."
            )
        return out

    def _filled(self, block: AssembledBlock, memory: Lending) -> Array:
        plan = planned(block)[0]
        out = memory.backend.empty(plan.shape, block.dtype)
        if plan.fills:
            memory.fill(out, plan.fills)
        return out

    def begin_local(self, superstep: Superstep, values: Mapping[Key, Any]) -> None:
        """Copy regions of own values into blocks that also get regions of other ranks.

        During these copies messages arrive, and a GPU also reads memory of others. Values that are
        not there yet, or raise an error, are left to `finish`.
        """
        items = (item for message_items in superstep.receives.values() for item in message_items)
        keys = {item.block.key for item in items if isinstance(item, Regions)}
        if not keys:
            return
        for step in superstep.steps:
            if isinstance(step, AssembleStep) and step.block.key in keys:
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
        memory.copy_pieces(self.begun(block, memory), source, pieces, axes)

    def drop(self, key: Key) -> None:
        self._copied.pop(key, None)
        self._begun.pop(key, None)

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
        if plan.is_copy and sources and epilogue is None:
            return sources[0]
        for number, source in sources.items():
            self._copy(block, source, pieces[number], plan.axes)
        out = self._begun.pop(block.key, None)
        if out is None:  # it has constants alone
            out = self._filled(block, self.memories[-1])
        self._memory(out).flush()
        return out


def planned(block: AssembledBlock) -> _Planned:
    """Return the plan of a block, and its pieces by source."""
    plan, position = block.plan, block.position

    def compute() -> _Planned:
        of_block, groups = plan.block(position), defaultdict[int, list[Piece]](list)
        for piece in of_block.pieces:
            groups[piece.source].append(piece)
        return of_block, {source: SourcePieces(group) for source, group in groups.items()}

    return _PLANS.get(plan, position, compute)


def name_task(exc: BaseException, key: Key) -> None:
    """Name the task in an exception that it has raised."""
    exc.add_note(f"In task {key!r} of a fused graph.")
