"""A permutation of axes in host memory, block by block.

::

        src, read                              dst, written
        512 columns ->                         rows ->
      r +-----+-----+---                     5 +-----+-----+---
      o |  1  |  3  |                        1 |  1  |  2  | ..
      w +-----+-----+---                     2 +-----+-----+---
      s |  2  |  4  |                          |  3  |  4  | ..
        +-----+-----+---                       +-----+-----+---

An assignment writes one row of `dst` after another. Each row takes one item from each of many cache
lines of `src`. When the next row needs their neighbours, those lines have been evicted, so each
line is fetched once per item. Here the copy goes block by block, in the order of `dst`. A block has
so few source rows that their lines stay in the cache.

This is the tiling of G. Ruetsch and P. Micikevicius, "Optimizing Matrix Transpose in CUDA" (NVIDIA,
2009), with the CPU's cache instead of shared memory. NumPy releases the interpreter lock inside
each block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import gcd, prod

from dask_p2p import tuning
from dask_p2p.backends.base import transposed
from dask_p2p.types import Array

_CACHE_WAY_BYTES = 4096  # addresses that are equal modulo this size compete for cache lines


def permute_into(dst: Array, src: Array, axes: Sequence[int]) -> None:
    """Do ``dst[...] = src.transpose(axes)``, bit for bit; see `Backend.permute_into`."""
    view = transposed(dst, src, axes)
    if dst.dtype.names and not dst.dtype.hasobject:
        # NumPy would copy structures field by field, without their padding.
        raw = f"V{dst.dtype.itemsize}"
        dst, view = dst.view(raw), view.view(raw)
    block = None
    if dst.size >= tuning.current.blocked_items:
        block = block_shape(dst.shape, view.strides, dst.strides)
    if block is None:
        dst[...] = view  # for small arrays twice as fast as np.copyto
        return
    for box in _boxes(dst.shape, block):
        dst[box] = view[box]


@lru_cache(maxsize=1024)  # a call costs as much as a copy of 10 000 items, and blocks are similar
def block_shape(
    shape: tuple[int, ...],  # shape of `dst`, and of the transposed `src`
    src_strides: tuple[int, ...],  # in bytes, in the order of the axes of `dst`
    dst_strides: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Return the shape of the blocks to copy one by one, or None for a plain copy.

    Its axes are in the order of `dst`.

    Examples
    --------
    >>> block_shape((10000, 10000), (8, 80000), (80000, 8))  # float64, transposed
    (512, 256)
    >>> block_shape((10000, 10000), (80000, 8), (80000, 8)) is None  # same order
    True
    """
    # Axes of `dst`, with its contiguous axis first.
    by_dst = sorted(
        (a for a in range(len(shape)) if shape[a] > 1), key=lambda a: abs(dst_strides[a])
    )
    moving = [a for a in by_dst if src_strides[a]]
    if not moving:
        return None
    row_axis = by_dst[0]
    column_axis = min(moving, key=lambda a: abs(src_strides[a]))
    # Number of cache lines that are used before the first one is used again.
    lines = prod(shape[a] for a in by_dst[: by_dst.index(column_axis)])
    sizes, cached_rows = tuning.current, _cached_rows(src_strides[row_axis])
    most_rows = sizes.most_block_rows
    if lines <= (sizes.unblocked_rows if cached_rows >= most_rows else cached_rows):
        return None
    columns = min(shape[column_axis], sizes.block_columns)
    rows = max(min(cached_rows, most_rows), sizes.least_block_rows, sizes.block_items // columns)
    return _grown(shape, by_dst, {column_axis: columns, row_axis: rows})


def _cached_rows(stride_bytes: int) -> int:
    """Return the number of rows at this distance that fit into the first-level cache."""
    return tuning.current.cache_ways * (_CACHE_WAY_BYTES // competing_bytes(stride_bytes))


def competing_bytes(stride_bytes: int) -> int:
    """Return the distance of such rows in a cache way: if it is large, they share few lines."""
    return gcd(stride_bytes, _CACHE_WAY_BYTES)


def _grown(shape: Sequence[int], by_dst: Sequence[int], tile: dict[int, int]) -> tuple[int, ...]:
    """Extend a two-dimensional tile over the other axes."""
    block, most_items = [1] * len(shape), tuning.current.grown_block_items
    for axis, extent in tile.items():
        block[axis] = min(extent, shape[axis])
    for axis in by_dst:
        if axis not in tile:
            block[axis] = max(1, min(shape[axis], most_items // prod(block)))
    return tuple(block)


def _boxes(shape: Sequence[int], block: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yield the boxes that tile `shape`, in C order."""
    return product(
        *(
            [slice(start, min(start + step, extent)) for start in range(0, extent, step)]
            for extent, step in zip(shape, block, strict=True)
        )
    )
