"""`map_overlap`: maps a function over blocks with a halo of their neighbours' elements.

A function of one array runs in the tasks that assemble the blocks with their halos: one layer.
Several arrays, or arguments for Dask's `map_blocks`, take one more layer: the blocks with halos are
arrays, over which Dask maps the function. In both cases the function may overwrite its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, Signature
from typing import Any

import numpy as np
from dask.array.core import broadcast_chunks
from dask.array.overlap import ensure_minimum_chunksize
from dask.array.utils import meta_from_array
from dask.base import unpack_collections
from dask.utils import funcname, has_keyword

from dask_p2p.backends import backend_for
from dask_p2p.backends.base import unread_value
from dask_p2p.config import checked_options
from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.geometry import Chunks, Index
from dask_p2p.graph import (
    Epilogue,
    array_of_plan,
    arrays_with_halos,
    check_one_library,
    functions_of,
    is_dask_array,
    is_of_dask_array,
)
from dask_p2p.ops.arguments import (
    check_function,
    check_known_array,
    check_names,
    checked_boundaries,
    checked_depths,
)
from dask_p2p.ops.rechunk import align_chunks, rechunk
from dask_p2p.plans import GridPlan, plan_halo
from dask_p2p.plans.halo import halo_widths_of
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.types import Array, BoundaryLike, DaskArray, DepthLike, DType

#: Keywords of `dask.array.map_blocks`, except ``dtype`` and ``meta``.
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
    """Map a function over blocks with a halo of their neighbours' elements.

    Each task reads only the halo of its block from other workers, calls the function, and trims the
    halo from the result. For one array this is one layer.

    Parameters
    ----------
    func : callable
        Takes a block of each array with its halo, and returns an array of the same shape. It may
        overwrite its input, which no other task uses. With a parameter ``block_id`` or
        ``block_info`` it receives the block's position, as from `dask.array.map_blocks`. With
        `trim`, it is not called for empty blocks.
    *args : dask.array.Array
        Arrays of NumPy or CuPy blocks. Blocks may be smaller than the halo. Depth and boundary may
        follow them: ``map_overlap(func, x, depth, boundary)``.
    depth : int, tuple, dict or list, optional
        Halo width in elements: one for all axes, a tuple with one for each, or a dict by axis. A
        width is a number or a pair (before, after). A list has one entry for each array.
        Default: 0.
    boundary : str, scalar, tuple, dict or list, optional
        Values beyond the ends of the array, for all axes or by axis: "none" (blocks at the ends
        have no halo there), "periodic", "reflect", "nearest", or a constant. A list has one entry
        for each array. Default: "none".
    trim : bool, optional
        Whether to trim the halo from the result of `func`. If False, the result is kept whole.
    align_arrays : bool, optional
        Whether to rechunk several arrays to common chunks first. If False, their chunks must match.
    allow_rechunk : bool, optional
        Accepted for compatibility with `dask.array.map_overlap`. No array is rechunked for its
        halo.
    corners : bool, optional
        Whether the halo includes elements of diagonal neighbours, which star stencils do not read.
        If False, these are not transferred; they are NaN, or zero where the dtype has no NaN.
    **kwargs
        Keywords of `dask.array.map_blocks` go to that function: ``dtype``, ``meta``, ``chunks``,
        ``drop_axis``, ``new_axis``, ``name``, ``token``, ``enforce_ndim``. Others go to `func`;
        `dask.array` computes lazy ones first. Bind a parameter of `func` that is named ``corners``
        with `functools.partial`.

    Returns
    -------
    dask.array.Array
        The values of ``dask.array.map_overlap(func, *args, depth=depth, boundary=boundary)``, with
        the chunks of the array.

    Raises
    ------
    UnsupportedArrayError
        If one of `args` is not a Dask array, or has masked, sparse or other blocks that are not
        plain memory.
    InputError
        If chunk sizes are unknown.
        Also if `depth` or `boundary` is invalid, a halo is wider than its array, or ``corners`` may
        be meant for `func`. If a keyword is lazy, and the array is of `dask_array`.
    BlockMismatchError
        During the computation, if `func` returns an array of another shape.

    See Also
    --------
    iterate : Many steps of such a function.
    map_on_gpu : The same for blocks of NumPy on GPUs.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.arange(6, chunks=3)
    >>> y = map_overlap(lambda block: block.cumsum(), x, 1, boundary=0)
    >>> y.compute(scheduler="sync")
    array([ 0,  1,  3,  5,  9, 14])
    >>> y = map_overlap(lambda a, b: a + b[::-1], x, x, depth=1)
    >>> y.compute(scheduler="sync")
    array([3, 3, 3, 7, 7, 7])
    """
    check_names(func, len(args), map_overlap, locals())
    return map_with_halos(
        func, args, kwargs, depth, boundary, trim=trim, align_arrays=align_arrays, corners=corners
    )


def map_with_halos(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    depth: Any,
    boundary: Any,
    *,
    trim: bool,
    align_arrays: bool,
    corners: bool = True,
    allow_rechunk: bool | None = None,  # for blocks smaller than the halo; None: leave them
) -> DaskArray:
    """Return the result of `map_overlap`; `kwargs` are for `func` or `dask.array.map_blocks`."""
    arrays, depth, boundary = _split_arguments(func, args, depth, boundary)
    lazy = unpack_collections(kwargs)[0]
    if lazy and is_of_dask_array(arrays[0]):  # fused tasks would not compute them
        raise InputError(f"expected computed keywords, got {lazy[0]!r:.200}. Compute it first.")
    if align_arrays and len(arrays) > 1:
        arrays = align_chunks(arrays)
    shapes = [x.shape for x in arrays]
    widths = checked_depths(depth, shapes)
    beyond = checked_boundaries(boundary, shapes)
    if allow_rechunk is not None:
        arrays = [_widen(x, w, allow_rechunk) for x, w in zip(arrays, widths, strict=True)]
    plans = [
        # NaN differs from itself: with it, equal plans of several layers would count as different.
        plan_halo(x.chunks, depths, kinds, corners, 0 if corners else unread_value(x.dtype))
        for x, depths, kinds in zip(arrays, widths, beyond, strict=True)
    ]
    register_if_possible()
    is_plain = not (kwargs.keys() & _OF_MAP_BLOCKS or has_keyword(func, "block_info") or lazy)
    # The function gets its keywords before Dask's `map_blocks`, whose own may have the same names.
    for_dask = {
        name: value
        for name, value in kwargs.items()
        if name in _FOR_DASK or unpack_collections(value)[0]
    }
    func_kwargs = {name: value for name, value in kwargs.items() if name not in for_dask}
    has_block_id = has_keyword(func, "block_id") and "block_id" not in func_kwargs
    function = partial(func, **func_kwargs) if func_kwargs else func
    if len(arrays) == 1 and is_plain:
        return _map_in_assembly(function, arrays[0], plans[0], trim, for_dask, has_block_id)
    return _map_by_dask(function, arrays, plans, trim, for_dask, has_block_id)


def _widen(x: DaskArray, widths: Sequence[tuple[int, int]], allow_rechunk: bool) -> DaskArray:
    """Return `x` with blocks at least as large as their halo, rechunked by Dask's rule."""
    sizes = zip(map(max, widths), x.chunks, strict=True)
    chunks = tuple(ensure_minimum_chunksize(least, along) for least, along in sizes)
    if chunks == x.chunks:
        return x
    if not allow_rechunk:
        raise InputError(
            f"expected blocks no smaller than their halo, got chunks {x.chunks} and halo widths "
            f"{tuple(widths)}. Rechunk the array, or set allow_rechunk=True."
        )
    return rechunk(x, chunks)


