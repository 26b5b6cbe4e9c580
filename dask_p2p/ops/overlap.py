"""`map_overlap`: a function of blocks that see a rim of their neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index as as_int
from typing import Any

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array

from dask_p2p.config import checked_options
from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.graph import planned_array
from dask_p2p.layer import Post
from dask_p2p.layout import Chunks, Index
from dask_p2p.ops.arguments import check_array, check_chunks_are_known
from dask_p2p.plans import halo_plan
from dask_p2p.plans.halo import BOUNDARIES
from dask_p2p.registration import register_if_possible
from dask_p2p.types import Array, DaskArray, DTypeLike
from dask_p2p.versioned import versioned

__all__ = ["map_overlap"]


def map_overlap(
    func: Callable[..., Any],
    x: DaskArray,
    depth: Any,
    boundary: Any = "none",
    *,
    trim: bool = True,
    dtype: DTypeLike | None = None,
    meta: Array | None = None,
    corners: bool = True,
    allow_rechunk: bool = True,
    **kwargs: Any,
) -> DaskArray:
    """Map a function over blocks that have a rim of their neighbours' elements around them.

    One layer: the task of a block reads the rims, and nothing else, from the workers that hold
    them, calls the function, and cuts the rims off its result.

    Parameters
    ----------
    func : callable
        Takes a block with its rims, and returns an array of its shape.
    x : dask.array.Array
        Array of NumPy or CuPy blocks. They may be smaller than the rims.
    depth : int, tuple or dict
        Width of the rims in elements: one for all axes, one for each, or by axis. A width is a
        number, or a pair (before, after).
    boundary : str, scalar, tuple or dict
        What lies beyond the ends of the array, for all axes or by axis: "none" (blocks at the ends
        have no rim there), "periodic", "reflect", "nearest", or a constant.
    trim : bool, optional
        Whether to cut the rims off what `func` returns. Without, it returns blocks that have none.
    dtype : numpy.dtype, optional
        Of the result, whose blocks are of the type of those of `x`. By default what `func` gives
        for an empty array, which takes a moment on GPUs.
    meta : array, optional
        Empty array of the type and dtype of the result, if its blocks are of another type.
    corners : bool, optional
        Whether rims include the blocks that are neighbours along several axes. Stencils that are
        shaped like a star do not read those: without, they are zero, and do not move.
    allow_rechunk : bool, optional
        As `dask.array.map_overlap` takes it. The array is never rechunked.
    **kwargs
        Passed on to `func`.

    Returns
    -------
    dask.array.Array
        The values of ``dask.array.map_overlap(func, x, depth, boundary)``, in the blocks of `x`.

    Raises
    ------
    UnsupportedArrayError
        If `x` is no Dask array, or its blocks are masked, sparse or otherwise more than bytes.
    ChunksError
        If the chunk sizes of `x` are unknown.
    InputError
        If `depth` or `boundary` is nothing of the kind, or a rim is wider than the array.
    BlockMismatchError
        When it runs, if `func` returns an array of another shape than it should.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.arange(6, chunks=3)
    >>> map_overlap(lambda block: block.cumsum(), x, 1, boundary=0).compute(scheduler="sync")
    array([ 0,  1,  3,  5,  9, 14])
    """
    check_array(x)
    check_chunks_are_known(x)
    if not callable(func):
        raise InputError(f"expected a function of a block, got {func!r}. Give the function first.")
    widths = checked_depth(depth, x.shape)
    beyond = checked_boundary(boundary, x.ndim)
    plan = halo_plan(x.chunks, widths, beyond, has_corners=corners)
    function = partial(func, **kwargs) if kwargs else func
    chunks = tuple(tuple(map(int, sizes)) for sizes in x.chunks)
    cut_off = widths if trim else ((0, 0),) * x.ndim
    stencil = Stencil(function, cut_off, tuple(kind != "none" for kind in beyond), chunks)
    register_if_possible()
    post = Post(stencil, chunks, _meta(function, x, dtype, meta))
    return planned_array("p2p-overlap", x, plan, checked_options(), post)


@versioned()
@dataclass(frozen=True)
class Stencil:
    """A function of assembled blocks, and what of its result is a block of the output.

    Parameters
    ----------
    function
        Of an assembled block.
    depth
        Widths of the rims along each axis, as far as they are cut off here.
    has_ends
        For each axis, whether there are rims at the ends of the array too.
    chunks
        Of the array, without rims.
    """

    function: Callable[[Any], Any]
    depth: tuple[tuple[int, int], ...]
    has_ends: tuple[bool, ...]
    chunks: Chunks

    def __call__(self, block: Array, index: Index) -> Any:
        shape, slices = [], []
        for i, sizes, (before, after), has_ends in zip(
            index, self.chunks, self.depth, self.has_ends, strict=True
        ):
            if not has_ends:
                before, after = min(before, sum(sizes[:i])), min(after, sum(sizes[i + 1 :]))
            shape.append(before + sizes[i] + after)
            slices.append(slice(before, before + sizes[i]))
        result = self.function(block)
        if getattr(result, "shape", None) != tuple(shape):
            raise BlockMismatchError(
                f"expected an array of shape {tuple(shape)} from the function for a block of "
                f"{block.shape}, got {getattr(result, 'shape', type(result).__name__)}. Return an "
                f"array of the block's shape, or with trim=False one without the rims."
            )
        return result[(*slices, ...)]


def _meta(
    function: Callable[[Any], Any], x: DaskArray, dtype: DTypeLike | None, meta: Array | None
) -> Array:
    """Return an empty array of the result's type and dtype: as it was given, or as Dask infers it.

    Dask calls the function with an empty array. On a GPU that takes milliseconds, each time.
    """
    if meta is None and dtype is None:
        meta = da.map_blocks(function, x)._meta
    return meta_from_array(x._meta if meta is None else meta, x.ndim, dtype)


def checked_depth(depth: Any, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the widths of the rims before and after a block, for each axis.

    Raises
    ------
    InputError
        If they are no widths, or wider than the array.
    """
    widths = tuple(map(_width, _by_axis("depth", depth, len(shape), 0)))
    for axis, (width, length) in enumerate(zip(widths, shape, strict=True)):
        if max(width) > length:
            raise InputError(
                f"expected rims that are no wider than the array, got depth={depth!r} for an axis "
                f"of length {length} (axis {axis}). Make them narrower."
            )
    return widths


