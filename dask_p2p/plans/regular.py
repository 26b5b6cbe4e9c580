"""Chunks as Zarr has them: of one size along an axis, and whole units of writing in each block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd, prod

from dask_p2p.geometry import Chunks, block_bounds


def is_regular(sizes: Sequence[int]) -> bool:
    """Return whether all blocks have one size, except that the last one may be smaller.

    >>> is_regular((4, 4, 2)), is_regular((3, 3, 2, 2)), is_regular((2, 4))
    (True, False, False)
    """
    return len({*sizes[:-1]}) <= 1 and sizes[-1] <= sizes[0]


def regular_size(sizes: Sequence[int]) -> int:
    """Return the chunk size that moves the fewest elements to other blocks.

    The candidates are the given sizes, their greatest common divisor and the even size. Sizes below
    half of the even one would make too many chunks.

    >>> regular_size((3, 3, 2, 2)), regular_size((100, 200, 100, 200))
    (3, 100)
    """
    if is_regular(sizes):
        return sizes[0]
    even = -(-sum(sizes) // len(sizes))
    candidates = {even, *(size for size in (*sizes, gcd(*sizes)) if 2 * size >= even)}
    return min(candidates, key=lambda size: (_moved(sizes, size), -size))


def aligned_chunks(
    chunks: Chunks, units: Sequence[int], rows: Sequence[range] | None = None
) -> Chunks:
    """Return chunks of an array such that no two blocks share a unit of the store.

    A store writes a unit at once: a shard, or a chunk. `rows` are the positions in the
    store of the indices along each axis, by default the indices themselves.

    The bounds of the blocks are multiples of one size in the store, so the first and the last block
    may be short. An axis that fits keeps its chunks. But no block has more than twice the elements
    of the largest block before, or of a unit.

    >>> aligned_chunks(((5, 5, 5, 5), (7,)), (8, 4))
    ((8, 8, 4), (7,))
    >>> aligned_chunks(((5, 5),), (4,), [range(9, 19)])  # appended to 9 elements
    ((3, 4, 3),)
    """
    if rows is None:
        rows = [range(sum(sizes)) for sizes in chunks]
    fitting = list(map(_fits, chunks, units, rows))
    if all(fitting):
        return chunks
    result = [
        sizes if fits else _between_multiples(unit * max(1, row.step * max(sizes) // unit), row)
        for sizes, fits, unit, row in zip(chunks, fitting, units, rows, strict=True)
    ]
    per_unit = [
        max(1, min(-(-unit // row.step), len(row))) for unit, row in zip(units, rows, strict=True)
    ]
    most = 2 * max(prod(map(max, chunks)), prod(per_unit))
    while prod(map(max, result)) > most:
        counts = [-(-max(sizes) // n) for sizes, n in zip(result, per_unit, strict=True)]
        count = max(counts)  # of units along a block
        if count == 1:
            break
        axis = counts.index(count)
        result[axis] = _between_multiples(units[axis] * (count // 2), rows[axis])
    return tuple(result)


def _fits(sizes: Sequence[int], unit: int, row: range) -> bool:
    """Return whether each block along an axis has whole units."""
    bounds = {*block_bounds(sizes)} - {0, len(row)}
    return all(row[bound] // unit > row[bound - 1] // unit for bound in bounds)


def _between_multiples(size: int, row: range) -> tuple[int, ...]:
    """Return the sizes of blocks that end at multiples of a size in the store."""
    if not row:
        return (0,)
    multiples = range((row[0] // size + 1) * size, row[-1] + 1, size)
    bounds = {0, len(row), *(-(-(multiple - row.start) // row.step) for multiple in multiples)}
    return tuple(stop - start for start, stop in pairwise(sorted(bounds)))


def _moved(sizes: Sequence[int], size: int) -> int:
    """Return the number of elements outside of the block with the largest part of their chunk."""
    bounds = block_bounds(sizes)
    length, block, kept = bounds[-1], 0, 0
    for start in range(0, length, size):
        stop, largest = min(start + size, length), 0
        while bounds[block] < stop:
            part = min(stop, bounds[block + 1]) - max(start, bounds[block])
            largest = max(largest, part)
            if bounds[block + 1] > stop:  # the next chunk has a part of this block, too
                break
            block += 1
        kept += largest
    return length - kept
