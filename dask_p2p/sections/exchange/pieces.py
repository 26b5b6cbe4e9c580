"""Pipelined local blocks: peers read one piece while the next is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from dask_p2p.geometry import Box
from dask_p2p.types import Array, DType

MOST_PIECES = 8


@dataclass(frozen=True)
class Pieces:
    """A local block that is computed in pieces along one of its axes.

    Parameters
    ----------
    dtype
        Data type of the block.
    axis
        Axis that is divided into pieces.
    bounds
        Bounds of at most `MOST_PIECES` pieces: the start of each, and the end of the last one.
    make
        Returns a piece, by its number. It is called once for each, in order, and enqueues the work
        on the rank's stream.
    """

    dtype: DType
    axis: int
    bounds: tuple[int, ...]
    make: Callable[[int], Array]

    @classmethod
    def one(cls, local_block: Array) -> Pieces:
        """Return a complete local block as one piece."""
        ends = (0, local_block.shape[0] if local_block.ndim else 1)
        return cls(local_block.dtype, 0, ends, lambda _: local_block)

    def of(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yield the pieces of a box: number, part in the piece's indices, and in the box's."""
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
    """Return a box with its bounds along one axis replaced."""
    return (*box[:axis], bounds, *box[axis + 1 :])
