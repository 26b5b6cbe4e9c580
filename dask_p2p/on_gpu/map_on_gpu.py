"""`map_on_gpu`: streams host arrays through GPUs in parts, overlapping copies and compute."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from operator import index as as_int
from typing import Any

import numpy as np
from dask.array.utils import meta_from_array
from dask.layers import ArrayBlockIdDep
from dask.utils import funcname, has_keyword

from dask_p2p.backends import backend_for
from dask_p2p.backends.device import gpu_obstacle
from dask_p2p.backends.dlpack import checked_library, wrap_in_library
from dask_p2p.config import checked_options, parse_positive_bytes
from dask_p2p.engine.task import FUSABLE
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.geometry import Chunks
from dask_p2p.graph import arrays_with_halos, check_one_library, functions_of
from dask_p2p.inputs import as_integer
from dask_p2p.on_gpu.block import Argument, GpuMap, GpuMapFunction
from dask_p2p.ops.arguments import (
    check_function,
    check_known_array,
    check_names,
    checked_boundaries,
    checked_depths,
)
from dask_p2p.ops.rechunk import align_chunks
from dask_p2p.plans import GridPlan, plan_halo
from dask_p2p.plans.halo import halo_widths_of
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.types import Array, BoundaryLike, ChunksLike, DaskArray, DepthLike, DType, DTypeLike


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
        Behaviour of a worker without a GPU. None: the task raises `ConfigError`. "numpy": the
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
    InputError
        If chunk sizes are unknown, or `chunks` does not fit them.
        Also if another argument is invalid, or the result's dtype cannot be found.
    ConfigError
        During the computation, on a worker without a GPU or the library `as_library`.
    BlockMismatchError
        During the computation, if `func` returns an array of another shape or dtype.

    See Also
    --------
    map_overlap : The same for whole blocks where they are.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.arange(6, chunks=3)
    >>> y = map_on_gpu(lambda a: 2 * a + 1, x, fallback="numpy")
    >>> y.compute(scheduler="sync")
    array([ 1,  3,  5,  7,  9, 11])
    >>> options = {"reduce": lambda a, b: a + b, "fallback": "numpy"}
    >>> sums = map_on_gpu(lambda a: a.sum(keepdims=True), x, **options)
    >>> sums.compute(scheduler="sync")
    array([ 3, 12])
    """
    check_names(func, len(arrays), map_on_gpu, locals())
    options = checked_options()
    check_functions(func, reduce)
    func, reduce = make_portable(func), make_portable(reduce)
    library = checked_library(as_library)
    inputs = checked_arrays(arrays)
    sizes = common_chunks(inputs)
    along = 0 if axis is None else as_integer(axis, len(sizes))
    if not -len(sizes) <= along < len(sizes):
        raise InputError(f"expected one of the {len(sizes)} axes of the output, got axis={axis!r}.")
    along %= len(sizes)
    if fallback not in (None, "numpy"):
        raise InputError(
            f"expected fallback=None, or 'numpy' to call the function with NumPy arrays on workers "
            f"without a GPU, got {fallback!r}."
        )
    try:
        most_part_bytes = parse_positive_bytes(part_bytes)
    except ValueError as exc:
        raise InputError(f"{exc}, got part_bytes={part_bytes!r}.") from None
    depths, beyond = checked_halo(inputs, sizes, depth, boundary)
    has_block_id = has_keyword(func, "block_id") and "block_id" not in kwargs
    func = wrap_in_library(func, library)
    reduce = None if reduce is None else wrap_in_library(reduce, library)
    block_ids = {"block_id": (0,) * len(sizes)} if has_block_id else {}
    plans = [
        plan_halo(x.chunks, widths, kinds)
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
        fallback=fallback,
        part_bytes=most_part_bytes,
        dtype=checked_dtype(func, inputs, meta, dtype, {**kwargs, **block_ids}),
        chunks=checked_output(chunks, sizes, along, reduce is not None),
        reduce=reduce,
        has_block_id=has_block_id,
        options=options,
    )
    register_if_possible()
    return _map_by_dask(mapped, inputs, plans, kwargs)


