"""Plans: each output block assembled from regions of input blocks. Pure, no arrays, no I/O.

`base` defines plans. `grid` has plans with independent axes, the default chunks of a transpose, and
groups of blocks for large graphs. `halo` has plans of blocks with halos.
"""

from __future__ import annotations

from typing import TypeAlias

from dask_p2p.plans.base import BlockPlan, Fill, Piece, block_plans, stage_order
from dask_p2p.plans.fft import ReorderedPlan
from dask_p2p.plans.grid import GridPlan, group_blocks, redistribution, slab_chunks
from dask_p2p.plans.halo import plan_halo

# fmt: off
__all__ = [
    "BlockPlan", "Fill", "GridPlan", "Piece", "Plan", "block_plans", "group_blocks",
    "plan_halo", "redistribution", "slab_chunks", "stage_order",
]
# fmt: on

#: The assembly of all output blocks from blocks of the input, with the interface of `GridPlan`.
#: Every task carries it: a small value (hashable, picklable) of integers only. Each task makes the
#: pieces of its own block only.
Plan: TypeAlias = GridPlan | ReorderedPlan
