"""The distribution of an array's blocks over the ranks of a gang."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

from dask_p2p.geometry import Box, Chunks, Index, block_bounds, block_shape, whole_box
from dask_p2p.versioned import versioned


@versioned()  # tasks carry it
@dataclass(frozen=True)
class RankGrid:
    """A grid of ranks. Each has a box of whole blocks, its local block, about equal to the others.

    Examples
    --------
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
        most = [len(sizes) if axis in axes else 1 for axis, sizes in enumerate(chunks)]
        shape = list(map(sum, chunks))
        for size in range(max(1, min(ranks, prod(most))), 0, -1):
            if found := list(grids(size, most)):
                return cls(chunks, min(found, key=lambda grid: surface(grid, shape)))
        raise AssertionError("one rank can always have the whole array")

    @classmethod
    def in_line(cls, size: int) -> RankGrid:
        """Return a number of ranks in a line, with one element each.

        >>> RankGrid.in_line(2)
        RankGrid(chunks=((1, 1),), grid=(2,))
        """
        return cls(((1,) * size,), (size,))

    def extended(self, extra: Sequence[int]) -> RankGrid:
        """Return the ranks of an array that is longer at its end, by `extra` along each axis.

        >>> RankGrid(((3, 3), (4, 4)), (1, 2)).extended((0, 1)).local_sizes
        ((6,), (4, 5))
        """
        if not any(extra):
            return self
        chunks = (
            (*sizes[:-1], sizes[-1] + more) for sizes, more in zip(self.chunks, extra, strict=True)
        )
        return RankGrid(tuple(chunks), self.grid)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.grid)

    @cached_property
    def _cuts(self) -> list[list[int]]:
        """By axis: the index of each rank's first block, and the number of blocks."""
        return [
            [len(sizes) * number // count for number in range(count + 1)]
            for sizes, count in zip(self.chunks, self.grid, strict=True)
        ]

    @cached_property
    def local_sizes(self) -> Chunks:
        """Sizes of local blocks along each axis, in the form of chunks."""
        return tuple(
            tuple(sum(sizes[lo:hi]) for lo, hi in pairwise(cuts))
            for sizes, cuts in zip(self.chunks, self._cuts, strict=True)
        )

    @cached_property
    def indices(self) -> list[Index]:
        """By rank: the index in the grid."""
        return list(product(*map(range, self.grid)))

    def rank(self, index: Index) -> int:
        """Return the rank at an index of the grid."""
        number = 0
        for at, count in zip(index, self.grid, strict=True):
            number = number * count + at
        return number

    def shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's local block."""
        return block_shape(self.local_sizes, self.indices[rank])

    def box(self, rank: int) -> Box:
        """Return the box of a rank's local block in the array."""
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

    def whole_blocks(self, rank: int) -> Iterator[tuple[Index, Box]]:
        """Yield the block of a rank, where each local block is a block; empty ones come last.

        >>> ranks = RankGrid(((2, 3, 0),), (3,))
        >>> [list(ranks.whole_blocks(rank)) for rank in (1, 2)]
        [[((1,), ((0, 3),))], []]
        """
        shape = self.shape(rank)
        if all(shape):
            yield self.indices[rank], whole_box(shape)


def surface(grid: Sequence[int], shape: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """Return the sort key of grids of one array: the surface between local blocks."""
    cuts = ((count - 1) / max(1, n) for count, n in zip(grid, shape, strict=True))
    return sum(cuts), tuple(-count for count in grid)  # among equals, more along earlier axes


def grids(size: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all grids of `size` ranks, with at most `most` along each axis."""
    if not most:
        if size == 1:
            yield ()
        return
    for count in range(1, min(size, most[0]) + 1):
        if size % count == 0:
            yield from ((count, *others) for others in grids(size // count, most[1:]))
