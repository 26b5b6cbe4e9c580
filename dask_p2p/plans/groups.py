"""Fewer edges for large graphs: groups of blocks, and passes through an intermediate grid.

"Growth" in docs/design.md has what edges cost. Where one task assembles g neighbours as one larger
block, and g cheap tasks on its worker hand them out, there are fewer, and nothing moves twice::

    one task a block    n² edges              grouped    n² / g edges        n edges
    sources ========> blocks                  sources ==========> groups ----------> blocks

That costs one more task a block, about 0.5 ms each, and the latency of one more layer. Blocks of
one group go to the same worker, and its memory is free when all of them are released. So it is done
above `FEW_EDGES` where the groups are small, of `SMALL_GROUP` elements or little more, and above
`MOST_EDGES` in any case; with two groups for each thread at least.

On a very large cluster that is not enough. There the array goes through an intermediate grid, in
which each task reads √n blocks: 2 n √n edges, but everything moves twice. So that is done only
above `MOST_GROUPED_EDGES`::

    rows --> √n x √n boxes --> columns
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, isqrt, prod

from dask_p2p.geometry import Chunks
from dask_p2p.plans.grid import Cut, GridPlan

#: Edges that one layer has at most where groups are small.
FEW_EDGES = 2_000
#: Elements of a group that is small: 64 MiB of float64.
SMALL_GROUP = 2**23
#: Edges that one layer may have: some 0.7 s of the scheduler's time.
MOST_EDGES = 20_000
#: Groups of a larger array above that; more only if there are more threads.
MANY_GROUPS = 64
#: Edges above which an array rather moves twice: more than a minute of the scheduler's time.
MOST_GROUPED_EDGES = 2_000_000
_LEAST_GAIN = 2  # times as few edges in all: else the second layer is for nothing


def grouped(
    plan: GridPlan,  # a redistribution
    groups: int | None,  # to make; 0 for none. None: as many as seem best for many edges
    threads: Callable[[], int | None],  # that the cluster has; asked only where that matters
) -> GridPlan:
    """Return the plan of larger blocks, from which those of a plan can be cut, or that plan."""
    blocks = prod(map(len, plan.chunks))
    if groups is None:
        groups = _best_number(plan, threads) if plan.edges > FEW_EDGES else 0
        allowed = plan.edges // _LEAST_GAIN - blocks
    else:
        allowed = plan.edges - 1
    if not groups:
        return plan
    together = ceil(blocks / groups)
    if together < 2:
        return plan
    plans = [_merged(plan, axis, together) for axis in range(len(plan.axes))]
    best = min(plans, key=lambda merged: merged.edges)
    return best if best.edges <= allowed else plan


def grid_between(plan: GridPlan, passes: int | None, groups: GridPlan) -> Chunks | None:
    """Return the chunks, in the output's order, through which an array goes; None if it does not.

    There are 1 or 2 passes, or with None as many as are best; `groups` is what `grouped` made.
    """
    if passes == 1 or (passes is None and groups.edges <= MOST_GROUPED_EDGES):
        return None
    chunks = []
    for mapping in plan.mappings:
        finer = max(mapping.src_sizes, mapping.sizes, key=len)
        blocks = isqrt(len(mapping.src_sizes) * len(mapping.sizes))
        chunks.append(_joined(finer, ceil(len(finer) / max(1, blocks))))
    before = tuple(mapping.src_sizes for mapping in plan.mappings)
    return None if tuple(chunks) in (before, plan.chunks) else tuple(chunks)


def _best_number(plan: GridPlan, threads: Callable[[], int | None]) -> int:
    """Return how many groups are best for many edges: few, but work for all threads."""
    small = ceil(prod(map(sum, plan.chunks)) / SMALL_GROUP)
    if plan.edges > MOST_EDGES:
        small = min(small, MANY_GROUPS)
    known = threads()
    return max(small, MANY_GROUPS if known is None else 2 * known)


def _merged(plan: GridPlan, axis: int, together: int) -> GridPlan:
    """Return the plan with so many neighbours along one axis made one."""
    mappings = list(plan.mappings)
    mappings[axis] = Cut(mappings[axis].src_sizes, _joined(mappings[axis].sizes, together))
    return GridPlan(plan.axes, tuple(mappings))


def _joined(sizes: tuple[int, ...], together: int) -> tuple[int, ...]:
    starts = range(0, len(sizes), together)
    return tuple(sum(sizes[start : start + together]) for start in starts)
