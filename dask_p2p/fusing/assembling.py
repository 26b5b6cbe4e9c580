"""Blocks that a rank assembles from regions of its own values, and of other ranks' values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from dask_p2p.backends import as_array
from dask_p2p.backends.declared import checked_block
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.fusing.program import AssembledBlock, AssembleStep
from dask_p2p.geometry import box_shape, box_slices
from dask_p2p.plans import BlockPlan
from dask_p2p.types import Array, DType, Key


class RegionPair(NamedTuple):
    """A region of a source, and the region of the assembled block that it fills."""

    source: Any  # index that selects the region from the source
    target: Any  # index that selects the region from the assembled block
    shape: tuple[int, ...]  # in the source's order of axes


class _PlannedBlock(NamedTuple):
    """The plan of one block, and its regions by the number of their source."""

    plan: BlockPlan
    pairs: list[list[RegionPair]]


class Assembling:
    """The blocks that a rank assembles in its present phase."""

    def __init__(self) -> None:
        self._planned: dict[Any, _PlannedBlock] = {}  # by the plan's id, and the block's index
        self._begun: dict[Key, Array] = {}  # blocks that have regions of other ranks, by key

    def pairs(self, block: AssembledBlock, number: int) -> list[RegionPair]:
        """Return the regions that a block needs of one of its sources, always in one order."""
        return self._planned_block(block).pairs[number]

    def axes(self, block: AssembledBlock) -> tuple[int, ...]:
        """Return the permutation of axes: axis i of the block is axis ``axes[i]`` of a source."""
        return self._planned_block(block).plan.axes

    def source(self, block: AssembledBlock, number: int, key: Key, value: Any) -> Array:
        """Return a source of a block in its declared dtype.

        Raises `BlockMismatchError` or `UnsupportedArrayError` if the value differs from its
        array's declaration, or holds Python objects.
        """
        shape = self._planned_block(block).plan.source_shapes[number]
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
            out = NUMPY.empty(self._planned_block(block).plan.shape, dtype)
            self._begun[block.key] = out
        return out

    def finish(self, step: AssembleStep, values: Mapping[Key, Any]) -> Any:
        """Return a block, once the regions of other ranks are in it."""
        block, epilogue = step.block, step.block.epilogue
        plan = self._planned_block(block).plan
        sources = {n: self.source(block, n, key, values[key]) for n, key in step.local}
        if plan.is_copy and sources and epilogue is None:
            return sources[0]
        dtype = next((source.dtype for source in sources.values()), block.dtype)
        out = self.begun(block, dtype)
        for number, source in sources.items():
            for region, target, _ in self.pairs(block, number):
                NUMPY.permute_into(out[target], source[region], plan.axes)
        for fill in plan.fills:
            out[box_slices(fill.dst)] = np.full((), fill.value, out.dtype)
        del self._begun[block.key]
        return out if epilogue is None else epilogue(out[...], block.position)

    def _planned_block(self, block: AssembledBlock) -> _PlannedBlock:
        wanted = id(block.plan), block.position
        found = self._planned.get(wanted)
        if found is None:
            plan = block.plan.block(block.position)
            pairs: list[list[RegionPair]] = [[] for _ in plan.sources]
            for number, src, dst in plan.pieces:
                pairs[number].append(RegionPair(box_slices(src), box_slices(dst), box_shape(src)))
            found = self._planned[wanted] = _PlannedBlock(plan, pairs)
        return found


@contextmanager
def in_task(key: Key) -> Iterator[None]:
    """Name the task in each exception that its function, or a check of its inputs, raises."""
    try:
        yield
    except Exception as exc:
        exc.add_note(f"In task {key!r} of a fused graph.")
        raise
