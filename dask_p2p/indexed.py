"""Arrays whose elements state their own position, so that every element can be checked."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from dask_p2p.backends import backend_named
from dask_p2p.types import Array, DaskArray, DType, Kind

__all__ = ["count_wrong", "indexed_array"]

# The largest primes that each kind of number holds exactly, below its limit. Linear indices are
# taken modulo one of them, so that equal values are never a power of two, or a tile, apart.
_PRIMES = {1: 127, 2: 32749, 4: 2147483647, 8: 2305843009213693951}
_FLOAT_PRIMES = {2: 2039, 4: 16777213, 8: 9007199254740881}


def modulus(dtype: DType) -> int:
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


def indexed_array(shape: Sequence[int], chunks: Any, dtype: DType, kind: Kind = "numpy") -> Any:
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
        meta=backend_named(kind).module.empty((0,) * template.ndim, dtype),
        shape=tuple(shape),
        kind=kind,
        out_dtype=template.dtype,
    )


def count_wrong(
    y: DaskArray, shape: Sequence[int], axes: Sequence[int], kind: Kind = "numpy", dtype: Any = None
) -> Any:
    """Return the lazy number of elements of `y` that differ from a transposed `indexed_array`.

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


def _indexed_block(
    shape: tuple[int, ...], kind: Kind, out_dtype: Any, block_info: Any = None
) -> Any:
    location = block_info[None]["array-location"]
    block = backend_named(kind).module.empty([stop - start for start, stop in location], out_dtype)
    for rows, values in _bands(location, shape, range(len(shape)), kind, out_dtype):
        block[rows] = values
    return block


def _wrong_in_block(
    block: Array,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    kind: Kind,
    declared: Any,
    block_info: Any = None,
) -> Any:
    location = block_info[0]["array-location"]
    expected_shape = tuple(stop - start for start, stop in location)
    if block.dtype != declared or block.shape != expected_shape:
        wrong = prod(expected_shape)
    else:
        bands = _bands(location, shape, axes, kind, declared)
        wrong = sum(int((block[rows] != values).sum()) for rows, values in bands)
    return np.full((1,) * len(axes), wrong, np.int64)


def _bands(
    location: Sequence[tuple[int, int]],
    shape: Sequence[int],
    axes: Sequence[int],
    kind: Kind,
    dtype: DType,
    elements: int = 2**22,
) -> Any:
    """Yield the values of a box of the array after, cut along its first axis.

    So temporaries stay small. Values are linear indices in the array before, as broadcast sums.
    """
    module = backend_named(kind).module
    first, last = location[0] if location else (0, 1)
    step = max(1, elements // max(1, prod(stop - start for start, stop in location[1:])))
    for top in range(first, last, step):
        bounds = [(top, min(top + step, last)), *location[1:]]
        total = module.zeros((1,) * len(axes), np.int64)
        for place, (axis, (start, stop)) in enumerate(zip(axes, bounds, strict=False)):
            index = module.arange(start, stop, dtype=np.int64) * prod(shape[axis + 1 :])
            total = total + index.reshape([-1 if p == place else 1 for p in range(len(axes))])
        rows = slice(top - first, top - first + step) if location else ...
        total %= modulus(dtype)
        yield rows, total.astype(dtype, copy=False)
