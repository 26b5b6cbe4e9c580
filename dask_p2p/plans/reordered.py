"""Plans of blocks whose axes lie in memory in another order than that of the array."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dask_p2p.geometry import Chunks, Index
from dask_p2p.plans.base import BlockPlan, Source
from dask_p2p.plans.grid import GridPlan
from dask_p2p.versioned import versioned

__all__ = ["ReorderedPlan"]


@versioned()
@dataclass(frozen=True)
class ReorderedPlan:
    """A plan of blocks that lie in memory with their axes in another order than their index has."""

    plan: GridPlan  # of the blocks, in memory's order of axes
    order: tuple[int, ...]  # axis i of the blocks is axis order[i] of the array and its indices

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks in the array's order of axes."""
        return tuple(self.plan.chunks[self.order.index(a)] for a in range(len(self.order)))

    @property
    def largest_piece(self) -> int:
        """Elements of the largest piece of any block, or a bound of it."""
        return self.plan.largest_piece

    def _place(self, index: Index) -> Index:
        return tuple(index[axis] for axis in self.order)

    def sources(self, index: Index) -> tuple[Source, ...]:
        """Return the blocks that an output block reads from, in the order of its block plan."""
        return self.plan.sources(self._place(index))

    def source_elements(self, index: Index) -> tuple[int, ...]:
        """Return how many elements the output block reads of each of its sources."""
        return self.plan.source_elements(self._place(index))

    def block(self, index: Index) -> BlockPlan:
        """Return how the output block at `index` is assembled."""
        return self.plan.block(self._place(index))
