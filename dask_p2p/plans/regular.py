"""Chunks of one size along an axis, as Zarr has them, for blocks of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from dask_p2p.geometry import block_bounds


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
