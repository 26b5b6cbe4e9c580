"""Fewer edges for large graphs: neighbouring output blocks that one task assembles together.

Each block of a transpose of n slabs reads from all n: n² edges, of which each costs Dask's
scheduler 25 to 43 µs and 1 KB. Where one task assembles g neighbours as one larger block, and g
cheap tasks on its worker hand them out, there are n² / g + n edges, and nothing moves twice::

    one task a block    n² edges              grouped    n² / g edges        n edges
    sources ========> blocks                  sources ==========> groups ----------> blocks

That takes one more task a block, some 0.5 ms each, and the latency of one more layer; and blocks of
one group go to the same worker. So it is done above `MOST_EDGES`, and there are at least
`LEAST_GROUPS` groups, and two for each thread of a larger cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod

from dask_p2p.plans.grid import Cut, GridPlan

__all__ = ["LEAST_GROUPS", "MOST_EDGES", "grouped"]

#: Edges that one layer may have: some 0.7 s of the scheduler's time.
MOST_EDGES = 20_000
#: Tasks that there are at least, on a small cluster.
LEAST_GROUPS = 64
_LEAST_GAIN = 2  # times as few edges in all: else the second layer is for nothing


def grouped(plan: GridPlan, groups: int | None, threads: Callable[[], int]) -> GridPlan:
    """Return the plan of larger blocks from which those of a plan can be cut; or the plan itself.

    Parameters
    ----------
    plan
        A redistribution.
    groups
        How many groups to make; 0 for none. None for as many as seem best, where there are many
        edges.
    threads
        Returns how many the cluster has. It is asked only where that matters.
    """
    blocks = prod(map(len, plan.chunks))
    edges = _edges(plan)
    allowed = edges - 1
    if groups is None:
        groups = max(LEAST_GROUPS, 2 * threads()) if edges > MOST_EDGES else 0
        allowed = edges // _LEAST_GAIN - blocks
    if not groups:
        return plan
    together = ceil(blocks / groups)
    if together < 2:
        return plan
    plans = [_merged(plan, axis, together) for axis in range(len(plan.axes))]
    best = min(plans, key=_edges)
    return best if _edges(best) <= allowed else plan


def _edges(plan: GridPlan) -> int:
    """Return how many blocks are read, counted for each output block."""
    return prod(
        sum(len(mapping.blocks(number)) for number in range(len(mapping.sizes)))
        for mapping in plan.mappings
    )


def _merged(plan: GridPlan, axis: int, together: int) -> GridPlan:
    """Return the plan with so many neighbours along one axis made one."""
    mapping = plan.mappings[axis]
    sizes = tuple(
        sum(mapping.sizes[start : start + together])
        for start in range(0, len(mapping.sizes), together)
    )
    mappings = list(plan.mappings)
    mappings[axis] = Cut(mapping.src_sizes, sizes)
    return GridPlan(plan.axes, tuple(mappings))
