"""Plans of halo exchanges: blocks with rims of their neighbours.

::

       block 0      block 1      block 2
      +---------+  +---------+  +---------+
      |         |  |         |  |         |
      +---------+  +---------+  +---------+
               [r | block 1   | r]             what is assembled: the block, and a rim at each side
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dask_p2p.geometry import Chunks, block_bounds
from dask_p2p.plans.grid import AxisMapping, Cut, GridPlan, Segment, blocks_read, segments_of_range
from dask_p2p.versioned import versioned

#: What lies beyond an end of the array: nothing, what is at its other end, a reflection, its last
#: element. Anything else is a constant.
BOUNDARIES = ("none", "periodic", "reflect", "nearest")


@versioned()
@dataclass(frozen=True)
class Halo:
    """An axis along which each block gets rims. No rim is wider than the axis is long.

    Examples
    --------
    >>> [segment.block for segment in Halo((4, 4), 1, 1, "periodic").segments(0)]
    [1, 0, 1]
    >>> Halo((4, 4), 1, 2, "none").sizes
    (6, 5)
    """

    src_sizes: tuple[int, ...]  # of the blocks
    before: int  # width of the rims
    after: int
    boundary: Any  # one of `BOUNDARIES`, or the constant that lies beyond both ends

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return block_bounds(self.src_sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of the blocks with their rims."""
        return tuple(
            sum(stop - start for start, stop in self._reach(number))
            for number in range(len(self.src_sizes))
        )

    @property
    def largest_segment(self) -> int:
        return max(self.src_sizes, default=0)

    def _reach(self, number: int) -> list[tuple[int, int]]:
        """Return the ranges before, of and after a block, as positions along the axis.

        Positions below 0 and beyond the length are there unless the boundary is "none".
        """
        start, stop = self._bounds[number : number + 2]
        low, high = start - self.before, stop + self.after
        if self.boundary == "none":
            low, high = max(low, 0), min(high, self._bounds[-1])
        return [(low, start), (start, stop), (stop, high)]

    def rims(self, number: int) -> tuple[int, int]:
        """Return how wide the rims before and after a block are: at an end there may be less."""
        (start, own), _, (end, stop) = self._reach(number)
        return own - start, stop - end

    def blocks(self, number: int) -> tuple[int, ...]:
        return blocks_read(self.segments(number))

    def segments(self, number: int) -> list[Segment]:
        before, own, after = self._reach(number)
        length, base = self._bounds[-1], before[0]
        segments: list[Segment] = []
        for (start, stop), is_rim in ((before, True), (own, False), (after, True)):
            for lo, hi in (
                (start, min(stop, 0)),
                (max(start, 0), min(stop, length)),
                (max(start, length), stop),
            ):
                if lo >= hi:
                    continue
                if 0 <= lo < length:
                    segments += segments_of_range(self._bounds, lo, hi, lo - base, is_rim)
                else:
                    segments += self._beyond(lo, hi, lo - base)
        return segments

    def _beyond(self, start: int, stop: int, at: int) -> list[Segment]:
        """Return the segments of a range that lies beyond one end of the array."""
        length = self._bounds[-1]
        if self.boundary == "periodic":
            shift = length if start < 0 else -length
            return segments_of_range(self._bounds, start + shift, stop + shift, at, is_rim=True)
        if self.boundary not in ("reflect", "nearest"):
            return [Segment(None, (0, 0), (at, at + stop - start), True, self.boundary)]
        segments = []
        for position in range(start, stop):
            if self.boundary == "nearest":
                mirrored = 0 if position < 0 else length - 1
            else:
                mirrored = -1 - position if position < 0 else 2 * length - 1 - position
            segments += segments_of_range(
                self._bounds, mirrored, mirrored + 1, at + position - start, is_rim=True
            )
        return segments


def halo_plan(
    chunks: Chunks,  # of the array
    depth: Sequence[tuple[int, int]],  # by axis: width of the rims before and after a block
    boundary: Sequence[Any],  # by axis: one of `BOUNDARIES`, or a constant
    has_corners: bool = True,  # see `GridPlan`
    unread: Any = 0,
) -> GridPlan:
    """Return the plan of blocks with rims."""
    mappings: list[AxisMapping] = []
    for sizes, (before, after), beyond in zip(chunks, depth, boundary, strict=True):
        own = tuple(map(int, sizes))
        rims = Halo(own, before, after, beyond)
        mappings.append(rims if before or after else Cut(own, own))
    return GridPlan(tuple(range(len(chunks))), tuple(mappings), has_corners, unread)


def rims_of(plan: GridPlan) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for each axis, and each block along it, the widths of its rims before and after."""
    return tuple(
        tuple(m.rims(i) if isinstance(m, Halo) else (0, 0) for i in range(len(m.sizes)))
        for m in plan.mappings
    )
