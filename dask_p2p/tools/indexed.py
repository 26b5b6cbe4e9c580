"""Arrays whose elements encode their position, so that every element can be checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from dask_p2p.backends import backend_named
from dask_p2p.types import Array, DaskArray, DType, Kind

# By item size: the largest prime that the type represents exactly. Values are linear indices modulo
# a prime, so that equal values are never a power of two, or a tile, apart.
_PRIMES = {1: 127, 2: 32749, 4: 2147483647, 8: 2305843009213693951}
_FLOAT_PRIMES = {2: 2039, 4: 16777213, 8: 9007199254740881}


def modulus(dtype: DType) -> int:
    """Return the modulus of values of this dtype; raise `ValueError` if it holds no numbers."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return 2
    if dtype.kind in "iu":
        return _PRIMES[dtype.itemsize]
    if dtype.kind in "fc":
        return _FLOAT_PRIMES[min(dtype.itemsize // (2 if dtype.kind == "c" else 1), 8)]
    raise ValueError(f"expected a boolean, integer, float or complex dtype, got {dtype}")


def indexed_array(shape: Sequence[int], chunks: Any, dtype: DType, kind: Kind = "numpy") -> Any:
    """Return a lazy Dask array with ``x[i, j, ...]`` the C-order linear index, modulo a prime."""
    import dask.array as da

    template = da.empty(shape, chunks=chunks, dtype=dtype)
    meta = backend_named(kind).module.empty((0,) * template.ndim, dtype)
    given = {"shape": tuple(shape), "kind": kind, "out_dtype": template.dtype}
    return da.map_blocks(
        _indexed_block, chunks=template.chunks, dtype=template.dtype, meta=meta, **given
    )


def count_wrong(
    y: DaskArray, shape: Sequence[int], axes: Sequence[int], kind: Kind = "numpy", dtype: Any = None
) -> Any:
    """Return the lazy number of elements of `y` that differ from a transposed `indexed_array`.

    `shape` and `dtype` are those of the `indexed_array`; by default it has the dtype of `y`. Axis
    ``i`` of `y` should be its axis ``axes[i]``. All elements of a block count as wrong if the block
    has another dtype or shape than declared.
    """
    declared = np.dtype(y.dtype if dtype is None else dtype)
    ones, meta = tuple((1,) * count for count in y.numblocks), np.empty((0,) * y.ndim, np.int64)
    given = {"shape": tuple(shape), "axes": tuple(axes), "kind": kind, "declared": declared}
    return y.map_blocks(_wrong_in_block, dtype=np.int64, chunks=ones, meta=meta, **given).sum()


def _indexed_block(shape: Any, kind: Kind, out_dtype: Any, block_info: Any = None) -> Any:
    location = block_info[None]["array-location"]
    block = backend_named(kind).module.empty([stop - start for start, stop in location], out_dtype)
    for rows, values in _bands(location, shape, range(len(shape)), kind, out_dtype):
        block[rows] = values
    return block


def _wrong_in_block(
    block: Array, shape: Any, axes: Any, kind: Kind, declared: Any, block_info: Any = None
) -> Any:
    location = block_info[0]["array-location"]
    wrong = prod(stop - start for start, stop in location)
    if block.dtype == declared and block.shape == tuple(stop - start for start, stop in location):
        bands = _bands(location, shape, axes, kind, declared)
        wrong = sum(int((block[rows] != values).sum()) for rows, values in bands)
    return np.full((1,) * len(axes), wrong, np.int64)


def _bands(
    location: Any, shape: Any, axes: Any, kind: Kind, dtype: DType, elements: int = 2**22
) -> Iterator[Any]:
    """Yield rows of a box of the transposed array with their values, in bands of limited size."""
    module = backend_named(kind).module
    first, last = location[0] if location else (0, 1)
    step = max(1, elements // max(1, prod(stop - start for start, stop in location[1:])))
    for top in range(first, last, step):
        total = module.zeros((1,) * len(axes), np.int64)  # linear indices before the transpose
        bounds = [(top, min(top + step, last)), *location[1:]]
        for position, (axis, (start, stop)) in enumerate(zip(axes, bounds, strict=False)):
            index = module.arange(start, stop, dtype=np.int64) * prod(shape[axis + 1 :])
            total = total + index.reshape([-1 if p == position else 1 for p in range(len(axes))])
        rows = slice(top - first, top - first + step) if location else ...
        total %= modulus(dtype)
        yield rows, total.astype(dtype, copy=False)
