"""`map_on_gpu`: arrays in host memory through GPUs, part by part, copies beside the function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.layers import ArrayBlockIdDep
from dask.utils import has_keyword

from dask_p2p.config import checked_options, positive_bytes
from dask_p2p.engine.part_work import PartsFunction
from dask_p2p.engine.parts import OPERATION, Argument, Mapped
from dask_p2p.errors import InputError
from dask_p2p.graph.arrays import planned_array
from dask_p2p.ops.arguments import check_names
from dask_p2p.ops.parts_arguments import (
    check_functions,
    checked_arrays,
    checked_axis,
    checked_output,
    checked_rims,
    common_chunks,
    found_dtype,
    portable,
)
from dask_p2p.plans import halo_plan
from dask_p2p.plans.halo import rims_of
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.types import Array, BoundaryLike, ChunksLike, DaskArray, DepthLike, DTypeLike


def map_on_gpu(
    func: Callable[..., Any],
    /,
    *arrays: DaskArray,
    depth: DepthLike | None = None,
    boundary: BoundaryLike | None = None,
    axis: int | None = None,
    part_bytes: int | str = "64 MiB",
    dtype: DTypeLike | None = None,
    meta: Array | None = None,
    chunks: ChunksLike = None,
    reduce: Callable[[Any, Any], Any] | None = None,
    fallback: str | None = None,
    **kwargs: Any,
) -> DaskArray:
    """Map a function of CuPy arrays over the NumPy blocks of arrays.

    Each block is cut in parts along one axis. Parts are copied to the GPU, go through the function
    and are copied back. Blocks that are CuPy's already go through the function as they are, and
    stay on the GPU.

    Parameters
    ----------
    func : callable
        Takes a part of each array, and returns an array with as many axes as the output. It may
        overwrite what it gets, and return that, but not keep it: the memory is used again. What it
        makes of a part must not depend on where blocks are cut along `axis`, but for the rims. With
        a parameter ``block_id`` it is told the index of the block.
    *arrays : dask.array.Array
        Of NumPy blocks, or of CuPy ones. Several are broadcast, and cut in the same places first.
    depth, boundary : optional
        Rims around each part, as `dask_p2p.map_overlap` takes them; by axes of the output. They are
        cut off what `func` returns.
    axis : int, optional
        Of the output, along which blocks are cut into parts. By default the first one, along which
        parts of C-ordered blocks are contiguous.
    part_bytes : int or str, optional
        What a part of all arrays takes together, rims included, at most: unless one element along
        the axis takes more. Blocks are cut into eight parts at least, as long as these take 16 MiB:
        copies and the function overlap then.
    dtype : str or numpy.dtype, optional
        Of what `func` returns. By default it is found out by calling it with an empty array.
    meta : array, optional
        An array of that dtype, in its place.
    chunks : tuple, optional
        Sizes of the output's blocks where they differ from those of the arrays, as
        `dask.array.map_blocks` takes them: for each axis one for all blocks, or one for each.
    reduce : callable, optional
        Makes one result of those of two parts, which it may overwrite. Then `func` makes of a part
        what goes into the result of the block: as many axes, by default of length 1 along `axis`.
        Only the result of the last part is copied back. Blocks are not combined with each other.
    fallback : {None, "numpy"}, optional
        What a worker without a GPU does. By default the task fails, and says so. "numpy": `func` is
        called with NumPy parts.
    **kwargs
        Passed on to `func`; what Dask has still to compute among them is computed first. Give it a
        keyword that `map_on_gpu` has too, such as ``axis``, by `functools.partial`.

    Returns
    -------
    dask.array.Array
        In the blocks of the arrays, NumPy's if these are.

    Raises
    ------
    UnsupportedArrayError
        If one of `arrays` is no Dask array, or its elements are nothing that a GPU computes with.
    ChunksError
        If chunk sizes are unknown, or `chunks` does not go with them.
    InputError
        If another argument is not of the kind above, or the dtype cannot be found out.
    NoDeviceError
        When it runs, on a worker without a GPU.
    BlockMismatchError
        When it runs, if `func` returns something else than it should.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.arange(6, chunks=3)
    >>> y = map_on_gpu(lambda a: 2 * a + 1, x, fallback="numpy")
    >>> y.compute(scheduler="sync")
    array([ 1,  3,  5,  7,  9, 11])
    >>> sums = map_on_gpu(
    ...     lambda a: a.sum(keepdims=True), x, reduce=lambda a, b: a + b, fallback="numpy"
    ... )
    >>> sums.compute(scheduler="sync")
    array([ 3, 12])
    """
    check_names(func, len(arrays), map_on_gpu, locals())
    options = checked_options()
    check_functions(func, reduce)
    func, reduce = portable(func), portable(reduce)
    inputs = checked_arrays(arrays)
    sizes = common_chunks(inputs)
    along = checked_axis(axis, len(sizes))
    depths, beyond = checked_rims(inputs, sizes, depth, boundary)
    if fallback not in (None, "numpy"):
        raise InputError(
            f"expected fallback=None, or 'numpy' to call the function with NumPy arrays where "
            f"there is no GPU, got {fallback!r}."
        )
    try:
        most_bytes = positive_bytes(part_bytes)
    except ValueError as exc:
        raise InputError(f"{exc}, got part_bytes={part_bytes!r}.") from None
    has_block_id = has_keyword(func, "block_id") and "block_id" not in kwargs
    if meta is not None:
        if not hasattr(meta, "dtype") or not hasattr(meta, "shape"):
            raise InputError(f"expected an empty array, like blocks of the output, got {meta=}.")
        dtype = meta.dtype
    elif dtype is None:
        told = {"block_id": (0,) * len(sizes)} if has_block_id else {}
        dtype = found_dtype(partial(func, **kwargs, **told), inputs)
    plans = [
        halo_plan(x.chunks, widths, kinds)
        for x, widths, kinds in zip(inputs, depths, beyond, strict=True)
    ]
    mapped = Mapped(
        func,
        tuple(
            Argument(x.chunks, x.dtype, widths, rims_of(plan))
            for x, widths, plan in zip(inputs, depths, plans, strict=True)
        ),
        along,
        sizes,
        checked_output(chunks, sizes, along, reduce is not None),
        np.dtype(dtype),
        most_bytes,
        reduce,
        fallback,
        has_block_id,
        options,
    )
    register_if_possible()
    with_rims = [
        x if plan.chunks == x.chunks else planned_array("p2p-overlap", x, plan, options)
        for x, plan in zip(inputs, plans, strict=True)
    ]
    # As `da.map_blocks`, which for array-expr does not keep the name of a function that is told the
    # index of its block.
    places = tuple(range(len(sizes)))
    return da.blockwise(
        PartsFunction(mapped),
        places,
        ArrayBlockIdDep(mapped.chunks),
        places,
        *chain(*((x, places[len(sizes) - x.ndim :]) for x in with_rims)),
        token=OPERATION,
        adjust_chunks=dict(zip(places, mapped.chunks, strict=True)),
        align_arrays=False,
        concatenate=True,
        meta=meta_from_array(inputs[0]._meta, len(sizes), mapped.dtype),
        keywords=kwargs,
    )
