"""The distribution of an array's blocks over the ranks of a gang."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

from dask_p2p.geometry import Box, Chunks, Index, block_bounds, block_shape, split_evenly
from dask_p2p.plans.base import Fill, Piece
from dask_p2p.plans.fft import FftStage, Transform, plan_stages
from dask_p2p.plans.grid import redistribution


@dataclass(frozen=True)
class RankGrid:
    """A grid of ranks. Each has a box of whole blocks, its local block, about equal to the others.

    >>> ranks = RankGrid.at_most(((3, 3), (1, 2, 3, 4)), 3)
    >>> ranks.grid, ranks.local_sizes
    ((1, 3), ((6,), (1, 2, 7)))
    """

    chunks: Chunks  # chunks of the array
    grid: tuple[int, ...]  # ranks along each axis, at most the number of blocks

    @classmethod
    def at_most(
        cls, chunks: Chunks, ranks: int, partition: Sequence[int] | None = None
    ) -> RankGrid:
        """Return at most `ranks` ranks, with the smallest surface between local blocks.

        Only the axes of `partition` may be divided between ranks; by default all.
        """
        axes = range(len(chunks)) if partition is None else partition
        max_grid = [len(sizes) if axis in axes else 1 for axis, sizes in enumerate(chunks)]
        shape = list(map(sum, chunks))
        for size in range(max(1, min(ranks, prod(max_grid))), 0, -1):
            if candidates := list(grids(size, max_grid)):
                return cls(chunks, min(candidates, key=lambda grid: surface(grid, shape)))
        raise AssertionError("one rank can always have the whole array")

    @classmethod
    def in_line(cls, size: int) -> RankGrid:
        """Return a number of ranks in a line, with one element each.

        >>> RankGrid.in_line(2)
        RankGrid(chunks=((1, 1),), grid=(2,))
        """
        return cls(((1,) * size,), (size,))

    def extend(self, extra: Sequence[int]) -> RankGrid:
        """Return the ranks of an array that is longer at its end, by `extra` along each axis.

        >>> RankGrid(((3, 3), (4, 4)), (1, 2)).extend((0, 1)).local_sizes
        ((6,), (4, 5))
        """
        if not any(extra):
            return self
        pairs = zip(self.chunks, extra, strict=True)
        return RankGrid(tuple((*sizes[:-1], sizes[-1] + n) for sizes, n in pairs), self.grid)

    @property
    def size(self) -> int:
        return prod(self.grid)

    @cached_property
    def _cuts(self) -> list[list[int]]:
        return [
            [len(sizes) * number // count for number in range(count + 1)]
            for sizes, count in zip(self.chunks, self.grid, strict=True)
        ]

    @cached_property
    def local_sizes(self) -> Chunks:
        return tuple(
            tuple(sum(sizes[lo:hi]) for lo, hi in pairwise(cuts))
            for sizes, cuts in zip(self.chunks, self._cuts, strict=True)
        )

    @cached_property
    def indices(self) -> list[Index]:
        return list(product(*map(range, self.grid)))

    def rank(self, index: Index) -> int:
        number = 0
        for at, count in zip(index, self.grid, strict=True):
            number = number * count + at
        return number

    def shape(self, rank: int) -> tuple[int, ...]:
        return block_shape(self.local_sizes, self.indices[rank])

    def box(self, rank: int) -> Box:
        bounds = map(block_bounds, self.local_sizes)
        return tuple((b[at], b[at + 1]) for b, at in zip(bounds, self.indices[rank], strict=True))

    def blocks(self, rank: int, repeated: Collection[int] = ()) -> Iterator[tuple[Index, Box]]:
        """Yield the index of each block of a rank, and its box in the local block.

        Along the axes in `repeated`, all ranks have the only element of another array.
        """
        along = []
        of_axes = enumerate(zip(self.chunks, self._cuts, self.indices[rank], strict=True))
        for axis, (sizes, cuts, at) in of_axes:
            if axis in repeated:
                along.append([(0, (0, 1))])
                continue
            numbers = range(cuts[at], cuts[at + 1])
            bounds = block_bounds(sizes[number] for number in numbers)
            along.append(list(zip(numbers, pairwise(bounds), strict=True)))
        for pairs in product(*along):
            yield tuple(number for number, _ in pairs), tuple(box for _, box in pairs)


def surface(grid: Sequence[int], shape: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """Return the sort key of grids of one array: the surface between local blocks."""
    cuts = ((count - 1) / max(1, n) for count, n in zip(grid, shape, strict=True))
    return sum(cuts), tuple(-count for count in grid)  # among equals, more along earlier axes


def grids(size: int, max_grid: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all grids of `size` ranks, with at most `max_grid` along each axis."""
    if not max_grid:
        if size == 1:
            yield ()
        return
    for count in range(1, min(size, max_grid[0]) + 1):
        if size % count == 0:
            yield from ((count, *later) for later in grids(size // count, max_grid[1:]))


# Partitions of an array between the ranks of a gang.
#
# A *partition* names the divided axes.


def partition_of(ranks: RankGrid) -> tuple[int, ...]:
    """Return the axes that are divided between ranks."""
    return tuple(axis for axis, count in enumerate(ranks.grid) if count > 1)


def distribute_array(
    ranks: RankGrid,  # the present distribution
    shape: Sequence[int],  # shape of the array to distribute
    partition: Sequence[int],  # axes that may be divided; without any, rank 0 has the whole array
) -> RankGrid:
    """Return the distribution of an array over the same ranks, divided along other axes.

    An array of the same shape keeps its distribution if `partition` includes its divided axes. An
    axis with the same length and number of ranks keeps its bounds; other axes are divided evenly.
    If an axis has fewer elements than ranks, some local blocks are empty.

    >>> slabs = RankGrid(((3, 5), (4,)), (2, 1))
    >>> distribute_array(slabs, (8, 4), (1,)).local_sizes
    ((8,), (2, 2))
    >>> distribute_array(slabs, (8,), ()).local_sizes
    ((8, 0),)
    """
    is_same = tuple(map(sum, ranks.local_sizes)) == tuple(shape)
    if is_same and {*partition_of(ranks)} <= {*partition}:
        return ranks
    if not partition and shape:
        undivided_axes = [(length,) for length in shape[1:]]
        first = (shape[0],) + (0,) * (ranks.size - 1)
        return RankGrid((first, *undivided_axes), (ranks.size, *(1 for _ in undivided_axes)))
    max_grid = [ranks.size if axis in partition else 1 for axis in range(len(shape))]

    def cost(grid: tuple[int, ...]) -> tuple[int, tuple[float, tuple[int, ...]]]:
        with_elements = 1
        for count, length in zip(grid, shape, strict=True):
            with_elements *= min(count, length)
        return -with_elements, surface(grid, shape)

    grid = min(grids(ranks.size, max_grid), key=cost)
    present = dict(enumerate(ranks.local_sizes))
    sizes = []
    for axis, (length, count) in enumerate(zip(shape, grid, strict=True)):
        is_kept = axis in present and (sum(present[axis]), len(present[axis])) == (length, count)
        sizes.append(present[axis] if is_kept else split_evenly(length, count))
    return RankGrid(tuple(sizes), grid)


def distribute_alike(ranks: RankGrid, shape: Sequence[int]) -> RankGrid:
    """Return the distribution of an array of any shape, along the axes of another distribution.

    Along axis 0, if the array has none of these axes.

    >>> slabs = RankGrid(((3, 5), (4,)), (2, 1))
    >>> distribute_alike(slabs, (7, 2, 2)).local_sizes
    ((4, 3), (2,), (2,))
    """
    axes = [axis for axis in partition_of(ranks) if axis < len(shape)]
    return distribute_array(ranks, shape, axes or [0])


class TransformStage(NamedTuple):
    """The distribution of an array while some of its axes are transformed."""

    before: RankGrid
    axes: tuple[int, ...]  # the transformed axes, which are undivided
    after: RankGrid  # the same ranks, with the transformed axes' new lengths


def plan_transform_stages(
    before: RankGrid,  # distribution of the input
    after: RankGrid,  # distribution of the result
    transform: Transform,
) -> list[TransformStage]:
    """Return the stages of a transform: one distribution after another.

    >>> slabs = RankGrid(((4, 4), (6,)), (2, 1))
    >>> both = Transform({0: 8, 1: 6})
    >>> [(stage.before.grid, stage.axes) for stage in plan_transform_stages(slabs, slabs, both)]
    [((2, 1), (1,)), ((1, 2), (0,)), ((2, 1), ())]
    """
    rank_stages = []
    for stage in plan_stages(before.local_sizes, transform, after.local_sizes):
        stage_ranks = _distribute_stage(before, stage)
        sizes = [
            tuple(transform.lengths[axis] if size else 0 for size in along)
            if axis in stage.axes
            else along
            for axis, along in enumerate(stage_ranks.local_sizes)
        ]
        result_ranks = RankGrid(tuple(sizes), stage_ranks.grid)
        rank_stages.append(TransformStage(stage_ranks, stage.axes, result_ranks))
    return rank_stages


def _distribute_stage(ranks: RankGrid, stage: FftStage) -> RankGrid:
    if prod(map(len, stage.chunks)) == ranks.size:  # there may be fewer blocks than ranks
        return RankGrid(stage.chunks, tuple(map(len, stage.chunks)))
    shape = list(map(sum, stage.chunks))
    partition = [axis for axis, sizes in enumerate(stage.chunks) if len(sizes) > 1]
    free = [axis for axis in range(len(shape)) if axis not in stage.axes]
    return distribute_array(ranks, shape, partition or free)


# Exchanges between the local blocks of ranks.
#
# In a *redistribution*, local blocks of one partition become those of another one. Four ranks,
# first divided along axis 0, then along axis 1::
#
#     +-------------+          +---+---+---+---+
#     |      0      |          |   |   |   |   |
#     +-------------+          |   |   |   |   |
#     |      1      |          |   |   |   |   |      each rank sends one box to each other rank:
#     +-------------+   --->   | 0 | 1 | 2 | 3 |      where its row crosses the other's column
#     |      2      |          |   |   |   |   |
#     +-------------+          |   |   |   |   |
#     |      3      |          |   |   |   |   |
#     +-------------+          +---+---+---+---+
#
# In a *halo update*, source and target are the same local block: see `dask_p2p.plans.halo`.


@dataclass(frozen=True)
class Exchange:
    """One rank's part of an exchange, from a source array to a target array."""

    before: tuple[int, ...]  # shape of the source
    after: tuple[int, ...]  # shape of the target
    axes: tuple[int, ...]  # axis i of the target is axis axes[i] of the source
    local: list[tuple[Box, Box]]  # regions that stay on the rank: in the source, and in the target
    fills: list[Fill]  # regions of the target with a constant value
    sends: dict[int, list[Box]]  # by receiver: boxes of the source, in the order of its boxes
    receives: dict[int, list[Box]]  # by sender: boxes of the target

    def shape_before(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape[self.axes.index(axis)] for axis in range(len(shape)))


def plan_rank_exchange(
    before: RankGrid,
    after: RankGrid,  # distribution of the array with permuted axes
    axes: Sequence[int],  # axis i of `after` is axis axes[i] of `before`
    rank: int,
    order: Sequence[int] | None = None,  # axis i of the target is axis order[i] of `after`
) -> Exchange:
    """Return the exchange between two distributions of an array, with at most one box a rank."""
    in_target = range(len(axes)) if order is None else order

    def permuted(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[axis] for axis in in_target)

    inverse_axes = sorted(range(len(axes)), key=axes.__getitem__)
    received = _pieces_of(before, after, axes, rank)
    sent = _pieces_of(after, before, inverse_axes, rank)
    local_piece = received.pop(rank, None)
    sent.pop(rank, None)
    return Exchange(
        before=before.shape(rank),
        after=permuted(after.shape(rank)),
        axes=permuted(axes),
        local=[] if local_piece is None else [(local_piece.src, permuted(local_piece.dst))],
        fills=[],
        sends={receiver: [piece.dst] for receiver, piece in sent.items()},
        receives={sender: [permuted(piece.dst)] for sender, piece in received.items()},
    )


def _pieces_of(
    before: RankGrid, after: RankGrid, axes: Sequence[int], rank: int
) -> dict[int, Piece]:
    plan = redistribution(before.local_sizes, axes, after.local_sizes)
    block = plan.block(after.indices[rank])
    return {before.rank(block.sources[piece.source]): piece for piece in block.pieces}


# Message schedules between the ranks of a gang: stages in which each rank has one partner.
#
# Five ranks; in each stage rank 0 sends to the first number, and receives from the second::
#
#     diagonal      1<4   2<3   3<2   4<1            to the next ranks, from the previous ones
#     left-right    1<4   4<1   2<3   3<2            to the right, to the left, further right, ...
#     pairwise       -    1<1   2<2   3<3   4<4      both ways with one; in odd gangs one rank rests
#
# "left-right" uses each link in one direction at a time, which was better where the links of one
# direction share a cable. "pairwise" keeps two ranks busy with each other.

#: Schedules. With "auto" all messages go concurrently, as sockets accept them.
ORDERS = ("auto", "diagonal", "left-right", "pairwise")

_WIDTH = 8  # most children of a rank in the tree


class Partners(NamedTuple):
    """The partners of a rank in one stage; None in a stage of rest."""

    to: int | None  # destination rank
    source: int | None  # source rank


def schedule_partners(
    order: str,  # one of `ORDERS` except "auto"
    rank: int,
    size: int,  # number of ranks
) -> list[Partners]:
    """Return a rank's partners, stage by stage: each other rank once in either direction.

    >>> schedule_partners("left-right", 0, 4)
    [Partners(to=1, source=3), Partners(to=3, source=1), Partners(to=2, source=2)]
    >>> [stage.to for stage in schedule_partners("pairwise", 0, 4)]
    [3, 1, 2]
    """
    if order == "pairwise":
        return [Partners(opponent, opponent) for opponent in _schedule_opponents(rank, size)]
    far = list(range(1, size))
    if order == "left-right":
        far.sort(key=lambda by: (min(by, size - by), by))
    return [Partners((rank + by) % size, (rank - by) % size) for by in far]


def tree_neighbours(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return the parent and the children of a rank in a tree of all ranks. The root has no parent.

    >>> tree_neighbours(0, 12)
    ([], [1, 2, 3, 4, 5, 6, 7, 8])
    >>> tree_neighbours(9, 12)
    ([1], [])
    """
    below = list(range(rank * _WIDTH + 1, min(size, rank * _WIDTH + 1 + _WIDTH)))
    above = [(rank - 1) // _WIDTH] if rank else []
    return above, below


def _schedule_opponents(rank: int, size: int) -> list[int | None]:
    """Return a player's opponents in each round of a round-robin tournament; None: rest.

    All players, except the last of an even number, form a ring. In each round two of them are
    opponents if their numbers add up to the round's number. The one left plays the last, or rests.
    """
    ring = size - 1 + size % 2
    opponents: list[int | None] = []
    for number in range(ring if size > 1 else 0):
        if rank == ring:
            opponent = next(player for player in range(ring) if 2 * player % ring == number)
        else:
            opponent = (number - rank) % ring
            opponent = ring if opponent == rank else opponent
        opponents.append(opponent if opponent < size else None)
    return opponents
