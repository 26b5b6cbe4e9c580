"""Fewer edges for large graphs: groups of blocks.

"Growth" in docs/design.md lists the cost of edges. Groups reduce their number: one task assembles
g neighbours as one larger block, and g cheap output tasks on its worker return the blocks. Data
still moves once::

    one task a block    n² edges              grouped    n² / g edges        n edges
    sources ========> blocks                  sources ==========> groups ----------> blocks

Groups cost one more task a block, about 0.5 ms each, and the latency of one more layer. The blocks
of one group go to the same worker, and its memory is freed when all of them are released. Groups
are used above `FEW_EDGES` if they are small, of about `SMALL_GROUP` elements, and above
`MOST_EDGES` in any case. There are at least two groups for each thread.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod

from dask_p2p.plans.grid import GridPlan, SplitAxis

#: Largest number of edges of a layer without groups, if groups are small.
FEW_EDGES = 2_000
#: Elements of a small group: 64 MiB of float64.
SMALL_GROUP = 2**23
#: Largest number of edges of a layer without groups: some 0.7 s of the scheduler's time.
MOST_EDGES = 20_000
#: Groups of a larger array above `MOST_EDGES`; more only with more threads.
MANY_GROUPS = 64
_LEAST_GAIN = 2  # least factor of all edges that makes the second layer worthwhile


def grouped(
    plan: GridPlan,  # a redistribution
    groups: int | None,  # number of groups; 0: no groups; None: chosen by the number of edges
    threads: Callable[[], int | None],  # the cluster's number of threads; called only if needed
) -> GridPlan:
    """Return the plan of the groups, or the plan itself without groups."""
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


def _best_number(plan: GridPlan, threads: Callable[[], int | None]) -> int:
    """Return the best number of groups for many edges: few, but enough for all threads."""
    small = ceil(prod(map(sum, plan.chunks)) / SMALL_GROUP)
    if plan.edges > MOST_EDGES:
        small = min(small, MANY_GROUPS)
    known = threads()
    return max(small, MANY_GROUPS if known is None else 2 * known)


def _merged(plan: GridPlan, axis: int, together: int) -> GridPlan:
    """Return the plan with `together` neighbours along one axis joined."""
    mappings = list(plan.mappings)
    mappings[axis] = SplitAxis(mappings[axis].src_sizes, _joined(mappings[axis].sizes, together))
    return GridPlan(plan.axes, tuple(mappings))


def _joined(sizes: tuple[int, ...], together: int) -> tuple[int, ...]:
    starts = range(0, len(sizes), together)
    return tuple(sum(sizes[start : start + together]) for start in starts)
