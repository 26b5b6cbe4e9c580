"""`transpose`: an array with its axes permuted, cut into slabs along the first of them."""

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

    On a `distributed` cluster each worker assembles its blocks of the result from regions that it
    reads from the other workers, in the staged order of the multi-GPU transpose of *CUDA Fortran
    for Scientists and Engineers* (Ruetsch and Fatica). On any other scheduler the same graph
    gives the same values.

    Parameters
    ----------
    x : dask.array.Array
        Array of NumPy or CuPy blocks, of any number of dimensions, cut along any of its axes.
    axes : sequence of int, optional
        A permutation of the axes: axis ``i`` of the result is axis ``axes[i]`` of `x`. Negative
        numbers count from the last. By default the order is reversed.
    *more_axes : int
        With `axes` the first of them: ``transpose(x, 1, 0)`` is ``transpose(x, (1, 0))``.
    chunks : int, str, tuple or dict, optional
        Chunks of the result: anything that `dask.array.rechunk` takes. By default slabs along
        the result's first axis, with the other axes whole: as many as `x` has blocks along its
        most divided axis, their sizes as even as possible. If the first axis has fewer rows than
        that, the other axes are cut too, so that there is work for as many tasks.

    Returns
    -------
    dask.array.Array
        The values of ``np.transpose(x, axes)``; lazy, with the dtype and block type of `x`.

    Raises
    ------
    UnsupportedArrayError
        If `x` is no Dask array, or its blocks are masked, sparse or otherwise more than bytes.
    AxesError
        If `axes` is no permutation of the axes of `x`.
    ChunksError
        If the chunk sizes of `x` are unknown, or `chunks` does not fit the result.
    ConfigError
        If an option has a value that it cannot have, or there is none of a name that is set.

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
    """Return the axes and the chunks of a transpose. It raises what `transpose` does."""
    check_array(x)
    check_chunks_are_known(x)
    order = checked_axes(axes, x.ndim)
    if chunks is None:
        return order, slab_chunks(x.chunks, order)
    before = tuple(x.chunks[axis] for axis in order)
    return order, checked_chunks(chunks, before, x.dtype)
