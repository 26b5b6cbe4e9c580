"""`rechunk`: an array cut into other blocks, with its axes permuted if that is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import dask.array as da

from dask_p2p.config import Options, checked_options
from dask_p2p.errors import ChunksError, InputError
from dask_p2p.geometry import Chunks
from dask_p2p.graph.arrays import planned_array
from dask_p2p.ops.arguments import check_array, checked_axes, checked_chunks, has_unknown_chunks
from dask_p2p.plans import GridPlan, grid_between, grouped, redistribution
from dask_p2p.plugins.registration import cluster_size, register_if_possible
from dask_p2p.types import ChunksLike, DaskArray

# Bound here: others may put this package's functions in the place of Dask's.
_transpose_by_tasks, rechunk_by_tasks = da.transpose, partial(da.rechunk, method="tasks")


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
    """Cut a Dask array into other blocks, moving only the regions of blocks that must move.

    One layer, one task for each block of the result. A block that is already there, as it is, is
    handed on and not copied.

    Parameters
    ----------
    x : dask.array.Array
        Array of NumPy or CuPy blocks, of any number of dimensions, cut along any of its axes.
    chunks : int, str, tuple or dict, optional
        Chunks of the result: anything that `dask.array.rechunk` takes.
    threshold : int, optional
        As `dask.array.rechunk` takes it, to choose between Dask's own ways. Without effect here.
    block_size_limit : int, optional
        Largest size in bytes of a block where `chunks` has "auto". By default Dask's
        ``array.chunk-size``.
    balance : bool, optional
        Whether to make the blocks along each axis as equal as possible, as `dask.array.rechunk`
        does.
    method : {"tasks", "p2p"}, optional
        As `threshold`: one of Dask's own ways. Without effect here.
    axes : sequence of int, optional
        A permutation of the axes, done in the same pass: axis ``i`` of the result is axis
        ``axes[i]`` of `x`, and `chunks` are given in the result's order. By default the axes stay.

    Returns
    -------
    dask.array.Array
        The values of `x`, or of ``np.transpose(x, axes)``; lazy, with its dtype and block type. If
        nothing changes it is `x` itself.

    Raises
    ------
    UnsupportedArrayError
        If `x` is no Dask array, or its blocks are masked, sparse or otherwise more than bytes.
    AxesError
        If `axes` is no permutation of the axes of `x`.
    ChunksError
        If `chunks` does not fit the result, or an axis of unknown chunk sizes is to be cut anew.
    InputError
        If there is no such `method`.
    ConfigError
        If an option has a value that it cannot have, or there is none of a name that is set.

    Notes
    -----
    Arrays that have unknown chunk sizes along axes which stay as they are go by Dask's own tasks.

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
            f"expected method 'tasks' or 'p2p', which make no difference here, or None, got "
            f"{method!r}. Leave it out."
        )
    order = tuple(range(x.ndim)) if axes is None else checked_axes(axes, x.ndim)
    if has_unknown_chunks(x):
        return _rechunk_unknown(x, order, chunks, balance, block_size_limit)
    before = tuple(x.chunks[axis] for axis in order)
    return redistributed(
        x, order, checked_chunks(chunks, before, x.dtype, balance, block_size_limit)
    )


def _rechunk_unknown(
    x: DaskArray,
    axes: tuple[int, ...],
    chunks: ChunksLike,
    balance: bool,
    block_size_limit: int | None,
) -> DaskArray:
    """Cut an array anew by Dask's tasks, which is possible along axes of known chunk sizes.

    `ChunksError` if an axis of unknown chunk sizes is to be cut anew, or the chunks do not fit.
    """
    if axes != tuple(range(x.ndim)):
        x = _transpose_by_tasks(x, axes)
    try:
        return rechunk_by_tasks(x, chunks, balance=balance, block_size_limit=block_size_limit)
    except (TypeError, ValueError) as exc:
        raise ChunksError(
            f"expected known chunk sizes along the axes that are cut anew, got {x.chunks} and "
            f"chunks={chunks!r}: {exc}. Call x.compute_chunk_sizes() first, or leave these axes."
        ) from exc


def redistributed(x: DaskArray, order: tuple[int, ...], after: Chunks) -> DaskArray:
    """Return an array in other blocks and with its axes in another order; all of it is checked."""
    is_permuted = order != tuple(range(x.ndim))
    if after == x.chunks and not is_permuted:
        return x
    register_if_possible()
    prefix = "p2p-transpose" if is_permuted else "p2p-rechunk"
    options = checked_options()
    for plan, grid in planned(x.chunks, order, after, options):
        x = planned_array(prefix, x, plan, options)
        if plan.chunks != grid:
            x = rechunk_by_tasks(x, grid)  # which only cuts: views, on the same worker
    return x


def cluster_threads() -> int | None:
    """Return how many threads the workers of the current client have; None without one."""
    size = cluster_size()
    return None if size is None else prod(size)


def planned(
    before: Chunks,
    axes: tuple[int, ...],
    after: Chunks,
    options: Options,
    threads: Callable[[], int | None] = cluster_threads,
) -> list[tuple[GridPlan, Chunks]]:
    """Return the plans by which an array is cut anew, one after the other.

    With each come the chunks that are cut from its blocks, which are larger if there are very many.
    """
    direct = redistribution(before, axes, after)
    groups = grouped(direct, options.groups, threads)
    between = grid_between(direct, options.passes, groups)
    if between is None:
        return [(groups, after)]
    first = redistribution(before, axes, between)
    second = redistribution(between, range(len(axes)), after)
    return [
        (grouped(first, options.groups, threads), between),
        (grouped(second, options.groups, threads), after),
    ]
