"""Rolled axes: elements shift, and wrap around from the end to the start."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dask_p2p.plans.grid import AxisSegment, SplitAxis, blocks_read, segments_of_range
from dask_p2p.versioned import versioned


@versioned()
@dataclass(frozen=True)
class Rolled(SplitAxis):
    """The mapping of a rolled axis: elements shift, and wrap around from its end to its start.

    Examples
    --------
    >>> [(part.block, part.src, part.dst) for part in Rolled((3, 2), (3, 2), 1).segments(0)]
    [(1, (1, 2), (0, 1)), (0, (0, 2), (1, 3))]
    """

    shift: int  # number of elements

    @cached_property
    def largest_segment(self) -> int:
        return min(max(self.src_sizes, default=0), max(self.sizes, default=0))

    def blocks(self, number: int) -> tuple[int, ...]:
        return blocks_read(self.segments(number))

    def segments(self, number: int) -> list[AxisSegment]:
        length = self._bounds[-1]
        start = (self._bounds[number] - self.shift) % max(1, length)
        stop = start + self.sizes[number]
        upto = min(stop, length)
        # Wrapped elements count as halo, because they may lie in the same block as the others.
        return [
            *segments_of_range(self._src_bounds, start, upto, 0),
            *segments_of_range(self._src_bounds, 0, stop - upto, upto - start, is_halo=True),
        ]