def _split_arguments(
    func: Any, args: tuple[Any, ...], depth: Any, boundary: Any
) -> tuple[list[DaskArray], Any, Any]:
    check_function(func, "a block", "map_overlap(func, x, depth, boundary)")
    count = next((i for i, x in enumerate(args) if not is_dask_array(x)), len(args))
    arrays, extra = list(args[:count]), list(args[count:])
    for x in (*arrays, *(x for x in extra if getattr(x, "ndim", 0)), *extra[: not arrays]):
        check_known_array(x)
    if not arrays:
        raise InputError("expected an array after the function. Call map_overlap(func, x, depth).")
    check_one_library(arrays)
    for name, keyword in (("depth", depth), ("boundary", boundary)):
        if extra and keyword is not None:
            raise InputError(
                f"expected {name} once, got {extra[0]!r} after the arrays and {name}={keyword!r}."
            )
        if extra and name == "depth":
            depth = extra.pop(0)
        elif extra:
            boundary = extra.pop(0)
    if extra:
        raise InputError(
            f"expected arrays, depth and boundary, got {extra!r} after these. Pass other "
            f"arguments by name."
        )
    return arrays, depth, boundary


def _map_in_assembly(
    function: Callable[..., Any],
    x: DaskArray,
    plan: GridPlan,
    trim: bool,
    kwargs: Mapping[str, Any],
    has_block_id: bool,
) -> DaskArray:
    dtype, meta = kwargs.get("dtype"), kwargs.get("meta")
    if meta is None and dtype is None:
        # Dask calls the function with an empty array, which takes milliseconds on a GPU.
        meta = functions_of(x).map_blocks(function, x)._meta
    meta = meta_from_array(x._meta if meta is None else meta, x.ndim, dtype)
    chunks = tuple(tuple(map(int, sizes)) for sizes in x.chunks)
    if trim and any(0 in sizes for sizes in chunks):
        function = SkipsEmpty(function, chunks, meta.dtype, has_block_id)
        has_block_id = True
    stencil = Stencil(function, Trim(halo_widths_of(plan)) if trim else None, has_block_id)
    return array_of_plan("p2p-overlap", x, plan, checked_options(), Epilogue(stencil, chunks, meta))


