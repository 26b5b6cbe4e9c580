"""`transpose`: an array with its axes permuted, cut into slabs along the first of them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int
from typing import Any

from dask_p2p.config import options
from dask_p2p.errors import AxesError, ChunksError
from dask_p2p.graph import check_array, planned_array
from dask_p2p.layout import Chunks, normal_axes
from dask_p2p.plan import Plan, slab_chunks, transpose_plan
from dask_p2p.registration import register_if_possible

__all__ = ["plan_of", "transpose"]


def transpose(x: Any, axes: Sequence[int] | None = None, *, chunks: Any = None) -> Any:
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
    plan = plan_of(x, axes, chunks)
    register_if_possible()
    return planned_array("p2p-transpose", x, plan, options())


def plan_of(x: Any, axes: Sequence[int] | None, chunks: Any) -> Plan:
    """Return the plan of a transpose, given as `transpose` takes it."""
    check_array(x)
    order = _permutation(axes, x.ndim)
    dst_chunks = slab_chunks(x.chunks, order) if chunks is None else _rechunked(x, order, chunks)
    return transpose_plan(x.chunks, order, dst_chunks)


def _permutation(axes: Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    order = normal_axes(axes, ndim)
    if order is None:
        raise AxesError(
            f"expected a permutation of the {ndim} axes of the array, "
            f"{tuple(range(ndim))} in any order, got axes={axes!r}."
        )
    return order


def _rechunked(x: Any, order: tuple[int, ...], chunks: Any) -> Chunks:
    """Read `chunks` as `dask.array.rechunk` would for the transpose of `x`."""
    from dask.array.core import normalize_chunks

    shape = tuple(x.shape[axis] for axis in order)
    before = tuple(x.chunks[axis] for axis in order)
    ndim = len(shape)
    try:
        if isinstance(chunks, dict):
            given = {as_int(axis): value for axis, value in chunks.items()}
            if not all(-ndim <= axis < ndim for axis in given):
                raise ValueError(f"an axis is not one of {ndim}")
            given = {axis % ndim: value for axis, value in given.items()}
            chunks = tuple(given.get(axis) for axis in range(ndim))
        if isinstance(chunks, (tuple, list)):
            if len(chunks) == ndim:
                kept = zip(chunks, before, strict=True)
                chunks = tuple(old if new is None else new for new, old in kept)
            else:
                chunks = tuple(chunks)
        result = normalize_chunks(chunks, shape, dtype=x.dtype, previous_chunks=before)
    except (TypeError, ValueError) as exc:
        raise _misfit(chunks, shape, str(exc)) from exc
    if len(result) != ndim or tuple(map(sum, result)) != shape:
        raise _misfit(chunks, shape, "their sums differ from the shape")
    return tuple(tuple(int(size) for size in sizes) for sizes in result)


def _misfit(chunks: Any, shape: tuple[int, ...], why: str) -> ChunksError:
    return ChunksError(
        f"expected chunks for an array of shape {shape}, as dask.array.rechunk takes them, got "
        f"chunks={chunks!r}: {why}."
    )
