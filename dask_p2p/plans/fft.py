"""Plans of Fourier transforms: in which order axes are made whole, and by which exchanges.

An axis that is whole, one block along it, is transformed where it lies. An exchange makes another
one whole: the cut of that axis moves to one that is whole already. So the number of blocks stays,
slabs take one exchange, and pencils two::

    slabs        (4, 1, 1) -- 1, 2 --> (1, 4, 1) -- 0
    pencils      (2, 2, 1) -- 2 -----> (2, 1, 2) -- 1 ---> (1, 2, 2) -- 0
                 blocks an axis        after an exchange   and after the next

Forward transforms move cuts to axes that follow, inverse ones to those before. So an inverse
transform undoes the cuts of a forward one where a choice is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import combinations, count, permutations, product
from math import prod
from typing import NamedTuple

from dask_p2p.geometry import Chunks, split_evenly


class Stage(NamedTuple):
    """A grid of blocks, and the axes that are transformed there, which are whole."""

    chunks: Chunks  # before the transform
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """What is asked for."""

    lengths: Mapping[int, int]  # by axis that is transformed, afterwards
    first: int | None = None  # transformed before all others, from real numbers to complex ones
    last: int | None = None  # transformed after all others, from complex numbers to real ones
    item_bytes: tuple[int, int] = (1, 1)  # before the first axis is transformed, and after it
    is_inverse: bool = False  # whether cuts move to axes before theirs

    def ready(self, chunks: Chunks, remaining: frozenset[int]) -> frozenset[int]:
        """Return which of the remaining axes can be transformed where they lie."""
        whole = frozenset(axis for axis in remaining if len(chunks[axis]) == 1)
        if self.first in remaining - whole:
            return frozenset()
        return whole - {self.last} if remaining - whole else whole

    def after(self, chunks: Chunks, done: frozenset[int]) -> Chunks:
        """Return the chunks when these axes, which are whole, are transformed."""
        return tuple(
            (self.lengths[axis],) if axis in done else sizes for axis, sizes in enumerate(chunks)
        )


def stages(
    chunks: Chunks,  # of the input: the first grid
    transform: Transform,  # of which axes
    final: Chunks | None = None,  # of the result; by default those that come of it
) -> list[Stage]:
    """Return the grids through which an array goes, and what is transformed in each.

    Between any two is one exchange. Of all ways it is that which keeps most blocks, then that of
    fewest exchanges, then that which moves the fewest bytes.

    Examples
    --------
    >>> both = Transform({0: 8, 1: 6})
    >>> stages(((4, 4), (6,)), both)
    [Stage(chunks=((4, 4), (6,)), axes=(1,)), Stage(chunks=((8,), (3, 3)), axes=(0,))]
    >>> len(stages(((4, 4), (6,)), both, final=((4, 4), (6,))))
    3
    """
    blocks = prod(map(len, chunks))
    number = count()  # of equal cost that comes first which was found first
    nothing: tuple[Stage, ...] = ()
    waiting = [((0, 0, 0, 0), next(number), chunks, frozenset(transform.lengths), nothing)]
    seen: set[tuple[Chunks, frozenset[int]]] = set()
    while waiting:
        cost, _, grid, remaining, path = heappop(waiting)
        if (grid, remaining) in seen:
            continue
        seen.add((grid, remaining))
        ready = transform.ready(grid, remaining)
        path = (*path, Stage(grid, tuple(sorted(ready))))
        after, left = transform.after(grid, ready), remaining - ready
        if not left and final in (None, after):
            return list(path)
        size = prod(map(sum, after)) * transform.item_bytes[len(left) < len(transform.lengths)]
        for new, share, distance in _exchanges(after, left, transform, final):
            lost = max(0, blocks - prod(map(len, new))) if new != final else 0
            step = (lost, 1, size - size // share, distance)
            a, b, c, d = (old + more for old, more in zip(cost, step, strict=True))
            heappush(waiting, ((a, b, c, d), next(number), new, left, path))
    raise AssertionError("an axis can always be made whole")


def _exchanges(
    chunks: Chunks, left: frozenset[int], transform: Transform, final: Chunks | None
) -> Iterator[tuple[Chunks, int, int]]:
    """Return grids to go on with, of how many parts one stays, and how far the cuts move."""
    if final is not None:
        before = {axis: (sum(chunks[axis]),) for axis in left}
        if all(len(final[axis]) == 1 for axis in left):
            grid = tuple(before.get(axis, sizes) for axis, sizes in enumerate(final))
            yield grid, max(1, prod(map(len, chunks))), 0
    for move in _moves(chunks, left):
        cuts = list(chunks)
        distance = 0
        for source, target in move:
            if source != target:
                cuts[target] = moved_cut(chunks[source], chunks[target])
            cuts[source] = (sum(chunks[source]),)
            distance += (source - target if transform.is_inverse else target - source) % len(chunks)
        share = prod(len(chunks[source]) for source, _ in move)
        yield tuple(cuts), share, distance


def _moves(chunks: Chunks, left: frozenset[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the cuts that may move at the same time: of which axis, and to which."""
    if len(chunks) == 1:
        yield ((0, 0),)
        return
    cut = sorted(axis for axis in left if len(chunks[axis]) > 1)
    whole = [axis for axis, sizes in enumerate(chunks) if len(sizes) == 1]
    for n in range(1, min(len(cut), len(whole)) + 1):
        for sources, targets in product(combinations(cut, n), permutations(whole, n)):
            yield tuple(zip(sources, targets, strict=True))
    # Cuts of two axes in one, where there is no room elsewhere.
    others = [axis for axis in range(len(chunks)) if axis not in whole]
    yield from (((source, target),) for source, target in product(cut, others) if source != target)


def moved_cut(sizes: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Return the blocks of an axis that takes the cut of another one, in addition to its own.

    They are cut as that is: in the same places, or into blocks of one size and a smaller last one,
    or evenly.

    >>> moved_cut((4, 4, 2), (10,)), moved_cut((4, 4, 2), (7,)), moved_cut((3, 3, 2, 2), (7,))
    ((4, 4, 2), (3, 3, 1), (2, 2, 2, 1))
    """
    length, parts = sum(others), len(sizes) * len(others)
    if len(others) == 1 and length == sum(sizes):
        return sizes
    parts = max(1, min(parts, length))
    size = max(1, -(-length // parts))
    is_regular = sizes[0] == -(-sum(sizes) // len(sizes)) and len({*sizes[:-1]}) == 1
    if is_regular and -(-length // size) == parts:
        return (*(size,) * (parts - 1), length - size * (parts - 1))
    return split_evenly(length, parts)
