"""Redistribution of an array between the ranks of a gang, from one partition to another.

A *partition* names the divided axes. Four ranks, first divided along axis 0, then along axis 1::

    +-------------+          +---+---+---+---+
    |      0      |          |   |   |   |   |
    +-------------+          |   |   |   |   |
    |      1      |          |   |   |   |   |      each rank sends one box to each other rank:
    +-------------+   --->   | 0 | 1 | 2 | 3 |      where its row crosses the other's column
    |      2      |          |   |   |   |   |
    +-------------+          |   |   |   |   |
    |      3      |          |   |   |   |   |
    +-------------+          +---+---+---+---+
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from dask_p2p.geometry import Box, split_evenly
from dask_p2p.plans.base import Piece
from dask_p2p.plans.fft import FftStage, Transform, stages
from dask_p2p.plans.grid import redistribution
from dask_p2p.plans.ranks import RankGrid, grids, surface


def partition_of(ranks: RankGrid) -> tuple[int, ...]:
    """Return the axes that are divided between ranks."""
    return tuple(axis for axis, count in enumerate(ranks.grid) if count > 1)


def repartition(
    ranks: RankGrid,  # the present distribution
    shape: Sequence[int],  # shape of the array to distribute
    partition: Sequence[int],  # axes that may be divided; without any, rank 0 has the whole array
) -> RankGrid:
    """Return the distribution of an array over the same ranks, divided along other axes.

    An array of the same shape keeps its distribution if `partition` includes its divided axes. An
    axis with the same number of ranks as before keeps its bounds; other axes are divided evenly. If
    an axis has fewer elements than ranks, some local blocks are empty.

    Examples
    --------
    >>> slabs = RankGrid(((3, 5), (4,)), (2, 1))
    >>> repartition(slabs, (8, 4), (1,)).local_sizes
    ((8,), (2, 2))
    >>> repartition(slabs, (8,), ()).local_sizes
    ((8, 0),)
    """
    is_same = tuple(map(sum, ranks.local_sizes)) == tuple(shape)
    if is_same and {*partition_of(ranks)} <= {*partition}:
        return ranks
    if not partition and shape:
        rest = [(length,) for length in shape[1:]]
        first = (shape[0],) + (0,) * (ranks.size - 1)
        return RankGrid((first, *rest), (ranks.size, *(1 for _ in rest)))
    most = [ranks.size if axis in partition else 1 for axis in range(len(shape))]

    def cost(grid: tuple[int, ...]) -> tuple[int, tuple[float, tuple[int, ...]]]:
        with_elements = 1
        for count, length in zip(grid, shape, strict=True):
            with_elements *= min(count, length)
        return -with_elements, surface(grid, shape)

    grid = min(grids(ranks.size, most), key=cost)
    sizes = [
        ranks.local_sizes[axis]
        if is_same and count == ranks.grid[axis]
        else split_evenly(length, count)
        for axis, (length, count) in enumerate(zip(shape, grid, strict=True))
    ]
    return RankGrid(tuple(sizes), grid)


@dataclass(frozen=True)
class Moves:
    """The messages of one rank in a redistribution."""

    before: tuple[int, ...]  # shape of the local block before
    after: tuple[int, ...]  # shape of the local block afterwards
    local: tuple[Box, Box] | None  # the box that stays: in the block before, and afterwards
    sends: dict[int, Box]  # by receiver: box of the block before
    receives: dict[int, Box]  # by sender: box of the block afterwards

    def permuted(self, order: Sequence[int]) -> Moves:
        """Return the moves for permuted result blocks: axis ``i`` is axis ``order[i]`` here."""

        def of(box: Any) -> Any:
            return tuple(box[axis] for axis in order)

        return replace(
            self,
            after=of(self.after),
            local=None if self.local is None else (self.local[0], of(self.local[1])),
            receives={rank: of(box) for rank, box in self.receives.items()},
        )


def moves(before: RankGrid, after: RankGrid, axes: Sequence[int], rank: int) -> Moves:
    """Return the messages of one rank between two distributions of an array.

    Axis ``i`` afterwards is axis ``axes[i]`` before.
    """
    back = sorted(range(len(axes)), key=axes.__getitem__)
    received = _pieces(before, after, axes, rank)
    sent = _pieces(after, before, back, rank)
    own = received.pop(rank, None)
    sent.pop(rank, None)
    return Moves(
        before.shape(rank),
        after.shape(rank),
        None if own is None else (own.src, own.dst),
        {other: piece.dst for other, piece in sent.items()},
        {other: piece.dst for other, piece in received.items()},
    )


def _pieces(before: RankGrid, after: RankGrid, axes: Sequence[int], rank: int) -> dict[int, Piece]:
    """Return the pieces of a rank's new local block by sender: at most one from each."""
    plan = redistribution(before.local_sizes, axes, after.local_sizes)
    block = plan.block(after.indices[rank])
    return {before.rank(block.sources[piece.source].block): piece for piece in block.pieces}


class TransformStage(NamedTuple):
    """The distribution of an array while some of its axes are transformed."""

    before: RankGrid
    axes: tuple[int, ...]  # the transformed axes, which are undivided
    after: RankGrid  # the same ranks, with the transformed axes' new lengths


def transform_stages(
    before: RankGrid,  # distribution of the input
    after: RankGrid,  # distribution of the result
    transform: Transform,
) -> list[TransformStage]:
    """Return the stages of a transform: one distribution after another.

    Examples
    --------
    >>> slabs = RankGrid(((4, 4), (6,)), (2, 1))
    >>> both = Transform({0: 8, 1: 6})
    >>> [(stage.before.grid, stage.axes) for stage in transform_stages(slabs, slabs, both)]
    [((2, 1), (1,)), ((1, 2), (0,)), ((2, 1), ())]
    """
    found = []
    for stage in stages(before.local_sizes, transform, after.local_sizes):
        own = _divided(before, stage)
        sizes = [
            tuple(transform.lengths[axis] if size else 0 for size in along)
            if axis in stage.axes
            else along
            for axis, along in enumerate(own.local_sizes)
        ]
        found.append(TransformStage(own, stage.axes, RankGrid(tuple(sizes), own.grid)))
    return found


def _divided(ranks: RankGrid, stage: FftStage) -> RankGrid:
    """Return the distribution of a stage's grid, which may have fewer blocks than ranks."""
    if prod(map(len, stage.chunks)) == ranks.size:
        return RankGrid(stage.chunks, tuple(map(len, stage.chunks)))
    shape = list(map(sum, stage.chunks))
    partition = [axis for axis, sizes in enumerate(stage.chunks) if len(sizes) > 1]
    free = [axis for axis in range(len(shape)) if axis not in stage.axes]
    return repartition(ranks, shape, partition or free)