def _map_by_dask(
    mapped: GpuMap,
    inputs: Sequence[DaskArray],
    plans: Sequence[GridPlan],  # of the inputs' halos
    kwargs: Mapping[str, Any],
) -> DaskArray:
    """Return the array whose tasks call the function for blocks with halos."""
    with_halo = arrays_with_halos(inputs, plans, mapped.options)
    # As `da.map_blocks`, which for array-expr loses the name of a function with `block_id`.
    axes = tuple(range(len(mapped.sizes)))
    output: DaskArray = functions_of(inputs[0]).blockwise(
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
    return output


def check_functions(func: Any, reduce: Any) -> None:
    """Raise `InputError` if `func` or `reduce` is not callable."""
    check_function(func, "a part", "map_on_gpu(func, x)")
    if reduce is not None and not callable(reduce):
        raise InputError(f"expected a function of two parts' results, got reduce={reduce!r}.")


def make_portable(function: Any) -> Any:
    """Return NumPy's ufunc in place of CuPy's, which cannot be pickled; others unchanged.

    NumPy's ufunc calls CuPy's for CuPy arrays. Raises `InputError` if NumPy has none of that name.
    """
    if type(function).__name__ != "ufunc" or not type(function).__module__.startswith("cupy"):
        return function
    name = function.name.removeprefix("cupy_")
    if not isinstance(ufunc := getattr(np, name, None), np.ufunc):
        raise InputError(
            f"expected a function that can be pickled, got CuPy's ufunc {function.name}. Wrap "
            f"it in a function: lambda a: ...(a)."
        )
    return ufunc


def checked_arrays(arrays: tuple[Any, ...]) -> list[DaskArray]:
    """Return the arrays with common chunks.

    Raises `UnsupportedArrayError` for dtypes that GPUs lack or blocks of several libraries,
    `InputError` for unknown chunks, or if no array has an axis.
    """
    if not arrays:
        raise InputError("expected an array after the function. Call map_on_gpu(func, x).")
    for x in arrays:
        check_known_array(x)
        if x.dtype.hasobject or not x.dtype.isnative:
            raise UnsupportedArrayError(
                f"expected a dtype that GPUs compute with, got {x.dtype!r}. Convert it with "
                f"x.astype(...)."
            )
    check_one_library(arrays)
    kinds = {backend_for(x._meta).name for x in arrays}
    if len(kinds) > 1:
        raise UnsupportedArrayError(
            f"expected arrays of one library, got blocks of {' and '.join(sorted(kinds))}. Convert "
            f"them to one library, such as by map_blocks(cupy.asarray)."
        )
    inputs = list(arrays) if len(arrays) == 1 else align_chunks(arrays)
    if not max(x.ndim for x in inputs):
        raise InputError(
            "expected an array with at least one axis, got one without axes. Add one: x[None]."
        )
    return inputs


def common_chunks(inputs: list[DaskArray]) -> Chunks:
    """Return the chunks of the broadcast arrays.

    Along each axis they are those of the first array whose length is not 1.
    """
    ndim = max(x.ndim for x in inputs)
    common = []
    for axis in range(-ndim, 0):
        along = [x.chunks[axis] for x in inputs if x.ndim >= -axis]
        longest = next((sizes for sizes in along if sum(sizes) != 1), along[0])
        common.append(tuple(map(int, longest)))
    return tuple(common)


def checked_halo(
    inputs: list[DaskArray], sizes: Chunks, depth: Any, boundary: Any
) -> tuple[list[tuple[tuple[int, int], ...]], list[tuple[Any, ...]]]:
    """Return the halo widths and the boundaries: for each array, one for each of its axes.

    A list has one entry for each array; any other value applies to the axes of the output.
    """
    shape = tuple(map(sum, sizes))
    shapes = [shape[len(shape) - x.ndim :] for x in inputs]

    def of_each(checked: Callable[..., list[tuple[Any, ...]]], argument: Any) -> list[Any]:
        if isinstance(argument, list):
            return checked(argument, shapes)
        (widths,) = checked(argument, [shape])
        return [widths[len(shape) - x.ndim :] for x in inputs]

    depths = [
        tuple(
            (0, 0) if n == 1 != length else width
            for n, length, width in zip(x.shape, lengths, widths, strict=True)
        )
        for x, lengths, widths in zip(inputs, shapes, of_each(checked_depths, depth), strict=True)
    ]
    return depths, of_each(checked_boundaries, boundary)


def checked_output(chunks: Any, sizes: Chunks, axis: int, is_reduced: bool) -> Chunks:
    """Return the chunks of the output."""
    ones = tuple((1,) * len(s) if a == axis and is_reduced else s for a, s in enumerate(sizes))
    if chunks is None:
        return ones
    try:
        pairs = zip(chunks, sizes, strict=True)
        block_sizes = tuple(
            tuple(map(as_int, n if isinstance(n, (tuple, list)) else (n,) * len(along)))
            for n, along in pairs
        )
    except (TypeError, ValueError):
        block_sizes = ()
    if tuple(map(len, block_sizes)) != tuple(map(len, sizes)):
        raise InputError(
            f"expected one entry for each of {len(sizes)} axes, a size for all output blocks or a "
            f"tuple of sizes for {tuple(map(len, sizes))} blocks, got chunks={chunks!r}."
        )
    if not is_reduced and block_sizes[axis] != sizes[axis]:
        raise InputError(
            f"expected output blocks of the arrays' sizes {sizes[axis]} along axis {axis}, which "
            f"is split into parts, got {block_sizes[axis]}. Split along another axis with axis=, "
            f"or pass reduce=."
        )
    return block_sizes


def checked_dtype(
    func: Callable[..., Any],
    inputs: list[DaskArray],
    meta: Any,
    dtype: Any,
    keywords: Mapping[str, Any],  # of the function
) -> DType:
    """Return the dtype of the function's result: a given one, or that of a call."""
    if meta is not None:
        if not hasattr(meta, "dtype") or not hasattr(meta, "shape"):
            raise InputError(f"expected an empty array, like blocks of the output, got {meta=}.")
        dtype = meta.dtype
    elif dtype is None:
        return _infer_dtype(partial(func, **keywords), inputs)
    checked: DType = np.dtype(dtype)
    return checked


def _infer_dtype(func: Callable[..., Any], inputs: list[DaskArray]) -> DType:
    """Return the dtype of the function's result, found by calls with small arrays.

    The calls pass empty arrays first, then arrays of one element. Raises `InputError` if all fail.
    """
    modules: list[Any] = [np]
    if gpu_obstacle() is None:
        import cupy

        modules.insert(0, cupy)
    errors = []
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for module, length in product(modules, (0, 1)):
            try:
                result = func(*(module.ones((length,) * x.ndim, x.dtype) for x in inputs))
                dtype: DType = np.dtype(result.dtype)
                return dtype
            except Exception as exc:  # a user's function may raise anything for small arrays
                errors.append(f"{type(exc).__name__}: {exc}")
    name = funcname(func)
    raise InputError(
        f"expected dtype=, since the dtype of the result of {name} cannot be determined: called "
        f"with small {modules[-1].__name__} arrays, it raised {errors[-1]}."
    )
