"""Where blocks and boxes lie: integers only, no arrays.

Vocabulary, used by the whole package:

axis
    A dimension of an array, in logical (never memory) order.
chunks
    Dask's: for each axis the sizes of its blocks, ``((3, 3, 2), (5,))``.
block index
    The place of a block in the grid of blocks, ``(2, 0)``.
box
    A region: for each axis its ``(start, stop)``. Relative to a block unless a name says
    otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from operator import index as as_int
from types import EllipsisType
from typing import NamedTuple, TypeAlias

Box: TypeAlias = tuple[tuple[int, int], ...]
Chunks: TypeAlias = tuple[tuple[int, ...], ...]
Index: TypeAlias = tuple[int, ...]


def split_evenly(length: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` pieces of `length`, as even as possible, longer ones first.

    No piece is empty while ``length >= parts``.

    >>> split_evenly(10, 4)
    (3, 3, 2, 2)
    """
    size, longer = divmod(length, parts)
    return (size + 1,) * longer + (size,) * (parts - longer)


def normal_axes(axes: Sequence[int] | None, ndim: int) -> tuple[int, ...] | None:
    """Return a permutation of `ndim` axes without negative numbers; None if it is none.

    Without axes the order is reversed, as in `numpy.transpose`.

    >>> normal_axes((-1, 0), 2), normal_axes(None, 3), normal_axes((0, 0), 2)
    ((1, 0), (2, 1, 0), None)
    """
    if axes is None:
        return tuple(reversed(range(ndim)))
    try:
        given = [as_int(axis) for axis in axes]
    except TypeError:
        return None
    order = tuple(axis % ndim for axis in given if -ndim <= axis < ndim)
    return order if len(given) == ndim and sorted(order) == [*range(ndim)] else None


def block_bounds(sizes: Iterable[int]) -> tuple[int, ...]:
    """Offsets of the blocks along one axis, and the axis' length at the end.

    >>> block_bounds((3, 3, 2))
    (0, 3, 6, 8)
    """
    return tuple(accumulate(sizes, initial=0))


def block_indices(chunks: Chunks) -> Iterable[Index]:
    """All block indices, the last axis running fastest."""
    return product(*(range(len(sizes)) for sizes in chunks))


def block_shape(chunks: Chunks, index: Index) -> tuple[int, ...]:
    """Shape of the block at `index`."""
    return tuple(sizes[i] for sizes, i in zip(chunks, index, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    """Lengths of a box along each axis."""
    return tuple(stop - start for start, stop in box)


def box_size(box: Box) -> int:
    """Elements in a box."""
    size = 1  # a task asks a hundred times, and `prod` of a generator takes thrice as long
    for start, stop in box:
        size *= stop - start
    return size


def box_slices(box: Box) -> tuple[slice | EllipsisType, ...]:
    """Return what selects a box from an array as a view, of 0-d arrays too."""
    return (*(slice(start, stop) for start, stop in box), ...)


class Runs(NamedTuple):
    """Along which axis parts of a box keep runs of elements, and of how many."""

    axis: int
    least: int
    #: Axes from here on may be cut in its place: along these, elements lie without gaps in memory.
    others_from: int = 0


def split_box(box: Box, max_elements: int, runs: Runs | None = None) -> Iterator[Box]:
    """Cut a box into boxes of at most `max_elements`, along its first axes first.

    So the parts of a C-ordered box stay as contiguous as can be. An empty box has no parts. Where
    `runs` along the first axis would become too short, another one is cut before it.

    >>> list(split_box(((0, 4), (0, 2), (0, 5)), 20))
    [((0, 2), (0, 2), (0, 5)), ((2, 4), (0, 2), (0, 5))]
    >>> list(split_box(((0, 4), (0, 2), (0, 5)), 20, Runs(axis=0, least=4)))
    [((0, 4), (0, 1), (0, 5)), ((0, 4), (1, 2), (0, 5))]
    >>> list(split_box(((0, 4), (0, 2), (0, 8)), 32, Runs(axis=0, least=4, others_from=2)))
    [((0, 4), (0, 2), (0, 4)), ((0, 4), (0, 2), (4, 8))]
    """
    size = box_size(box)
    if size == 0:
        return
    if size <= max_elements or not box:
        yield box
        return
    axis, *others = (a for a, (start, stop) in enumerate(box) if stop - start > 1)
    if runs is not None and axis == runs.axis:
        axis = _cut_for_runs(box, size, max_elements, others, runs)
    start, stop = box[axis]
    row_elements = size // (stop - start)
    count = -(-(stop - start) // max(1, max_elements // row_elements))
    rows = -(-(stop - start) // count)  # parts of about one size: none comes with little beside it
    for lo in range(start, stop, rows):
        part = (*box[:axis], (lo, min(lo + rows, stop)), *box[axis + 1 :])
        yield from split_box(part, max_elements, runs)


def _cut_for_runs(box: Box, size: int, max_elements: int, others: Sequence[int], runs: Runs) -> int:
    """Return which axis to cut: another one, if there would be too little of that of the runs.

    The last one is cut if as much is left of it: what is read runs along it.
    """
    start, stop = box[runs.axis]
    other = next((axis for axis in others if axis >= runs.others_from), None)
    if other is None or max_elements // (size // (stop - start)) >= runs.least:
        return runs.axis
    start, stop = box[other]
    is_last = other == len(box) - 1
    return runs.axis if is_last and (stop - start) * max_elements // size < runs.least else other


def gapless_from(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the first axis from which on items follow each other in memory without a gap.

    >>> gapless_from((4, 5, 6), (240, 48, 8), 8), gapless_from((4, 5, 3), (240, 48, 8), 8)
    (0, 2)
    """
    first, stride = len(shape), itemsize
    for axis in reversed(range(len(shape))):
        if shape[axis] != 1 and strides[axis] != stride:
            break
        first, stride = axis, stride * shape[axis]
    return first


def taper_last(
    boxes: Iterable[Box], least_elements: int, runs: Runs | None = None
) -> Iterator[Box]:
    """Cut the last of some boxes into smaller and smaller ones, of about so many elements at last.

    >>> list(taper_last([((0, 8), (0, 10)), ((8, 16), (0, 10))], 20))
    [((0, 8), (0, 10)), ((8, 12), (0, 10)), ((12, 14), (0, 10)), ((14, 16), (0, 10))]
    """
    last: Box | None = None
    for box in boxes:
        if last is not None:
            yield last
        last = box
    while last is not None and box_size(last) > least_elements:
        *halves, rest = split_box(last, -(-box_size(last) // 2), runs)
        if not halves:
            break
        yield from halves
        last = rest
    if last is not None:
        yield last
