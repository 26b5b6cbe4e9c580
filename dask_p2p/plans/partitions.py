"""Partitions of an array between the ranks of a gang.

A *partition* names the divided axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from dask_p2p.geometry import split_evenly
from dask_p2p.plans.fft import FftStage, Transform, stages
from dask_p2p.plans.ranks import RankGrid, grids, surface


def partition_of(ranks: RankGrid) -> tuple[int, ...]:
    """Return the axes that are divided between ranks."""
    return tuple(axis for axis, count in enumerate(ranks.grid) if count > 1)


def partitioned(
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
    >>> partitioned(slabs, (8, 4), (1,)).local_sizes
    ((8,), (2, 2))
    >>> partitioned(slabs, (8,), ()).local_sizes
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


def divided_alike(ranks: RankGrid, shape: Sequence[int]) -> RankGrid:
    """Return the distribution of an array of any shape, along the axes of another distribution.

    Along axis 0, if the array has none of these axes.

    Examples
    --------
    >>> slabs = RankGrid(((3, 5), (4,)), (2, 1))
    >>> divided_alike(slabs, (7, 2, 2)).local_sizes
    ((4, 3), (2,), (2,))
    """
    axes = [axis for axis in partition_of(ranks) if axis < len(shape)]
    return partitioned(ranks, shape, axes or [0])


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
    return partitioned(ranks, shape, partition or free)
