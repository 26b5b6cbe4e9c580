"""`map_overlap`: a function of blocks that see a rim of their neighbours.

A function of one array runs in the tasks that assemble its blocks: one layer. With several arrays,
or arguments that only Dask's `map_blocks` knows, blocks with rims are arrays of their own, and the
function is mapped over them by Dask: one layer more. What a function gets is its own in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import broadcast_chunks, broadcast_dimensions, common_blockdim
from dask.array.overlap import ensure_minimum_chunksize
from dask.array.utils import meta_from_array
from dask.base import unpack_collections
from dask.utils import has_keyword

from dask_p2p.config import checked_options
from dask_p2p.errors import InputError
from dask_p2p.geometry import Chunks
from dask_p2p.graph.arrays import Post, planned_array
from dask_p2p.ops.arguments import (
    check_array,
    check_chunks_are_known,
    check_function,
    check_names,
    is_dask_array,
)
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.ops.rims import checked_boundaries, checked_depths, unread_value
from dask_p2p.ops.stencil import OwnBlocks, SkipsEmpty, Stencil, Trim
from dask_p2p.plans import GridPlan, halo_plan
from dask_p2p.plans.halo import rims_of
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.types import BoundaryLike, DaskArray, DepthLike

#: Of `dask.array.map_blocks`, beside ``dtype`` and ``meta``.
_OF_MAP_BLOCKS = {"chunks", "drop_axis", "enforce_ndim", "name", "new_axis", "token"}
_OF_SHAPE = {"chunks", "drop_axis", "new_axis"}
_FOR_DASK = {"dtype", "meta", *_OF_MAP_BLOCKS}


def map_overlap(
    func: Callable[..., Any],
    /,
    *args: Any,
    depth: DepthLike | None = None,
    boundary: BoundaryLike | None = None,
    trim: bool = True,
    align_arrays: bool = True,
    allow_rechunk: bool = True,
    corners: bool = True,
    **kwargs: Any,
) -> DaskArray:
    """Map a function over blocks that have a rim of their neighbours' elements around them.

    A task reads the rims of its block, and nothing else, from the workers that hold them, calls the
    function, and cuts the rims off the result. For one array that is one layer.

    Parameters
    ----------
    func : callable
        Takes a block with its rims of each array, and returns an array of its shape. It may
        overwrite what it gets: that is no other's. With a parameter ``block_id`` or ``block_info``
        it is told where the block is, as `dask.array.map_blocks` tells it. If rims are cut
        off its result, it is not called for blocks without elements.
    *args : dask.array.Array
        Arrays of NumPy or CuPy blocks. Blocks may be smaller than the rims. Depth and boundary may
        follow them: ``map_overlap(func, x, depth, boundary)``.
    depth : int, tuple, dict or list, optional
        Width of the rims in elements: one for all axes, one for each, or by axis. A width is a
        number, or a pair (before, after). A list has one of these for each array. By default 0.
    boundary : str, scalar, tuple, dict or list, optional
        What lies beyond the ends of the array, for all axes or by axis: "none" (blocks at the ends
        have no rim there), "periodic", "reflect", "nearest", or a constant. A list has one of these
        for each array. By default "none".
    trim : bool, optional
        Whether to cut the rims off what `func` returns. Without, its result is taken as it is.
    align_arrays : bool, optional
        Whether to cut several arrays in the same places first. Without, they must be.
    allow_rechunk : bool, optional
        As `dask.array.map_overlap` takes it. No array is cut anew because of its rims.
    corners : bool, optional
        Whether rims include the blocks that are neighbours along several axes. Stencils that are
        shaped like a star do not read those: with False they do not move, and hold NaN, or zero
        where the dtype has no NaN.
    **kwargs
        Those that `dask.array.map_blocks` knows are for it: ``dtype``, ``meta``, ``chunks``,
        ``drop_axis``, ``new_axis``, ``name``, ``token``, ``enforce_ndim``. Others are passed on to
        `func`; what Dask has still to compute among them is computed first. Where `func` has a
        parameter ``corners`` too, give it by `functools.partial`.

    Returns
    -------
    dask.array.Array
        The values of ``dask.array.map_overlap(func, *args, depth=depth, boundary=boundary)``, in
        the blocks of the array.

    Raises
    ------
    UnsupportedArrayError
        If one of `args` is no Dask array, or blocks are masked, sparse or otherwise more than
        bytes.
    ChunksError
        If chunk sizes are unknown.
    InputError
        If `depth` or `boundary` is nothing of the kind, a rim is wider than its array, or
        ``corners`` may be meant for `func`.
    BlockMismatchError
        When it runs, if `func` returns an array of another shape than it should.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.arange(6, chunks=3)
    >>> map_overlap(lambda block: block.cumsum(), x, 1, boundary=0).compute(scheduler="sync")
    array([ 0,  1,  3,  5,  9, 14])
    >>> map_overlap(lambda a, b: a + b[::-1], x, x, depth=1).compute(scheduler="sync")
    array([3, 3, 3, 7, 7, 7])
    """
    check_names(func, len(args), map_overlap, locals())
    return mapped(
        func, args, kwargs, depth, boundary, trim=trim, align_arrays=align_arrays, corners=corners
    )


def mapped(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    depth: Any,
    boundary: Any,
    *,
    trim: bool,
    align_arrays: bool,
    corners: bool = True,
    allow_rechunk: bool | None = None,  # where blocks are smaller than rims; None if they may be
) -> DaskArray:
    """Do what `map_overlap` does; all of `kwargs` is for the function or `dask.array.map_blocks`.

    `InputError` if a block is smaller than its rims, and `allow_rechunk` is false.
    """
    arrays, depth, boundary = _checked_arguments(func, args, depth, boundary)
    if align_arrays and len(arrays) > 1:
        arrays = aligned(arrays)
    shapes = [x.shape for x in arrays]
    widths = checked_depths(depth, shapes)
    beyond = checked_boundaries(boundary, shapes)
    if allow_rechunk is not None:
        arrays = [_wide(x, of, allow_rechunk) for x, of in zip(arrays, widths, strict=True)]
    plans = [
        halo_plan(x.chunks, depths, kinds, corners, unread_value(x.dtype))
        for x, depths, kinds in zip(arrays, widths, beyond, strict=True)
    ]
    register_if_possible()
    is_plain = not (
        kwargs.keys() & _OF_MAP_BLOCKS
        or has_keyword(func, "block_info")
        or unpack_collections(kwargs)[0]
    )
    if len(arrays) == 1 and is_plain:
        return _assembled_and_mapped(func, arrays[0], plans[0], trim, kwargs)
    return _mapped_by_dask(func, arrays, plans, trim, kwargs)


def _wide(x: DaskArray, widths: Sequence[tuple[int, int]], allow_rechunk: bool) -> DaskArray:
    """Return an array whose blocks are no smaller than their rims, cut as Dask does it."""
    sizes = zip(map(max, widths), x.chunks, strict=True)
    chunks = tuple(ensure_minimum_chunksize(least, along) for least, along in sizes)
    if chunks == x.chunks:
        return x
    if not allow_rechunk:
        raise InputError(
            f"expected blocks that are no smaller than their rims, got chunks {x.chunks} and "
            f"widths {tuple(widths)}. Rechunk the array, or set allow_rechunk=True."
        )
    return rechunk(x, chunks)


def _checked_arguments(
    func: Any, args: tuple[Any, ...], depth: Any, boundary: Any
) -> tuple[list[DaskArray], Any, Any]:
    """Return the arrays, depth and boundary, of which the last two may follow the arrays."""
    check_function(func, "a block", "map_overlap(func, x, depth, boundary)")
    count = next((i for i, x in enumerate(args) if not is_dask_array(x)), len(args))
    arrays, others = list(args[:count]), list(args[count:])
    for x in (*arrays, *(x for x in others if getattr(x, "ndim", 0)), *others[: not arrays]):
        check_array(x)
        check_chunks_are_known(x)
    if not arrays:
        raise InputError("expected an array after the function. Call map_overlap(func, x, depth).")
    for name, given in (("depth", depth), ("boundary", boundary)):
        if others and given is not None:
            raise InputError(
                f"expected {name} once, got {others[0]!r} after the arrays and {name}={given!r}."
            )
        if others and name == "depth":
            depth = others.pop(0)
        elif others:
            boundary = others.pop(0)
    if others:
        raise InputError(
            f"expected arrays, depth and boundary, got {others!r} after these. Give the rest by "
            f"name."
        )
    return arrays, depth, boundary


def aligned(arrays: Sequence[DaskArray]) -> list[DaskArray]:
    """Cut arrays in the same places along the axes that they have in common, from the last one."""
    shapes = [x.shape for x in arrays]
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        raise InputError(
            f"expected arrays that broadcast, got the shapes {shapes}. Make them fit, by indexing "
            f"with None where an axis is missing."
        ) from None
    axes = [tuple(range(x.ndim))[::-1] for x in arrays]
    chunks = {i: x.chunks for i, x in enumerate(arrays)}
    common = broadcast_dimensions(list(enumerate(axes)), chunks, consolidate=common_blockdim)
    return [
        rechunk(x, tuple(common[a] if n > 1 else (n,) for a, n in zip(along, x.shape, strict=True)))
        for x, along in zip(arrays, axes, strict=True)
    ]


def _assembled_and_mapped(
    func: Callable[..., Any],
    x: DaskArray,
    plan: GridPlan,
    trim: bool,
    kwargs: Mapping[str, Any],
) -> DaskArray:
    """Call the function in the tasks that assemble blocks with rims."""
    dtype, meta = kwargs.get("dtype"), kwargs.get("meta")
    given = {name: value for name, value in kwargs.items() if name not in ("dtype", "meta")}
    has_block_id = has_keyword(func, "block_id") and "block_id" not in given
    function = partial(func, **given) if given else func
    if meta is None and dtype is None:
        # By an empty array. On a GPU that takes milliseconds, each time.
        meta = da.map_blocks(function, x)._meta
    meta = meta_from_array(x._meta if meta is None else meta, x.ndim, dtype)
    chunks = tuple(tuple(map(int, sizes)) for sizes in x.chunks)
    if trim and any(0 in sizes for sizes in chunks):
        function = SkipsEmpty(function, chunks, meta.dtype, has_block_id)
        has_block_id = True
    stencil = Stencil(function, Trim(rims_of(plan)) if trim else None, has_block_id)
    return planned_array("p2p-overlap", x, plan, checked_options(), Post(stencil, chunks, meta))


def _mapped_by_dask(
    func: Callable[..., Any],
    arrays: Sequence[DaskArray],
    plans: Sequence[GridPlan],
    trim: bool,
    kwargs: dict[str, Any],
) -> DaskArray:
    """Have Dask map the function over arrays of blocks with rims, and cut these off."""
    func, kwargs, has_block_id = _bound(func, kwargs)
    options = checked_options()
    with_rims = [
        x if plan.chunks == x.chunks else planned_array("p2p-overlap", x, plan, options)
        for x, plan in zip(arrays, plans, strict=True)
    ]
    chunks = _chunks_with_empty(arrays, kwargs) if trim else None
    if chunks is not None:
        # Dask finds the dtype of all blocks by calling the function, before any is skipped.
        kwargs["meta"] = da.map_blocks(OwnBlocks(func), *with_rims, **kwargs)._meta
        func = SkipsEmpty(func, chunks, kwargs["meta"].dtype, has_block_id)
    has_rims = any(x is not y for x, y in zip(arrays, with_rims, strict=True))
    if has_rims and not trim:
        kwargs = {"chunks": arrays[0].chunks, **kwargs}
    y = da.map_blocks(OwnBlocks(func), *with_rims, **kwargs)
    if not has_rims or not trim:
        return y
    # Of the array with the most axes, the first if there are several.
    most = max(range(len(arrays)), key=lambda i: arrays[i].ndim)
    rims = _rims_of_result(rims_of(plans[most]), y, kwargs.get("drop_axis"), kwargs.get("new_axis"))
    chunks = tuple(
        tuple(n - before - after for n, (before, after) in zip(sizes, along, strict=True))
        for sizes, along in zip(y.chunks, rims, strict=True)
    )
    return da.map_blocks(Trim(rims), y, chunks=chunks, dtype=y.dtype, meta=y._meta)


def _bound(
    func: Callable[..., Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any], bool]:
    """Bind keywords to the function, since parameters of Dask's functions have such names too.

    The other keywords are returned too, and whether the function gets the index of a block.
    """
    for_dask = {
        name: value
        for name, value in kwargs.items()
        if name in _FOR_DASK or unpack_collections(value)[0]
    }
    own = {name: value for name, value in kwargs.items() if name not in for_dask}
    has_block_id = has_keyword(func, "block_id") and "block_id" not in own
    return partial(func, **own) if own else func, for_dask, has_block_id


def _chunks_with_empty(arrays: Sequence[DaskArray], kwargs: Mapping[str, Any]) -> Chunks | None:
    """Return the chunks of a result that has blocks without elements; None for any other one."""
    if kwargs.keys() & _OF_SHAPE or not any(0 in sizes for x in arrays for sizes in x.chunks):
        return None
    try:
        chunks: Chunks = broadcast_chunks(*(x.chunks for x in arrays))
    except ValueError:  # blocks differ, and the function may make anything of them
        return None
    return chunks


def _rims_of_result(
    rims: Sequence[tuple[tuple[int, int], ...]], y: DaskArray, drop_axis: Any, new_axis: Any
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the rims along the axes of a result that lacks some axes, and has others."""
    ndim = len(rims)
    dropped = _axes(drop_axis, ndim)
    kept = [along for axis, along in enumerate(rims) if axis not in dropped]
    if new_axis is None:  # those before the others, for which there are chunks
        new_axis = range(y.ndim - len(kept))
    for axis in sorted(_axes(new_axis, max(ndim, y.ndim))):
        kept.insert(axis, ((0, 0),) * y.numblocks[axis])
    return tuple(kept)


def _axes(axes: Any, ndim: int) -> list[int]:
    return [] if axes is None else [int(axis) % ndim for axis in np.atleast_1d(axes)]
