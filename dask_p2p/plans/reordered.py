"""Plans of blocks whose axes have another order in memory than in the array."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dask_p2p.geometry import Chunks, Index
from dask_p2p.plans.base import BlockPlan
from dask_p2p.plans.grid import GridPlan
from dask_p2p.versioned import versioned


@versioned(shared=True)  # pickled without cached properties
@dataclass(frozen=True)
class ReorderedPlan:
    """A plan of blocks whose axes have another order in memory than in their index."""

    plan: GridPlan  # plan of the blocks in memory's order of axes
    order: tuple[int, ...]  # axis i of the blocks is axis order[i] of the array and its indices

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks in the array's order of axes."""
        return tuple(self.plan.chunks[self.order.index(a)] for a in range(len(self.order)))

    @property
    def largest_piece(self) -> int:
        return self.plan.largest_piece

    def _plan_index(self, index: Index) -> Index:
        return tuple(index[axis] for axis in self.order)

    def sources(self, index: Index) -> tuple[Index, ...]:
        return self.plan.sources(self._plan_index(index))

    def source_elements(self, index: Index) -> tuple[int, ...]:
        return self.plan.source_elements(self._plan_index(index))

    def block(self, index: Index) -> BlockPlan:
        return self.plan.block(self._plan_index(index))
