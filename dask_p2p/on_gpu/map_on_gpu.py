"""`map_on_gpu`: streams host arrays through GPUs in parts, overlapping copies and compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from dask.array.utils import meta_from_array
from dask.layers import ArrayBlockIdDep
from dask.utils import has_keyword

from dask_p2p.backends.dlpack import checked_library, in_library
from dask_p2p.config import checked_options
from dask_p2p.engine.task import FUSABLE
from dask_p2p.graph.arrays import arrays_with_halos
from dask_p2p.graph.libraries import functions_of
from dask_p2p.on_gpu.arguments import (
    check_functions,
    checked_arrays,
    checked_axis,
    checked_dtype,
    checked_fallback,
    checked_halo,
    checked_output,
    checked_part_bytes,
    common_chunks,
    portable,
)
from dask_p2p.on_gpu.block import GpuMapFunction
from dask_p2p.on_gpu.gpu_map import Argument, GpuMap
from dask_p2p.ops.arguments import check_names
from dask_p2p.plans import GridPlan, halo_plan
from dask_p2p.plans.halo import halo_widths_of
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
    as_library: str | None = None,
    **kwargs: Any,
) -> DaskArray:
    """Map a function of CuPy arrays over the NumPy blocks of arrays.

    A task splits its block into parts along one axis, copies each part to the GPU, calls the
    function and copies the result back. For CuPy blocks the task calls the function on the whole
    block, and the result stays on the GPU.

    Parameters
    ----------
    func : callable
        Takes a part of each array, and returns an array with the output's number of axes. It may
        overwrite and return its input, but must not keep it: the memory is reused. Apart from the
        halo, its result must not depend on where blocks are split along `axis`. If it has a
        parameter ``block_id``, it receives the index of the block.
    *arrays : dask.array.Array
        Arrays of NumPy or CuPy blocks. Several arrays are broadcast, and rechunked to common chunks
        first.
    depth, boundary : optional
        Halo around each part, by axes of the output, as for `dask_p2p.map_overlap`. The halo is
        trimmed from the result of `func`.
    axis : int, optional
        Axis of the output along which blocks are split into parts. Default: the first axis, along
        which parts of C-ordered blocks are contiguous.
    part_bytes : int or str, optional
        Largest size of a part of all arrays together, including the halo. A part of one element
        along the axis may be larger. To overlap copies and the function, a block is split into
        at least eight parts if these have 16 MiB or more.
    dtype : str or numpy.dtype, optional
        dtype of the function's result. Default: found by calling `func` with empty arrays.
    meta : array, optional
        Empty array of the result's dtype, in place of `dtype`.
    chunks : tuple, optional
        Block sizes of the output if they differ from the arrays', as for `dask.array.map_blocks`.
        For each axis: one size for all blocks, or a tuple of sizes.
    reduce : callable, optional
        Combines the results of two parts into one; it may overwrite both. `func` then returns the
        part's contribution to the block's result: all axes, by default of length 1 along `axis`.
        Only the combined result is copied back. Blocks are not combined with each other.
    fallback : {None, "numpy"}, optional
        Behaviour of a worker without a GPU. None: the task raises `NoDeviceError`. "numpy": the
        task calls `func` with NumPy parts.
    as_library : {"torch", "jax"}, optional
        Library of the arrays that `func` and `reduce` receive and return, in place of CuPy arrays.
        They use the same memory, and the stream order is kept. Give `dtype` if the client lacks the
        library.
    **kwargs
        Keywords of `func`; Dask computes lazy ones first. Bind a keyword that `map_on_gpu` also
        has, such as ``axis``, with `functools.partial`.

    Returns
    -------
    dask.array.Array
        Result in the arrays' chunks (see `chunks`), with NumPy blocks for NumPy input.

    Raises
    ------
    UnsupportedArrayError
        If one of `arrays` is not a Dask array, or has a dtype that GPUs cannot compute with.
    ChunksError
        If chunk sizes are unknown, or `chunks` does not fit them.
    InputError
        If another argument is invalid, or the result's dtype cannot be found.
    MissingPackageError
        During the computation, if a worker lacks the library `as_library`.
    NoDeviceError
        During the computation, on a worker without a GPU.
    BlockMismatchError
        During the computation, if `func` returns an array of another shape or dtype.

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
    library = checked_library(as_library)
    inputs = checked_arrays(arrays)
    sizes = common_chunks(inputs)
    along = checked_axis(axis, len(sizes))
    depths, beyond = checked_halo(inputs, sizes, depth, boundary)
    has_block_id = has_keyword(func, "block_id") and "block_id" not in kwargs
    func = in_library(func, library)
    reduce = None if reduce is None else in_library(reduce, library)
    block_ids = {"block_id": (0,) * len(sizes)} if has_block_id else {}
    plans = [
        halo_plan(x.chunks, widths, kinds)
        for x, widths, kinds in zip(inputs, depths, beyond, strict=True)
    ]
    mapped = GpuMap(
        function=func,
        arguments=tuple(
            Argument(x.chunks, x.dtype, widths, halo_widths_of(plan))
            for x, widths, plan in zip(inputs, depths, plans, strict=True)
        ),
        axis=along,
        sizes=sizes,
        fallback=checked_fallback(fallback),
        part_bytes=checked_part_bytes(part_bytes),
        dtype=checked_dtype(func, inputs, meta, dtype, {**kwargs, **block_ids}),
        chunks=checked_output(chunks, sizes, along, reduce is not None),
        reduce=reduce,
        has_block_id=has_block_id,
        options=options,
    )
    register_if_possible()
    return _mapped_by_dask(mapped, inputs, plans, kwargs)


def _mapped_by_dask(
    mapped: GpuMap,
    inputs: Sequence[DaskArray],
    plans: Sequence[GridPlan],  # of the inputs' halos
    kwargs: Mapping[str, Any],
) -> DaskArray:
    """Return the array whose tasks call the function for blocks with halos."""
    with_halo = arrays_with_halos(inputs, plans, mapped.options)
    # As `da.map_blocks`, which for array-expr loses the name of a function with `block_id`.
    axes = tuple(range(len(mapped.sizes)))
    made: DaskArray = functions_of(inputs[0]).blockwise(
        GpuMapFunction(mapped),
        axes,
        ArrayBlockIdDep(mapped.chunks),
        axes,
        *chain(*((x, axes[len(axes) - x.ndim :]) for x in with_halo)),
        token=FUSABLE,
        adjust_chunks=dict(zip(axes, mapped.chunks, strict=True)),
        align_arrays=False,
        concatenate=True,
        meta=meta_from_array(inputs[0]._meta, len(axes), mapped.dtype),
        keywords=kwargs,
    )
    return made