def _map_by_dask(
    func: Callable[..., Any],
    arrays: Sequence[DaskArray],
    plans: Sequence[GridPlan],
    trim: bool,
    kwargs: dict[str, Any],
    has_block_id: bool,
) -> DaskArray:
    map_blocks = functions_of(arrays[0]).map_blocks
    meta = arrays[0]._meta
    if kwargs.get("dtype") is not None and "meta" not in kwargs and backend_for(meta).on_device:
        kwargs["meta"] = meta_from_array(meta, dtype=kwargs["dtype"])  # Dask would declare NumPy's
    with_halo = arrays_with_halos(arrays, plans, checked_options())
    chunks = _chunks_with_empty(arrays, kwargs) if trim else None
    if chunks is not None:
        # Dask infers the dtype from the function, before `SkipsEmpty` wraps it.
        kwargs["meta"] = map_blocks(CopiesBlocks(func), *with_halo, **kwargs)._meta
        func = SkipsEmpty(func, chunks, kwargs["meta"].dtype, has_block_id)
    has_halo = any(plan.chunks != x.chunks for x, plan in zip(arrays, plans, strict=True))
    if has_halo and not trim:
        kwargs = {"chunks": arrays[0].chunks, **kwargs}
    y = map_blocks(CopiesBlocks(func), *with_halo, **kwargs)
    if not has_halo or not trim:
        return y
    # The halo of the array with the most axes, the first of several.
    largest = max(range(len(arrays)), key=lambda i: arrays[i].ndim)
    halo = halo_widths_of(plans[largest])
    halo = _result_halo(halo, y, kwargs.get("drop_axis"), kwargs.get("new_axis"))
    chunks = tuple(
        tuple(n - before - after for n, (before, after) in zip(sizes, along, strict=True))
        for sizes, along in zip(y.chunks, halo, strict=True)
    )
    map_blocks = functions_of(y).map_blocks
    return map_blocks(Trim(halo), y, chunks=chunks, dtype=y.dtype, meta=y._meta)


def _chunks_with_empty(arrays: Sequence[DaskArray], kwargs: Mapping[str, Any]) -> Chunks | None:
    """Return the chunks of a result with empty blocks; None if none is empty or unknown."""
    if kwargs.keys() & _OF_SHAPE or not any(0 in sizes for x in arrays for sizes in x.chunks):
        return None
    try:
        chunks: Chunks = broadcast_chunks(*(x.chunks for x in arrays))
    except ValueError:  # the arrays' chunks differ, so any result is possible
        return None
    return chunks


