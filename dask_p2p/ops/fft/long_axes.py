"""Transforms along an axis that is too long for one block, as transforms along two shorter axes.

The n elements of the axis are arranged as a matrix. The algorithm transforms the columns,
multiplies by powers of the n-th root of unity, transforms the rows and transposes the matrix
(D. H. Bailey, "FFTs in external or hierarchical memory", 1990)::

    x[columns * i + j]      blocks of whole rows
                            an exchange: whole columns
    transform along i       each element times exp(-2 pi i k j / n)
                            an exchange: whole rows
    transform along j
                            an exchange: the transpose
    y[rows * l + k]         blocks of whole rows of the transpose
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.array.utils import meta_from_array
from dask.utils import parse_bytes

from dask_p2p.backends import backend_for
from dask_p2p.geometry import Chunks, Index, split_evenly
from dask_p2p.graph import Epilogue, functions_of, redistribute
from dask_p2p.ops.fft.local import INVERSE, LocalTransform, run_stage
from dask_p2p.plans.fft import FftStage
from dask_p2p.types import Array, DaskArray, DType

_SLAB_ELEMENTS = 2**18  # elements whose factors are computed in one pass


class LongAxis(NamedTuple):
    """An axis that is too long for one block."""

    axis: int
    rows: int
    columns: int
    parts: int  # number of blocks along the axis


def find_long(
    path: Sequence[FftStage], lengths: dict[int, int], item_bytes: int
) -> LongAxis | None:
    """Return the axis that would make a stage's blocks too large; None if all blocks fit.

    The largest block allowed is the larger of Dask's ``array.chunk-size`` and twice the input's
    largest block. `item_bytes` is the size of a complex number.
    """
    limit_bytes = parse_bytes(dask.config.get("array.chunk-size"))
    limit_bytes = max(limit_bytes, 2 * item_bytes * _largest(path[0].chunks))
    for stage in path[1:]:
        size_bytes = item_bytes * _largest(stage.chunks)
        if size_bytes > limit_bytes and stage.axes:
            axis = max(stage.axes, key=lambda axis: lengths[axis])
            n = lengths[axis]
            rows = next(k for k in range(isqrt(n), 0, -1) if n % k == 0)
            if rows > 1:  # n is not prime
                before = path[0].chunks[axis]
                parts = min(rows, max(len(before), -(-size_bytes // limit_bytes)))
                return LongAxis(axis, rows, n // rows, parts)
    return None


def _largest(chunks: Chunks) -> int:
    return prod(max(sizes, default=0) for sizes in chunks)


def transform_long_axis(kind: str, x: DaskArray, long: LongAxis, norm: str) -> DaskArray:
    """Return the transform along the long axis by the one-dimensional function `kind`."""
    n, swapped = long.rows * long.columns, {"backward": "forward", "forward": "backward"}
    start: list[Any] = [slice(None)] * x.ndim
    start[long.axis] = slice(n // 2 + 1)
    half = tuple(start)
    if kind == "rfft":
        return transform_long_axis("fft", x, long, norm)[half]
    if kind == "ihfft":
        return transform_long_axis("rfft", x, long, swapped.get(norm, norm)).conj()
    if kind == "hfft":
        return transform_long_axis("irfft", x.conj(), long, swapped.get(norm, norm))
    axis, da = long.axis, functions_of(x)
    if missing := (n // 2 + 1 if kind == "irfft" else n) - x.shape[axis]:
        shape = (*x.shape[:axis], missing, *x.shape[axis + 1 :])
        chunks = (*x.chunks[:axis], max(x.chunks[axis]), *x.chunks[axis + 1 :])
        x = da.concatenate([x, da.zeros_like(x, shape=shape, chunks=chunks)], axis)
    if kind == "irfft":
        start[long.axis] = slice((n - 1) // 2, 0, -1)
        mirrored = da.concatenate([x, x[tuple(start)].conj()], axis)
        return transform_long_axis("ifft", mirrored, long, norm).real
    return _transform_as_matrix(x, long, norm, kind in INVERSE)


def _transform_as_matrix(x: DaskArray, long: LongAxis, norm: str, is_inverse: bool) -> DaskArray:
    axis, rows, columns = long.axis, long.rows, long.columns
    row_sizes, column_sizes = (split_evenly(n, long.parts) for n in (rows, columns))
    before, after = x.chunks[:axis], x.chunks[axis + 1 :]
    of_rows = tuple(columns * size for size in row_sizes)
    x = redistribute(x, tuple(range(x.ndim)), (*before, of_rows, *after))
    grid = (*before, row_sizes, (columns,), *after)
    x = x.map_blocks(
        fold_axis,
        axis,
        columns,
        chunks=grid,
        new_axis=axis + 1,
        meta=meta_from_array(x._meta, x.ndim + 1),
    )
    name = "ifftn" if is_inverse else "fftn"
    transform = LocalTransform(((name, (axis,), (rows,)),), norm, tuple(range(x.ndim)))
    grid = (*before, (rows,), column_sizes, *after)
    dtype = np.result_type(np.float64 if x.dtype.kind in "biu" else x.dtype, np.complex64)
    meta = meta_from_array(x._meta, x.ndim, dtype)
    order = tuple(range(x.ndim))
    twiddled = TwiddledTransform(transform, axis, column_sizes)
    x = run_stage(x, grid, order, Epilogue(twiddled, grid, meta))
    transform = LocalTransform(((name, (axis + 1,), (columns,)),), norm, order)
    grid = (*before, row_sizes, (columns,), *after)
    x = run_stage(x, grid, order, Epilogue(transform, grid, meta))
    swapped = (*order[:axis], axis + 1, axis, *order[axis + 2 :])
    x = redistribute(x, swapped, (*before, column_sizes, (rows,), *after))
    sizes = tuple(rows * size for size in column_sizes)
    return x.map_blocks(
        fold_axis,
        axis,
        None,
        chunks=(*before, sizes, *after),
        drop_axis=axis + 1,
        meta=meta_from_array(x._meta, x.ndim - 1),
    )


def fold_axis(block: Array, axis: int, columns: int | None) -> Any:
    """Split an axis into two, the second with `columns` elements; None merges the two axes."""
    shape = block.shape
    if columns is None:
        return block.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    return block.reshape(*shape[:axis], shape[axis] // columns, columns, *shape[axis + 1 :])


@dataclass(frozen=True)
class TwiddledTransform:
    """Transforms the columns of a matrix, and multiplies them by the twiddle factors."""

    transform: LocalTransform  # the transform along `axis`
    axis: int  # axis of row numbers; the next axis is that of column numbers
    column_sizes: tuple[int, ...]  # sizes of all blocks along the axis of column numbers

    def extra_bytes(self, shape: tuple[int, ...], dtype: DType) -> int:
        return self.transform.extra_bytes(shape, dtype) + 32 * _SLAB_ELEMENTS

    def __call__(self, block: Array, index: Index) -> Any:
        result = self.transform(block, index)
        library = backend_for(result).module
        ((name, _, (rows,)),) = self.transform.steps
        n = rows * sum(self.column_sizes)
        first = sum(self.column_sizes[: index[self.axis + 1]])
        columns = first + library.arange(result.shape[self.axis + 1])
        real = np.result_type(result.real.dtype, np.float64)
        angle = library.asarray((2 if name == "ifftn" else -2) * np.pi / n, real)
        after = (1,) * (result.ndim - self.axis - 2)

        def factors(rows: Any) -> Any:
            # Integer products are exact; reduced modulo n, they give accurate angles.
            twiddles = library.exp(1j * (rows[:, None] * columns % n * angle)).astype(result.dtype)
            return twiddles.reshape(*twiddles.shape, *after)

        # factors(a + b) = factors(a) * factors(b), so only the first rows of slabs are computed.
        step = max(1, min(isqrt(rows), _SLAB_ELEMENTS // max(1, columns.size)))
        inner = factors(library.arange(step))
        for start in range(0, rows, step):
            slab = (*(slice(None),) * self.axis, slice(start, start + step))
            outer = factors(library.arange(start, start + 1))
            result[slab] *= inner[: rows - start] * outer
        return result
