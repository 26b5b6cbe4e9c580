"""Blocks that a rank assembles from regions of its own values, and of other ranks' values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dask_p2p.backends import as_array
from dask_p2p.backends.declared import checked_block
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.fusing.program import AssembledBlock, AssembleStep
from dask_p2p.geometry import box_slices
from dask_p2p.plans import BlockPlan, Piece
from dask_p2p.types import Array, DType, Key

# Pieces of the plans that a rank keeps: about 20 MB. Plans of 1,000 slabs have a million pieces.
_MOST_PIECES = 2**15


class Assembling:
    """The blocks that a rank assembles in its present superstep."""

    def __init__(self) -> None:
        self._plans: dict[Any, BlockPlan] = {}  # by the array's plan and the index of the block
        self._pieces = 0  # of all these plans
        self._begun: dict[Key, Array] = {}  # blocks that have regions of other ranks, by key

    def plan(self, block: AssembledBlock) -> BlockPlan:
        """Return the plan of a block, kept for equal blocks of later layers while there is room."""
        wanted = id(block.plan), block.position
        found = self._plans.get(wanted)
        if found is None:
            found = block.plan.block(block.position)
            self._pieces += len(found.pieces)
            if self._pieces > _MOST_PIECES:
                self._plans.clear()
                self._pieces = len(found.pieces)
            self._plans[wanted] = found
        return found

    def source(self, block: AssembledBlock, number: int, key: Key, value: Any) -> Array:
        """Return a source of a block in its declared dtype.

        Raises `BlockMismatchError` or `UnsupportedArrayError` if the value differs from its
        array's declaration, or holds Python objects.
        """
        shape = self.plan(block).source_shapes[number]
        checked: Array = checked_block(as_array(value), key, shape, block.dtype)
        if checked.dtype.hasobject:
            raise UnsupportedArrayError(
                f"block {key!r}: expected a dtype without Python objects in a fused graph, got "
                f"{checked.dtype}. Convert the array, x.astype(...), or compute it without fused."
            )
        return checked

    def begun(self, block: AssembledBlock, dtype: DType | None) -> Array:
        """Return the memory of a block, allocated with this dtype at the first call."""
        out = self._begun.get(block.key)
        if out is None:
            assert dtype is not None, "no region of the block is here yet"
            out = NUMPY.empty(self.plan(block).shape, dtype)
            self._begun[block.key] = out
        return out

    def finish(self, step: AssembleStep, values: Mapping[Key, Any]) -> Any:
        """Return a block, once the regions of other ranks are in it."""
        block, epilogue = step.block, step.block.epilogue
        plan = self.plan(block)
        sources = {n: self.source(block, n, key, values[key]) for n, key in step.local}
        if plan.is_copy and sources and epilogue is None:
            return sources[0]
        dtype = next((source.dtype for source in sources.values()), block.dtype)
        out = self.begun(block, dtype)
        for number, source in sources.items():
            for _, src, dst in pieces_of(plan, number):
                NUMPY.permute_into(out[box_slices(dst)], source[box_slices(src)], plan.axes)
        for fill in plan.fills:
            out[box_slices(fill.dst)] = np.full((), fill.value, out.dtype)
        del self._begun[block.key]
        return out if epilogue is None else epilogue(out[...], block.position)


def pieces_of(plan: BlockPlan, number: int) -> Sequence[Piece]:
    """Return the pieces of one source of a block, always in the same order."""
    pieces = plan.pieces
    if len(pieces) == len(plan.sources) and pieces[number].source == number:
        return (pieces[number],)  # each source has one, as in a rechunk
    return [piece for piece in pieces if piece.source == number]


@contextmanager
def in_task(key: Key) -> Iterator[None]:
    """Name the task in each exception that its function, or a check of its inputs, raises."""
    try:
        yield
    except Exception as exc:
        exc.add_note(f"In task {key!r} of a fused graph.")
        raise
