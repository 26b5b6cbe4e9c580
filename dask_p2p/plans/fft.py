"""Plans of Fourier transforms: the order of axes, and the exchanges between them.

An undivided axis, with one block along it, is transformed locally. An exchange makes another axis
undivided: its division moves to an axis that was undivided. The number of blocks therefore stays
the same. Slabs need one exchange, pencils two::

    slabs        (4, 1, 1) -- 1, 2 --> (1, 4, 1) -- 0
    pencils      (2, 2, 1) -- 2 -----> (2, 1, 2) -- 1 ---> (1, 2, 2) -- 0
                 blocks an axis        after an exchange   and after the next

If there is a choice, forward transforms move a division to a later axis, and inverse transforms to
an earlier one. So an inverse transform returns to the partition before the forward transform.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import combinations, count, permutations, product
from math import prod
from typing import NamedTuple

from dask_p2p.geometry import Chunks, Index, split_evenly
from dask_p2p.plans.base import BlockPlan
from dask_p2p.plans.grid import AxisSegment, GridPlan, SplitAxis, segments_of_range
from dask_p2p.shared import shared


class FftStage(NamedTuple):
    """A grid of blocks, and the undivided axes that are transformed there."""

    chunks: Chunks  # before the transform
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """A requested transform."""

    lengths: Mapping[int, int]  # by transformed axis: length afterwards
    first: int | None = None  # the axis to transform first, from real to complex numbers
    last: int | None = None  # the axis to transform last, from complex to real numbers
    item_bytes: tuple[int, int] = (1, 1)  # item size before and after the first axis
    is_inverse: bool = False  # true if divisions move to earlier axes

    def ready(self, chunks: Chunks, remaining: frozenset[int]) -> frozenset[int]:
        undivided = frozenset(axis for axis in remaining if len(chunks[axis]) == 1)
        if self.first in remaining - undivided:
            return frozenset()
        return undivided - {self.last} if remaining - undivided else undivided

    def after(self, chunks: Chunks, transformed: frozenset[int]) -> Chunks:
        result = list(chunks)
        for axis in transformed:
            result[axis] = (self.lengths[axis],)
        return tuple(result)


def plan_stages(
    chunks: Chunks,  # chunks of the input: the first grid
    transform: Transform,
    final: Chunks | None = None,  # chunks of the result; None: any
) -> list[FftStage]:
    """Return the grids of a transform, and the axes to transform in each.

    An exchange connects each grid to the next. The path loses as few blocks as possible, then needs
    as few exchanges as possible, then moves as few bytes as possible.

    >>> both = Transform({0: 8, 1: 6})
    >>> plan_stages(((4, 4), (6,)), both)
    [FftStage(chunks=((4, 4), (6,)), axes=(1,)), FftStage(chunks=((8,), (3, 3)), axes=(0,))]
    >>> len(plan_stages(((4, 4), (6,)), both, final=((4, 4), (6,))))
    3
    """
    blocks = prod(map(len, chunks))
    number = count()  # breaks ties: the path that was found first
    nothing: tuple[FftStage, ...] = ()
    waiting = [((0, 0, 0, 0), next(number), chunks, frozenset(transform.lengths), nothing)]
    visited: set[tuple[Chunks, frozenset[int]]] = set()
    while waiting:
        cost, _, grid, remaining, path = heappop(waiting)
        if (grid, remaining) in visited:
            continue
        visited.add((grid, remaining))
        ready = transform.ready(grid, remaining)
        path = (*path, FftStage(grid, tuple(sorted(ready))))
        after, remaining = transform.after(grid, ready), remaining - ready
        if not remaining and final in (None, after):
            return list(path)
        is_complex = len(remaining) < len(transform.lengths)
        size = prod(map(sum, after)) * transform.item_bytes[is_complex]
        for new, share, distance in _next_grids(after, remaining, transform, final):
            lost = max(0, blocks - prod(map(len, new))) if new != final else 0
            step = (lost, 1, size - size // share, distance)
            a, b, c, d = (old + increase for old, increase in zip(cost, step, strict=True))
            heappush(waiting, ((a, b, c, d), next(number), new, remaining, path))
    raise AssertionError("an exchange can always make an axis undivided")


def _next_grids(
    chunks: Chunks, remaining: frozenset[int], transform: Transform, final: Chunks | None
) -> Iterator[tuple[Chunks, int, int]]:
    """Yield the next grids: chunks, number of parts (one stays in place), distance of moves."""
    if final is not None:
        before = {axis: (sum(chunks[axis]),) for axis in remaining}
        if all(len(final[axis]) == 1 for axis in remaining):
            grid = tuple(before.get(axis, sizes) for axis, sizes in enumerate(final))
            yield grid, max(1, prod(map(len, chunks))), 0
    for move in _moves(chunks, remaining):
        partitions = list(chunks)
        distance = 0
        for source, target in move:
            if source != target:
                partitions[target] = move_division(chunks[source], chunks[target])
            partitions[source] = (sum(chunks[source]),)
            distance += (source - target if transform.is_inverse else target - source) % len(chunks)
        share = prod(len(chunks[source]) for source, _ in move)
        yield tuple(partitions), share, distance


def _moves(chunks: Chunks, remaining: frozenset[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the sets of divisions that may move in one exchange: (from axis, to axis) pairs."""
    if len(chunks) == 1:
        yield ((0, 0),)
        return
    divided = sorted(axis for axis in remaining if len(chunks[axis]) > 1)
    undivided = [axis for axis, sizes in enumerate(chunks) if len(sizes) == 1]
    for n in range(1, min(len(divided), len(undivided)) + 1):
        for pair in product(combinations(divided, n), permutations(undivided, n)):
            yield tuple(zip(*pair, strict=True))
    # Two divisions on one axis, if no axis is undivided.
    targets = [axis for axis in range(len(chunks)) if axis not in undivided]
    yield from (((axis, target),) for axis, target in product(divided, targets) if axis != target)


