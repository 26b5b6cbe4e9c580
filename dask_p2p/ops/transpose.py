"""`transpose`: an array with permuted axes, by default in slabs along the first axis."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from dask_p2p.geometry import Chunks
from dask_p2p.ops.arguments import check_array, check_chunks_are_known, checked_axes, checked_chunks
from dask_p2p.ops.rechunk import redistributed
from dask_p2p.plans import slab_chunks
from dask_p2p.types import ChunksLike, DaskArray


def transpose(
    x: DaskArray,
    axes: Sequence[int] | int | None = None,
    *more_axes: int,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Permute the axes of a Dask array, moving only the regions of blocks that must move.

    On a `distributed` cluster, each worker assembles its blocks of the result from regions that it
    reads from other workers. Reads follow the staged order of the multi-GPU transpose in *CUDA
    Fortran for Scientists and Engineers* (Ruetsch and Fatica). On other schedulers the same graph
    gives the same values.

    Parameters
    ----------
    x : dask.array.Array
        Array of NumPy or CuPy blocks, of any number of dimensions, chunked along any of its axes.
    axes : sequence of int, optional
        Permutation of the axes: axis ``i`` of the result is axis ``axes[i]`` of `x`. Negative
        numbers count from the last. Default: reversed order.
    *more_axes : int
        Further axes: ``transpose(x, 1, 0)`` is ``transpose(x, (1, 0))``.
    chunks : int, str, tuple or dict, optional
        Chunks of the result, in any form that `dask.array.rechunk` takes. Default: slabs of nearly
        equal size along the result's first axis, with the other axes whole. Their number is the
        largest number of blocks of `x` along an axis. If the first axis has fewer rows, other axes
        are split too, to make that number of blocks or slightly fewer.

    Returns
    -------
    dask.array.Array
        The values of ``np.transpose(x, axes)``; lazy, with the dtype and block type of `x`.

    Raises
    ------
    UnsupportedArrayError
        If `x` is not a Dask array, or has masked, sparse or other blocks that are not plain memory.
    AxesError
        If `axes` is not a permutation of the axes of `x`.
    ChunksError
        If the chunk sizes of `x` are unknown, or `chunks` does not fit the result.
    ConfigError
        If an option has an invalid value, or an unknown option is set.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.arange(12, chunks=12).reshape(4, 3).rechunk((2, 3))
    >>> y = transpose(x)
    >>> y.chunks
    ((2, 1), (4,))
    >>> y.compute()[2]
    array([ 2,  5,  8, 11])
    """
    order: Any = (axes, *more_axes) if more_axes or isinstance(axes, Integral) else axes
    return redistributed(x, *transposed(x, order, chunks))


def transposed(
    x: DaskArray, axes: Sequence[int] | None, chunks: ChunksLike
) -> tuple[tuple[int, ...], Chunks]:
    """Return the axes and the chunks of a transpose; raises the errors of `transpose`."""
    check_array(x)
    check_chunks_are_known(x)
    order = checked_axes(axes, x.ndim)
    if chunks is None:
        return order, slab_chunks(x.chunks, order)
    before = tuple(x.chunks[axis] for axis in order)
    return order, checked_chunks(chunks, before, x.dtype)
