"""Plans of halo exchanges: blocks with halos from their neighbours.

::

       block 0      block 1      block 2
      +---------+  +---------+  +---------+
      |         |  |         |  |         |
      +---------+  +---------+  +---------+
               [h | block 1   | h]             the assembled block, with a halo at each side
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dask_p2p.geometry import Chunks, block_bounds
from dask_p2p.plans.grid import (
    AxisMapping,
    AxisSegment,
    GridPlan,
    SplitAxis,
    blocks_read,
    segments_of_range,
    shared,
)
from dask_p2p.versioned import versioned

#: Values beyond an end of the array: none, the elements at the other end, the reflected elements,
#: the last element. Any other boundary is a constant.
BOUNDARIES = ("none", "periodic", "reflect", "nearest")
#: The mirror image with the opposite sign. Sections make it from "reflect".
ODD = "odd"


@versioned()
@dataclass(frozen=True)
class Halo:
    """The mapping of an axis along which each block gets a halo, at most as wide as the axis.

    Examples
    --------
    >>> [segment.block for segment in Halo((4, 4), 1, 1, "periodic").segments(0)]
    [1, 0, 1]
    >>> Halo((4, 4), 1, 2, "none").sizes
    (6, 5)
    >>> Halo((4, 4), 1, 2, ("nearest", "none")).sizes
    (7, 5)
    """

    src_sizes: tuple[int, ...]  # sizes of the blocks
    before: int  # width of the halo before a block
    after: int  # width of the halo after a block
    boundary: Any  # one of `BOUNDARIES`, a constant, or a pair of them for both ends

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return block_bounds(self.src_sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the blocks with their halos."""
        return tuple(
            sum(stop - start for start, stop in self._reach(number))
            for number in range(len(self.src_sizes))
        )

    @property
    def largest_segment(self) -> int:
        return max(self.src_sizes, default=0)

    def _reach(self, number: int) -> list[tuple[int, int]]:
        """Return the ranges before, of and after a block, as positions along the axis.

        They include positions below 0 and beyond the length, unless the boundary is "none".
        """
        start, stop = self._bounds[number : number + 2]
        low, high = start - self.before, stop + self.after
        first, last = both_ends(self.boundary)
        low = max(low, 0) if first == "none" else low
        high = min(high, self._bounds[-1]) if last == "none" else high
        return [(low, start), (start, stop), (stop, high)]

    @cached_property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """By block: widths of the halo before and after it, smaller at some ends."""
        reaches = map(self._reach, range(len(self.src_sizes)))
        return tuple((own - start, stop - end) for (start, own), _, (end, stop) in reaches)

    def blocks(self, number: int) -> tuple[int, ...]:
        return blocks_read(self.segments(number))

    def segments(self, number: int) -> list[AxisSegment]:
        before, own, after = self._reach(number)
        length, base = self._bounds[-1], before[0]
        segments: list[AxisSegment] = []
        for (start, stop), is_halo in ((before, True), (own, False), (after, True)):
            for lo, hi in (
                (start, min(stop, 0)),
                (max(start, 0), min(stop, length)),
                (max(start, length), stop),
            ):
                if lo >= hi:
                    continue
                if 0 <= lo < length:
                    segments += segments_of_range(self._bounds, lo, hi, lo - base, is_halo)
                else:
                    segments += self._beyond(lo, hi, lo - base)
        return segments

    def _beyond(self, start: int, stop: int, at: int) -> list[AxisSegment]:
        """Return the segments of a range beyond one end of the array."""
        length = self._bounds[-1]
        boundary = both_ends(self.boundary)[start >= 0]
        if boundary == "periodic":
            shift = length if start < 0 else -length
            return segments_of_range(self._bounds, start + shift, stop + shift, at, is_halo=True)
        if boundary not in ("reflect", "nearest"):
            return [AxisSegment(None, (0, 0), (at, at + stop - start), True, boundary)]
        segments = []
        for position in range(start, stop):
            if boundary == "nearest":
                mirrored = 0 if position < 0 else length - 1
            else:
                mirrored = -1 - position if position < 0 else 2 * length - 1 - position
            segments += segments_of_range(
                self._bounds, mirrored, mirrored + 1, at + position - start, is_halo=True
            )
        return segments


def halo_plan(
    chunks: Chunks,  # chunks of the array
    depth: Sequence[tuple[int, int]],  # by axis: width of the halo before and after a block
    boundary: Sequence[Any],  # by axis: one of `BOUNDARIES`, a constant, or a pair for both ends
    has_corners: bool = True,  # see `GridPlan`
    unread: Any = 0,
) -> GridPlan:
    """Return the plan of blocks with halos."""
    mappings: list[AxisMapping] = []
    for sizes, (before, after), beyond in zip(chunks, depth, boundary, strict=True):
        own = tuple(map(int, sizes))
        widths = Halo(own, before, after, beyond)
        mappings.append(widths if before or after else SplitAxis(own, own))
    plan = GridPlan(tuple(range(len(chunks))), tuple(mappings), has_corners, unread)
    # Equal constants may differ in their bits: 0.0 and -0.0.
    are_named = all(isinstance(end, str) for each in boundary for end in _ends(each))
    return shared(plan) if are_named else plan


def _ends(boundary: Any) -> tuple[Any, ...]:
    return boundary if isinstance(boundary, tuple) else (boundary,)


def halo_widths_of(plan: GridPlan) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the widths of the halo before and after, by axis and block along it."""
    return tuple(
        m.widths if isinstance(m, Halo) else ((0, 0),) * len(m.sizes) for m in plan.mappings
    )


def both_ends(boundary: Any) -> tuple[Any, Any]:
    """Return the boundaries before and after the array, along one axis."""
    return boundary if isinstance(boundary, tuple) else (boundary, boundary)
