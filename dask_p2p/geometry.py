"""Blocks and boxes as integers, without arrays.

Terms of the whole package:

axis
    A dimension of an array, in logical (never memory) order.
chunks
    Dask's: for each axis the sizes of its blocks, ``((3, 3, 2), (5,))``.
block index
    The index of a block in the grid of blocks, ``(2, 0)``.
box
    A region: for each axis its ``(start, stop)``, relative to a block unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product, starmap
from math import prod
from operator import index as as_int
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias

Box: TypeAlias = tuple[tuple[int, int], ...]
Chunks: TypeAlias = tuple[tuple[int, ...], ...]
Index: TypeAlias = tuple[int, ...]
#: The index that selects a box from an array.
Slices: TypeAlias = tuple[slice | EllipsisType, ...]


def split_evenly(length: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of `parts` pieces of `length`, as even as possible, longer ones first.

    No piece is empty if ``length >= parts``.

    >>> split_evenly(10, 4)
    (3, 3, 2, 2)
    """
    size, longer = divmod(length, parts)
    return (size + 1,) * longer + (size,) * (parts - longer)


def normalize_axes(axes: Sequence[int] | None, ndim: int) -> tuple[int, ...] | None:
    """Return a permutation of `ndim` axes without negative numbers, or None if it is invalid.

    The default is the reversed order, as in `numpy.transpose`.

    >>> normalize_axes((-1, 0), 2), normalize_axes(None, 3), normalize_axes((0, 0), 2)
    ((1, 0), (2, 1, 0), None)
    """
    if axes is None:
        return tuple(reversed(range(ndim)))
    try:
        numbers = [as_int(axis) for axis in axes]
    except TypeError:
        return None
    order = tuple(axis % ndim for axis in numbers if -ndim <= axis < ndim)
    return order if len(numbers) == ndim and sorted(order) == [*range(ndim)] else None