def _result_halo(
    halo: Sequence[tuple[tuple[int, int], ...]], y: DaskArray, drop_axis: Any, new_axis: Any
) -> tuple[tuple[tuple[int, int], ...], ...]:
    ndim = len(halo)
    dropped = _axes(drop_axis, ndim)
    result_halo = [along for axis, along in enumerate(halo) if axis not in dropped]
    if new_axis is None:  # new axes come first
        new_axis = range(y.ndim - len(result_halo))
    for axis in sorted(_axes(new_axis, max(ndim, y.ndim))):
        result_halo.insert(axis, ((0, 0),) * y.numblocks[axis])
    return tuple(result_halo)


def _axes(axes: Any, ndim: int) -> list[int]:
    return [] if axes is None else [int(axis) % ndim for axis in np.atleast_1d(axes)]


@dataclass(frozen=True)
class Trim:
    """Trims the halo from a block."""

    halo: tuple[tuple[tuple[int, int], ...], ...]  # widths by axis and block: before and after

    def __call__(self, block: Array, block_id: Index) -> Array:
        widths = (along[i] for along, i in zip(self.halo, block_id, strict=True))
        # Dask allows functions that return fewer axes than expected.
        sides = zip(widths, block.shape, strict=False)
        return block[(*(slice(before, n - after) for (before, after), n in sides), ...)]


@dataclass(frozen=True)
class Stencil:
    """A function of assembled blocks, and the trimming of its result."""

    function: Callable[..., Any]  # user's function, which may overwrite the assembled block
    trim: Trim | None = None  # None: the result is used whole
    has_block_id: bool = False  # whether the function receives the block's index

    def __call__(self, block: Array, index: Index) -> Any:
        shape = block.shape
        context_kwargs = {"block_id": index} if self.has_block_id else {}
        result = self.function(block, **context_kwargs)
        if self.trim is None:
            return result
        if getattr(result, "shape", None) != shape:
            raise BlockMismatchError(
                f"expected an array of shape {shape} from the function for a block of that shape, "
                f"got {getattr(result, 'shape', type(result).__name__)}. Return an array of the "
                f"block's shape, or set trim=False and return one without the halo."
            )
        return self.trim(result, index)


@dataclass(frozen=True)
class CopiesBlocks:
    """A function that Dask maps over blocks of other tasks; it receives copies to overwrite."""

    function: Callable[..., Any]  # user's function; Dask reads its name and parameters

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.function

    @property
    def __name__(self) -> str:
        return str(funcname(self.function))

    def __call__(self, /, *blocks: Array, **kwargs: Any) -> Any:
        return self.function(*(block.copy() for block in blocks), **kwargs)


@dataclass(frozen=True)
class SkipsEmpty:
    """A function of blocks with halos that is not called for empty blocks of the output."""

    function: Callable[..., Any]
    chunks: Chunks  # chunks of the output
    dtype: DType  # dtype of the output
    has_block_id: bool  # whether the function receives the block's index

    @property
    def __name__(self) -> str:
        return str(funcname(self.function))

    @property
    def __signature__(self) -> Signature:
        """Signature from which Dask infers that it must pass the index of a block."""
        context_kwargs = [
            "block_id",
            *(["block_info"] if has_keyword(self.function, "block_info") else []),
        ]
        by_name = (Parameter(name, Parameter.KEYWORD_ONLY) for name in context_kwargs)
        return Signature([Parameter("blocks", Parameter.VAR_POSITIONAL), *by_name])

    def __call__(self, /, *blocks: Array, block_id: Index | None = None, **kwargs: Any) -> Any:
        if block_id is None:  # Dask infers the dtype
            return self.function(*blocks, **kwargs)
        if any(along[i] == 0 for along, i in zip(self.chunks, block_id, strict=True)):
            shape = np.broadcast_shapes(*(block.shape for block in blocks))
            return np.empty_like(blocks[0], dtype=self.dtype, shape=shape)
        context_kwargs = {"block_id": block_id} if self.has_block_id else {}
        return self.function(*blocks, **kwargs, **context_kwargs)
