"""Shares that are made piece by piece, so that others read the first while the next is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from dask_p2p.geometry import Box
from dask_p2p.types import Array, DType

MOST_PIECES = 8


@dataclass(frozen=True)
class Pieces:
    """A share that is made piece by piece along one of its axes.

    Parameters
    ----------
    dtype
        Of the share.
    axis
        Along which.
    bounds
        Where pieces begin, and where the last one ends: `MOST_PIECES` at most.
    make
        Returns a piece, by its number. It is called once for each, in turn, and puts what makes it
        on the member's stream.
    """

    dtype: DType
    axis: int
    bounds: tuple[int, ...]
    make: Callable[[int], Array]

    @classmethod
    def one(cls, share: Array) -> Pieces:
        """Return a share that is there."""
        ends = (0, share.shape[0] if share.ndim else 1)
        return cls(share.dtype, 0, ends, lambda _: share)

    def of(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yield of which pieces a box is: the number, the part in the piece, and in the box."""
        if not box:
            yield 0, box, box
            return
        start, stop = box[self.axis]
        for number, (low, high) in enumerate(pairwise(self.bounds)):
            first, end = max(start, low), min(stop, high)
            if first < end:
                inside = tuple((0, hi - lo) for lo, hi in box)
                yield (
                    number,
                    along(self.axis, box, (first - low, end - low)),
                    along(self.axis, inside, (first - start, end - start)),
                )


def along(axis: int, box: Box, bounds: tuple[int, int]) -> Box:
    """Return a box with other bounds along an axis."""
    return (*box[:axis], bounds, *box[axis + 1 :])
