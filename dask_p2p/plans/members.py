"""Which blocks of an array each member of a gang has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

from dask_p2p.geometry import Box, Chunks, Index, block_bounds, block_shape
from dask_p2p.versioned import versioned


@versioned()  # it travels with the tasks
@dataclass(frozen=True)
class Members:
    """A grid of members. Each has a box of whole blocks, its *share*: as many as the others.

    Examples
    --------
    >>> members = Members.at_most(((3, 3), (1, 2, 3, 4)), 3)
    >>> members.grid, members.share_sizes
    ((1, 3), ((6,), (1, 2, 7)))
    """

    chunks: Chunks  # of the array
    grid: tuple[int, ...]  # members along each axis: at most as many as blocks

    @classmethod
    def at_most(cls, chunks: Chunks, members: int, cut: Sequence[int] | None = None) -> Members:
        """Return as many members as there can be, with the smallest surface between their shares.

        Only the axes of the cut may be divided between members; by default all.
        """
        axes = range(len(chunks)) if cut is None else cut
        most = [len(sizes) if axis in axes else 1 for axis, sizes in enumerate(chunks)]
        shape = list(map(sum, chunks))
        for size in range(max(1, min(members, prod(most))), 0, -1):
            if found := list(grids(size, most)):
                return cls(chunks, min(found, key=lambda grid: surface(grid, shape)))
        raise AssertionError("one member can always have all")

    @property
    def size(self) -> int:
        """How many members there are."""
        return prod(self.grid)

    @cached_property
    def _cuts(self) -> list[list[int]]:
        """Along each axis the numbers of the first blocks of members, and the count of blocks."""
        return [
            [len(sizes) * number // count for number in range(count + 1)]
            for sizes, count in zip(self.chunks, self.grid, strict=True)
        ]

    @cached_property
    def share_sizes(self) -> Chunks:
        """The sizes of shares along each axis: chunks, if each share were one block."""
        return tuple(
            tuple(sum(sizes[lo:hi]) for lo, hi in pairwise(cuts))
            for sizes, cuts in zip(self.chunks, self._cuts, strict=True)
        )

    @cached_property
    def places(self) -> list[Index]:
        """The place of each member in the grid, by rank."""
        return list(product(*map(range, self.grid)))

    def rank(self, place: Index) -> int:
        """Return which member has a place in the grid."""
        number = 0
        for at, count in zip(place, self.grid, strict=True):
            number = number * count + at
        return number

    def shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a member's share."""
        return block_shape(self.share_sizes, self.places[rank])

    def box(self, rank: int) -> Box:
        """Return where in the array a member's share is."""
        bounds = map(block_bounds, self.share_sizes)
        return tuple((b[at], b[at + 1]) for b, at in zip(bounds, self.places[rank], strict=True))

    def blocks(self, rank: int) -> Iterator[tuple[Index, Box]]:
        """Yield the index of each block of a member, and its box in the member's share."""
        along = []
        for sizes, cuts, at in zip(self.chunks, self._cuts, self.places[rank], strict=True):
            numbers = range(cuts[at], cuts[at + 1])
            bounds = block_bounds(sizes[number] for number in numbers)
            along.append(list(zip(numbers, pairwise(bounds), strict=True)))
        for pairs in product(*along):
            yield tuple(number for number, _ in pairs), tuple(box for _, box in pairs)


def surface(grid: Sequence[int], shape: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """Return by what grids of one array are compared: the surface between shares is less."""
    cuts = ((count - 1) / max(1, n) for count, n in zip(grid, shape, strict=True))
    return sum(cuts), tuple(-count for count in grid)  # of equals, along the first axes


def grids(size: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all grids of so many members, with no more along an axis than given."""
    if not most:
        if size == 1:
            yield ()
        return
    for count in range(1, min(size, most[0]) + 1):
        if size % count == 0:
            yield from ((count, *others) for others in grids(size // count, most[1:]))