def _width(width: Any) -> tuple[int, int]:
    sides = width if isinstance(width, tuple) else (width, width)
    try:
        before, after = map(as_int, sides)
    except (TypeError, ValueError):
        before = after = -1
    if min(before, after) < 0:
        raise InputError(
            f"expected a width of rims, got {width!r}. Give a number of elements, at least 0, or a "
            f"pair (before, after)."
        )
    return before, after


def checked_boundary(boundary: Any, ndim: int) -> tuple[Any, ...]:
    """Return for each axis what lies beyond its ends.

    Raises
    ------
    InputError
        If that is no boundary.
    """
    kinds = _by_axis("boundary", boundary, ndim, "none")
    for kind in kinds:
        if kind not in BOUNDARIES if isinstance(kind, str) else not np.isscalar(kind):
            raise InputError(
                f"expected a boundary out of {', '.join(BOUNDARIES)}, or a number, got {kind!r}."
            )
    return kinds


def _by_axis(name: str, value: Any, ndim: int, default: Any) -> tuple[Any, ...]:
    """Return the value of each axis, given for all, for each or for some."""
    if isinstance(value, Mapping):
        axes = {axis: value[axis] for axis in value if axis in range(-ndim, ndim)}
        given = {axis % ndim: default if of is None else of for axis, of in axes.items()}
        if len(given) == len(value):
            return tuple(given.get(axis, default) for axis in range(ndim))
    elif not isinstance(value, (tuple, list)):
        return (default if value is None else value,) * ndim
    elif len(value) == ndim:
        return tuple(default if of is None else of for of in value)
    raise InputError(
        f"expected one {name} for all of {ndim} axes, a tuple with one for each, or a dict by "
        f"axis, got {name}={value!r}."
    )