def block_bounds(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the offsets of the blocks along one axis, then the axis's length.

    >>> block_bounds((3, 3, 2))
    (0, 3, 6, 8)
    """
    return tuple(accumulate(sizes, initial=0))


def block_indices(chunks: Chunks) -> Iterable[Index]:
    """Return all block indices, with the last axis fastest."""
    return product(*(range(len(sizes)) for sizes in chunks))


def block_shape(chunks: Chunks, index: Index) -> tuple[int, ...]:
    """Return the shape of the block at `index`."""
    return tuple(sizes[i] for sizes, i in zip(chunks, index, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the lengths of a box along each axis."""
    return tuple(stop - start for start, stop in box)


def box_size(box: Box) -> int:
    """Return the number of elements in a box."""
    size = 1  # a loop: a task calls this a hundred times, and `prod` of a generator is 3 x slower
    for start, stop in box:
        size *= stop - start
    return size


def box_slices(box: Box, within: Box | None = None) -> Slices:
    """Return the index that selects a box from an array as a view, also from 0-d arrays.

    `within` has the bounds of the array; by default it begins at 0.
    """
    box = box if within is None else move_box(box, [-start for start, _ in within])
    return (*starmap(slice, box), ...)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole array, from its shape.

    >>> whole_box((4, 7))
    ((0, 4), (0, 7))
    """
    return tuple((0, length) for length in shape)


def move_box(box: Box, offsets: Iterable[int]) -> Box:
    """Return a box moved by an offset along each axis.

    >>> move_box(((0, 4), (1, 7)), (10, -1))
    ((10, 14), (0, 6))
    """
    pairs = zip(box, offsets, strict=True)
    return tuple((start + offset, stop + offset) for (start, stop), offset in pairs)


def c_strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Return the strides of an array in C order, in bytes.

    >>> c_strides((4, 3), 8)
    (24, 8)
    """
    return tuple(item_bytes * prod(shape[axis + 1 :]) for axis in range(len(shape)))


def round_up(number: int, step: int) -> int:
    """Return the least multiple of a step that is not below a number."""
    return -(-number // step) * step


class Layout:
    """Regions in C order, one after another in one memory.

    >>> layout = Layout([(2, 3), (1,)], item_bytes=8, alignment=128)
    >>> layout.starts, layout.size_bytes
    ([0, 128], 136)
    """

    def __init__(
        self,
        shapes: Iterable[Sequence[int]],  # shapes of the regions
        item_bytes: int = 1,  # size of an element; 1 if `views` gets an array of elements
        alignment: int = 1,  # each region starts at a multiple of this number of bytes
    ) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self.starts: list[int] = []  # offsets of the regions, in bytes
        self.size_bytes = 0
        self._item_bytes = item_bytes
        for shape in self.shapes:
            self.starts.append(round_up(self.size_bytes, alignment))
            self.size_bytes = self.starts[-1] + prod(shape) * item_bytes

    def view(self, memory: Any, number: int, dtype: Any) -> Any:
        """Return a region as an array in this one-dimensional memory."""
        start, shape = self.starts[number], self.shapes[number]
        return memory[start : start + prod(shape) * self._item_bytes].view(dtype).reshape(shape)

    def views(self, memory: Any, dtype: Any) -> list[Any]:
        return [self.view(memory, number, dtype) for number in range(len(self.shapes))]


class ContiguousRuns(NamedTuple):
    """The axis along which parts of a box keep contiguous runs, and their least length."""

    axis: int
    least: int
    #: First axis that may be divided instead: from it on, elements lie without gaps in memory.
    others_from: int = 0


def split_box(box: Box, max_elements: int, runs: ContiguousRuns | None = None) -> Iterator[Box]:
    """Divide a box into boxes of at most `max_elements`, along its first axes first.

    This keeps the parts of a C-ordered box as contiguous as possible. An empty box has no parts. If
    `runs` along the first axis would become too short, another axis is divided before it.

    >>> list(split_box(((0, 4), (0, 2), (0, 5)), 20))
    [((0, 2), (0, 2), (0, 5)), ((2, 4), (0, 2), (0, 5))]
    >>> list(split_box(((0, 4), (0, 2), (0, 5)), 20, ContiguousRuns(axis=0, least=4)))
    [((0, 4), (0, 1), (0, 5)), ((0, 4), (1, 2), (0, 5))]
    >>> runs = ContiguousRuns(axis=0, least=4, others_from=2)
    >>> list(split_box(((0, 4), (0, 2), (0, 8)), 32, runs))
    [((0, 4), (0, 2), (0, 4)), ((0, 4), (0, 2), (4, 8))]
    """
    size = box_size(box)
    if size == 0:
        return
    if size <= max_elements or not box:
        yield box
        return
    axis, *later_axes = (a for a, (start, stop) in enumerate(box) if stop - start > 1)
    if runs is not None and axis == runs.axis:
        axis = _cut_for_runs(box, size, max_elements, later_axes, runs)
    start, stop = box[axis]
    most_rows = max(1, max_elements // (size // (stop - start)))
    count = -(-(stop - start) // most_rows)
    rows = -(-(stop - start) // count)  # parts of about one size, without a small last one
    if runs is not None and axis == runs.axis:
        rows = max(rows, min(runs.least, most_rows))
    for lo in range(start, stop, rows):
        part = (*box[:axis], (lo, min(lo + rows, stop)), *box[axis + 1 :])
        yield from split_box(part, max_elements, runs)


def _cut_for_runs(
    box: Box, size: int, max_elements: int, later_axes: Sequence[int], runs: ContiguousRuns
) -> int:
    """Return the axis to divide: another axis if runs along the first would become too short.

    The last axis is divided only if its runs stay long enough, because reads go along it.
    """
    start, stop = box[runs.axis]
    later = next((axis for axis in later_axes if axis >= runs.others_from), None)
    if later is None or max_elements // (size // (stop - start)) >= runs.least:
        return runs.axis
    start, stop = box[later]
    is_last = later == len(box) - 1
    return runs.axis if is_last and (stop - start) * max_elements // size < runs.least else later


def first_gapless_axis(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the first axis such that it and all later axes are contiguous in memory.

    >>> [first_gapless_axis((4, 5, length), (240, 48, 8), 8) for length in (6, 3)]
    [0, 2]
    """
    first, stride = len(shape), itemsize
    for axis in reversed(range(len(shape))):
        if shape[axis] != 1 and strides[axis] != stride:
            break
        first, stride = axis, stride * shape[axis]
    return first


def taper_last(
    boxes: Iterable[Box], least_elements: int, runs: ContiguousRuns | None = None
) -> Iterator[Box]:
    """Divide the last box into smaller and smaller ones, down to about `least_elements`.

    >>> list(taper_last([((0, 8), (0, 10)), ((8, 16), (0, 10))], 20))
    [((0, 8), (0, 10)), ((8, 12), (0, 10)), ((12, 14), (0, 10)), ((14, 16), (0, 10))]
    """
    last: Box | None = None
    for box in boxes:
        if last is not None:
            yield last
        last = box
    while last is not None and box_size(last) > least_elements:
        *halves, last_half = split_box(last, -(-box_size(last) // 2), runs)
        if not halves:
            break
        yield from halves
        last = last_half
    if last is not None:
        yield last
