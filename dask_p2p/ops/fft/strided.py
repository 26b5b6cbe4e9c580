"""Transforms in place along an axis whose elements compete for lines of the CPU's caches.

Elements at a distance of a power of two, as in most grids, lie in few sets of a cache. So a
transform along such an axis fetches each line several times. Here some columns at a time are copied
to memory with another distance, transformed there and copied back. All results have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from dask_p2p.backends.host.permute import competing_bytes
from dask_p2p.types import Array

#: Least length times the square of its elements' distance in a way of a cache, by item size. On an
#: EPYC core the transform along 2,048 rows of 64 complex numbers took 5.4 ns an element, and 4.1
#: in columns; along 512 rows of 512 it took 7.3 and 4.1.
_LEAST = {8: 2**33, 16: 2**30}
_MOST_COLUMNS, _LEAST_COLUMNS = 64, 16  # at a time: multiples of the vectors of all CPUs
_MOST_BYTES = 2**22  # of these columns
_GAP_BYTES = 64  # a cache line


def columns_of(block: Array, axes: Sequence[int]) -> int:
    """Return the number of columns to transform at a time; 0: all of them take no longer."""
    least = _LEAST.get(block.itemsize) if block.dtype.kind == "c" else None
    if least is None or len(axes) != 1 or not block.flags.c_contiguous:
        return 0
    (axis,), shape = axes, block.shape
    distance_bytes = competing_bytes(prod(shape[axis + 1 :]) * block.itemsize)
    if axis == block.ndim - 1 or shape[axis] * distance_bytes**2 < least:
        return 0
    columns: int = min(_MOST_COLUMNS, _MOST_BYTES // (shape[axis] * block.itemsize))
    return columns // _LEAST_COLUMNS * _LEAST_COLUMNS


def transform_columns(function: Any, block: Array, axis: int, columns: int, norm: str) -> None:
    """Transform a C-contiguous block in place, so many columns at a time.

    `function` is `fftn` or `ifftn` of SciPy.
    """
    n, gap = block.shape[axis], _GAP_BYTES // block.itemsize
    memory = np.empty((n, columns + gap), block.dtype)
    for whole in block.reshape(-1, n, prod(block.shape[axis + 1 :])):
        for start in range(0, whole.shape[1], columns):
            part = whole[:, start : start + columns]
            copy = memory[:, : part.shape[1]]
            copy[...] = part
            part[...] = function(copy, (n,), (0,), norm=norm, overwrite_x=True)