def move_division(sizes: tuple[int, ...], target_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the block sizes of an axis that takes over another axis's division.

    The axis keeps its own division too. The sizes follow the other axis: the same sizes, or equal
    sizes with a smaller last one, or an even division.

    >>> move_division((4, 4, 2), (10,)), move_division((4, 4, 2), (7,))
    ((4, 4, 2), (3, 3, 1))
    >>> move_division((3, 3, 2, 2), (7,))
    (2, 2, 2, 1)
    """
    length, parts = sum(target_sizes), len(sizes) * len(target_sizes)
    if len(target_sizes) == 1 and length == sum(sizes):
        return sizes
    parts = max(1, min(parts, length))
    size = max(1, -(-length // parts))
    is_regular = sizes[0] == -(-sum(sizes) // len(sizes)) and len({*sizes[:-1]}) == 1
    if is_regular and -(-length // size) == parts:
        return (*(size,) * (parts - 1), length - size * (parts - 1))
    return split_evenly(length, parts)


@dataclass(frozen=True)
class RolledAxis(SplitAxis):
    """The mapping of a rolled axis: elements shift, and wrap around from its end to its start.

    >>> [(part.block, part.src, part.dst) for part in RolledAxis((3, 2), (3, 2), 1).segments(0)]
    [(1, (1, 2), (0, 1)), (0, (0, 2), (1, 3))]
    """

    shift: int  # number of elements

    @cached_property
    def largest_segment(self) -> int:
        return min(max(self.src_sizes, default=0), max(self.sizes, default=0))

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


@shared
@dataclass(frozen=True)
class ReorderedPlan:
    """A plan of blocks whose axes have another order in memory than in their index."""

    plan: GridPlan  # plan of the blocks in memory's order of axes
    order: tuple[int, ...]  # axis i of the blocks is axis order[i] of the array and its indices

    @cached_property
    def chunks(self) -> Chunks:
        return tuple(self.plan.chunks[self.order.index(a)] for a in range(len(self.order)))

    @property
    def src_chunks(self) -> Chunks:
        return self.plan.src_chunks

    @property
    def largest_piece(self) -> int:
        return self.plan.largest_piece

    def _plan_index(self, index: Index) -> Index:
        return tuple(index[axis] for axis in self.order)

    def sources(self, index: Index) -> tuple[Index, ...]:
        return self.plan.sources(self._plan_index(index))

    def source_elements(self, index: Index) -> tuple[int, ...]:
        return self.plan.source_elements(self._plan_index(index))

    def block(self, index: Index) -> BlockPlan:
        return self.plan.block(self._plan_index(index))
