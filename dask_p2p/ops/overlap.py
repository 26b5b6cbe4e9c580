"""`map_overlap`: a function of blocks that see a rim of their neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import dask.array as da
from dask.array.overlap import coerce_boundary, coerce_depth

from dask_p2p.config import checked_options
from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.graph import planned_array
from dask_p2p.layer import Post
from dask_p2p.layout import Chunks, Index, block_shape
from dask_p2p.ops.arguments import check_array, check_chunks_are_known
from dask_p2p.plans import halo_plan
from dask_p2p.plans.halo import BOUNDARIES
from dask_p2p.registration import register_if_possible
from dask_p2p.versioned import versioned

__all__ = ["map_overlap"]


def map_overlap(
    func: Callable[..., Any],
    x: Any,
    depth: Any,
    boundary: Any = "none",
    *,
    trim: bool = True,
    dtype: Any = None,
    meta: Any = None,
    corners: bool = True,
    allow_rechunk: bool = True,
    **kwargs: Any,
) -> Any:
    """Map a function over blocks that have a rim of their neighbours' elements around them.

    One layer: the task of a block reads the rims, and nothing else, from the workers that hold
    them, calls the function, and cuts the rims off its result.

    Parameters
    ----------
    func : callable
        Takes a block with its rims, and returns an array of the same shape.
    x : dask.array.Array
        Array of NumPy or CuPy blocks. They may be smaller than the rims.
    depth : int, tuple or dict
        Width of the rims in elements: one for all axes, one for each, or by axis. A width is a
        number, or a pair (before, after).
    boundary : str, scalar, tuple or dict
        What lies beyond the ends of the array, for all axes or by axis: "none" (blocks at the ends
        have no rim there), "periodic", "reflect", "nearest", or a constant.
    trim : bool, optional
        Whether to cut the rims off what `func` returns. Without, its blocks are the result's.
    dtype : numpy.dtype, optional
        Of the result; by default what `func` gives for a small array.
    meta : array, optional
        Empty array of the type and dtype of the result, in the place of `dtype`.
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
        When it runs, if `func` returns another shape than it was given, and rims are to be cut off.

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
    if trim:
        chunks: Chunks = tuple(tuple(map(int, sizes)) for sizes in x.chunks)
        cut_ends = tuple(kind != "none" for kind in beyond)
        after: Callable[[Any, Index], Any] = Trimmed(function, widths, cut_ends, chunks)
    else:
        chunks, after = plan.chunks, Mapped(function)
    # As Dask finds it out: by calling the function with an empty array.
    inferred = da.map_blocks(function, x, dtype=dtype, meta=meta)
    register_if_possible()
    post = Post(after, chunks, inferred._meta)
    return planned_array("p2p-overlap", x, plan, checked_options(), post)


@versioned()
@dataclass(frozen=True)
class Mapped:
    """The function, of an assembled block."""

    function: Callable[[Any], Any]

    def __call__(self, block: Any, index: Index) -> Any:
        return self.function(block)


@versioned()
@dataclass(frozen=True)
class Trimmed:
    """The function, and what it gives without the rims.

    Parameters
    ----------
    function
        Of an assembled block.
    depth
        Widths of the rims along each axis.
    has_ends
        For each axis, whether there are rims at the ends of the array too.
    chunks
        Of the array, without rims.
    """

    function: Callable[[Any], Any]
    depth: tuple[tuple[int, int], ...]
    has_ends: tuple[bool, ...]
    chunks: Chunks

    def __call__(self, block: Any, index: Index) -> Any:
        result = self.function(block)
        if getattr(result, "shape", None) != block.shape:
            raise BlockMismatchError(
                f"expected a function that keeps the shape of a block, {block.shape}, got "
                f"{getattr(result, 'shape', type(result).__name__)}. Return an array of that "
                f"shape, or pass trim=False."
            )
        slices = []
        for i, sizes, (before, _), has_ends in zip(
            index, self.chunks, self.depth, self.has_ends, strict=True
        ):
            start = before if has_ends else min(before, sum(sizes[:i]))
            slices.append(slice(start, start + sizes[i]))
        return result[(*slices, ...)]


def checked_depth(depth: Any, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the widths of the rims before and after a block, for each axis.

    Raises
    ------
    InputError
        If they are no widths, or wider than the array.
    """
    ndim = len(shape)
    given = coerce_depth(ndim, depth) if _is_by_axis(depth, ndim) else None
    if given is None:
        raise InputError(
            f"expected a width of the rims for each of {ndim} axes, got depth={depth!r}. Give one "
            f"number for all, a tuple with one for each, or a dict by axis; a width is a number "
            f"from 0, or a pair (before, after)."
        )
    widths = []
    for axis, length in enumerate(shape):
        width = given.get(axis, 0)
        before, after = width if isinstance(width, tuple) else (width, width)
        if max(before, after) > length:
            raise InputError(
                f"expected rims that are no wider than the array, got depth={depth!r} for an axis "
                f"of length {length} (axis {axis}). Make them narrower."
            )
        widths.append((int(before), int(after)))
    return tuple(widths)


def _is_by_axis(depth: Any, ndim: int) -> bool:
    if isinstance(depth, Mapping):
        in_range = all(isinstance(axis, int) and -ndim <= axis < ndim for axis in depth)
        return in_range and all(map(_is_width, depth.values()))
    if isinstance(depth, (tuple, list)):
        return len(depth) == ndim and all(map(_is_width, depth))
    return _is_width(depth)


def _is_width(width: Any) -> bool:
    if isinstance(width, tuple):
        return len(width) == 2 and all(_is_width(side) and not isinstance(side, tuple) for side in width)
    return hasattr(width, "__index__") and not isinstance(width, bool) and int(width) >= 0


def checked_boundary(boundary: Any, ndim: int) -> tuple[Any, ...]:
    """Return for each axis what lies beyond its ends.

    Raises
    ------
    InputError
        If that is no boundary.
    """
    given = coerce_boundary(ndim, boundary)
    kinds = tuple("none" if given.get(axis) is None else given[axis] for axis in range(ndim))
    for kind in kinds:
        if isinstance(kind, str) and kind not in BOUNDARIES:
            raise InputError(
                f"expected a boundary out of {', '.join(BOUNDARIES)}, or a number, got {kind!r}."
            )
    return kinds
