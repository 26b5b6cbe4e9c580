"""Arrays whose elements say where they are, to be checked element by element after a transpose."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

__all__ = ["count_wrong", "indexed_array"]

# The largest primes that each kind of number holds exactly, below its limit. Linear indices are
# taken modulo one of them, so that equal values are never a power of two, or a tile, apart.
_PRIMES = {1: 127, 2: 32749, 4: 2147483647, 8: 2305843009213693951}
_FLOAT_PRIMES = {2: 2039, 4: 16777213, 8: 9007199254740881}


def modulus(dtype: Any) -> int:
    """Modulus of the values in an array of this dtype."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return 2
    if dtype.kind in "iu":
        return _PRIMES[dtype.itemsize]
    if dtype.kind in "fc":
        size_bytes = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        return _FLOAT_PRIMES[min(size_bytes, 8)]
    raise ValueError(f"expected a boolean, integer, float or complex dtype, got {dtype}")


def indexed_array(shape: Sequence[int], chunks: Any, dtype: Any, kind: str = "numpy") -> Any:
    """Return a lazy Dask array with ``x[i, j, ...]`` the C-order linear index, modulo a prime.

    Parameters
    ----------
    shape : sequence of int
    chunks
        As for all of Dask's array constructors.
    dtype
        A boolean, integer, float or complex one.
    kind : str
        Of the blocks, "numpy" or "cupy".
    """
    import dask.array as da

    template = da.empty(shape, chunks=chunks, dtype=dtype)
    return da.map_blocks(
        _indexed_block,
        chunks=template.chunks,
        dtype=template.dtype,
        meta=_module(kind).empty((0,) * template.ndim, dtype),
        shape=tuple(shape),
        axes=tuple(range(template.ndim)),
        kind=kind,
        out_dtype=template.dtype,
    )


def count_wrong(
    y: Any, shape: Sequence[int], axes: Sequence[int], kind: str = "numpy", dtype: Any = None
) -> Any:
    """Count, lazily, the elements of `y` that are not those of a transposed `indexed_array`.

    Parameters
    ----------
    y : dask.array.Array
        What should be ``indexed_array(shape, ...)`` with its axes permuted.
    shape : sequence of int
        Of the array before.
    axes : sequence of int
        Axis ``i`` of `y` is axis ``axes[i]`` of the array before.
    kind : str
        Of the blocks, "numpy" or "cupy".
    dtype : optional
        Of the array before; by default that of `y`. All elements of a block are wrong if its
        dtype is another, or its shape not the declared one.

    Returns
    -------
    dask.array.Array
        0-d, of integers.
    """
    wrong = y.map_blocks(
        _wrong_in_block,
        dtype=np.int64,
        chunks=tuple((1,) * count for count in y.numblocks),
        meta=np.empty((0,) * y.ndim, np.int64),
        shape=tuple(shape),
        axes=tuple(axes),
        kind=kind,
        declared=np.dtype(y.dtype if dtype is None else dtype),
    )
    return wrong.sum()


def _module(kind: str) -> Any:
    if kind == "cupy":
        import cupy

        return cupy
    return np


def _values(
    location: Sequence[tuple[int, int]], shape: Sequence[int], axes: Sequence[int], kind: str
) -> Any:
    """Linear indices (in the array before) of a box of the array after, as broadcast sums."""
    module = _module(kind)
    total = module.zeros((1,) * len(axes), np.int64)
    for place, ((start, stop), axis) in enumerate(zip(location, axes, strict=True)):
        index = module.arange(start, stop, dtype=np.int64) * prod(shape[axis + 1 :])
        total = total + index.reshape([-1 if p == place else 1 for p in range(len(axes))])
    return total


def _indexed_block(
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    kind: str,
    out_dtype: Any,
    block_info: Any = None,
) -> Any:
    location = block_info[None]["array-location"]
    block = _module(kind).empty([stop - start for start, stop in location], out_dtype)
    for rows, part in _bands(location):
        block[rows] = _values(part, shape, axes, kind) % modulus(out_dtype)
    return block


def _wrong_in_block(
    block: Any,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    kind: str,
    declared: Any,
    block_info: Any = None,
) -> Any:
    location = block_info[0]["array-location"]
    expected_shape = tuple(stop - start for start, stop in location)
    wrong = 0
    if block.dtype != declared or block.shape != expected_shape:
        wrong = prod(expected_shape)
    else:
        for rows, part in _bands(location):
            expected = (_values(part, shape, axes, kind) % modulus(declared)).astype(declared)
            wrong += int((block[rows] != expected).sum())
    return np.full((1,) * len(axes), wrong, np.int64)


def _bands(location: Sequence[tuple[int, int]], elements: int = 2**24) -> Any:
    """Cut a block along its first axis, so that temporaries stay small."""
    if not location:
        yield ..., location
        return
    (start, stop), rest = location[0], list(location[1:])
    step = max(1, elements // max(1, prod(b - a for a, b in rest)))
    for first in range(start, stop, step):
        last = min(first + step, stop)
        yield slice(first - start, last - start), [(first, last), *rest]
