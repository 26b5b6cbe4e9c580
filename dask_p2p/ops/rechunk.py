"""`rechunk`: an array in other blocks, optionally with permuted axes."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from dask.array.core import broadcast_dimensions, common_blockdim

from dask_p2p.errors import InputError
from dask_p2p.geometry import Chunks
from dask_p2p.graph import rechunk_by_tasks, redistribute
from dask_p2p.ops.arguments import (
    check_array,
    check_known_array,
    checked_axes,
    checked_chunks,
    has_unknown_chunks,
)
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
    InputError
        If `axes` is not a permutation of the axes of `x`.
        Also if the chunk sizes of `x` are unknown, or `chunks` does not fit the result.
    ConfigError
        If an option has an invalid value, or an unknown option is set.

    See Also
    --------
    rechunk : Change the chunks, and the axes in the same pass.
    estimate : The memory that a transpose takes.

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
    return redistribute(x, *checked_transpose(x, order, chunks))


def checked_transpose(
    x: DaskArray, axes: Sequence[int] | None, chunks: ChunksLike
) -> tuple[tuple[int, ...], Chunks]:
    """Return the axes and the chunks of a transpose; raises the errors of `transpose`."""
    check_known_array(x)
    order = checked_axes(axes, x.ndim)
    if chunks is None:
        return order, slab_chunks(x.chunks, order)
    before = tuple(x.chunks[axis] for axis in order)
    return order, checked_chunks(chunks, before, x.dtype)


def rechunk(
    x: DaskArray,
    chunks: ChunksLike = "auto",
    threshold: int | None = None,
    block_size_limit: int | None = None,
    balance: bool = False,
    method: str | None = None,
    *,
    axes: Sequence[int] | None = None,
) -> DaskArray:
    """Rechunk a Dask array, moving only the regions of blocks that must move.

    The result is one layer, with one task for each block. A block that does not change is passed
    through without a copy.

    Parameters
    ----------
    x : dask.array.Array
        Array of NumPy or CuPy blocks, of any number of dimensions, chunked along any of its axes.
    chunks : int, str, tuple or dict, optional
        Chunks of the result, in any form that `dask.array.rechunk` takes.
    threshold : int, optional
        Accepted for compatibility with `dask.array.rechunk`. No effect.
    block_size_limit : int, optional
        Largest size in bytes of a block where `chunks` has "auto". Default: Dask's
        ``array.chunk-size``.
    balance : bool, optional
        Whether to make the blocks along each axis as equal as possible, as `dask.array.rechunk`
        does.
    method : {"tasks", "p2p"}, optional
        Accepted for compatibility with `dask.array.rechunk`. No effect.
    axes : sequence of int, optional
        Permutation of the axes, applied in the same pass: axis ``i`` of the result is axis
        ``axes[i]`` of `x`. `chunks` follow the result's axis order. Default: axes keep their order.

    Returns
    -------
    dask.array.Array
        The values of `x`, or of ``np.transpose(x, axes)``; lazy, with the dtype and block type of
        `x`. If nothing changes, `x` itself.

    Raises
    ------
    UnsupportedArrayError
        If `x` is not a Dask array, or has masked, sparse or other blocks that are not plain memory.
    InputError
        If `axes` is not a permutation of the axes of `x`.
        Also if `chunks` does not fit the result, or would rechunk an axis of unknown chunk sizes.
        Also if `method` has another value.
    ConfigError
        If an option has an invalid value, or an unknown option is set.

    See Also
    --------
    transpose : Permute axes.
    install : Rechunk by this package in code that calls Dask.

    Notes
    -----
    An array with unknown chunk sizes along unchanged axes is rechunked by Dask's own tasks.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((6, 4), chunks=(2, 4))
    >>> rechunk(x, (3, 2)).chunks
    ((3, 3), (2, 2))
    >>> rechunk(x, {0: -1}, axes=(1, 0)).chunks
    ((4,), (2, 2, 2))
    """
    check_array(x)
    if method not in (None, "tasks", "p2p"):
        raise InputError(
            f"expected method 'tasks' or 'p2p', which have no effect here, or None, got "
            f"{method!r}. Leave it out."
        )
    order = tuple(range(x.ndim)) if axes is None else checked_axes(axes, x.ndim)
    if has_unknown_chunks(x):
        return _rechunk_unknown(x, order, chunks, balance, block_size_limit)
    before = tuple(x.chunks[axis] for axis in order)
    return redistribute(
        x, order, checked_chunks(chunks, before, x.dtype, balance, block_size_limit)
    )


def _rechunk_unknown(
    x: DaskArray,
    axes: tuple[int, ...],
    chunks: ChunksLike,
    balance: bool,
    block_size_limit: int | None,
) -> DaskArray:
    """Return an array rechunked by Dask's tasks, along axes of known chunk sizes only."""
    if axes != tuple(range(x.ndim)):
        x = x.transpose(axes)
    try:
        return rechunk_by_tasks(x, chunks, balance=balance, block_size_limit=block_size_limit)
    except (TypeError, ValueError) as exc:
        raise InputError(
            f"expected known chunk sizes along the axes to rechunk, got {x.chunks} and "
            f"chunks={chunks!r}: {exc}. Call x.compute_chunk_sizes() first, or leave out these "
            f"axes."
        ) from exc


def align_chunks(arrays: Sequence[DaskArray]) -> list[DaskArray]:
    """Return the arrays, rechunked to common chunks along shared axes, counted from the last."""
    shapes = [x.shape for x in arrays]
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        raise InputError(
            f"expected arrays that broadcast, got the shapes {shapes}. Insert missing axes by "
            f"indexing with None."
        ) from None
    axes = [tuple(range(x.ndim))[::-1] for x in arrays]
    chunks = {i: x.chunks for i, x in enumerate(arrays)}
    common = broadcast_dimensions(list(enumerate(axes)), chunks, consolidate=common_blockdim)
    return [
        rechunk(x, tuple(common[a] if n > 1 else (n,) for a, n in zip(along, x.shape, strict=True)))
        for x, along in zip(arrays, axes, strict=True)
    ]
