"""Checks of the arguments of `map_on_gpu`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from operator import index as as_int
from typing import Any

import numpy as np
from dask.utils import funcname

from dask_p2p.backends import backend_for
from dask_p2p.backends.device import gpu_obstacle
from dask_p2p.config import positive_bytes
from dask_p2p.errors import ChunksError, InputError, UnsupportedArrayError
from dask_p2p.geometry import Chunks
from dask_p2p.graph.libraries import check_one_library
from dask_p2p.inputs import as_integer
from dask_p2p.ops.arguments import check_array, check_chunks_are_known, check_function
from dask_p2p.ops.halo import checked_boundaries, checked_depths
from dask_p2p.ops.rechunk import aligned
from dask_p2p.types import DaskArray, DType, Kind


def check_functions(func: Any, reduce: Any) -> None:
    """Raise `InputError` if `func` or `reduce` is not callable."""
    check_function(func, "a part", "map_on_gpu(func, x)")
    if reduce is not None and not callable(reduce):
        raise InputError(f"expected a function of two parts' results, got reduce={reduce!r}.")


def portable(function: Any) -> Any:
    """Return NumPy's ufunc in place of CuPy's, which cannot be pickled; others unchanged.

    NumPy's ufunc calls CuPy's for CuPy arrays. Raises `InputError` if NumPy has none of that name.
    """
    if type(function).__name__ != "ufunc" or not type(function).__module__.startswith("cupy"):
        return function
    name = function.name.removeprefix("cupy_")
    if not isinstance(found := getattr(np, name, None), np.ufunc):
        raise InputError(
            f"expected a function that can be pickled, got CuPy's ufunc {function.name}. Wrap "
            f"it in a function: lambda a: ...(a)."
        )
    return found


def checked_arrays(arrays: tuple[Any, ...]) -> list[DaskArray]:
    """Return the arrays with common chunks.

    Raises `UnsupportedArrayError` for dtypes that GPUs lack or blocks of several libraries,
    `ChunksError` for unknown chunks, and `InputError` if no array has an axis.
    """
    if not arrays:
        raise InputError("expected an array after the function. Call map_on_gpu(func, x).")
    for x in arrays:
        check_array(x)
        check_chunks_are_known(x)
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
    inputs = list(arrays) if len(arrays) == 1 else aligned(arrays)
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
    own = [shape[len(shape) - x.ndim :] for x in inputs]

    def of_each(checked: Callable[..., list[tuple[Any, ...]]], given: Any) -> list[Any]:
        if isinstance(given, list):
            return checked(given, own)
        (widths,) = checked(given, [shape])
        return [widths[len(shape) - x.ndim :] for x in inputs]

    depths = [
        tuple(
            (0, 0) if n == 1 != whole else width
            for n, whole, width in zip(x.shape, lengths, widths, strict=True)
        )
        for x, lengths, widths in zip(inputs, own, of_each(checked_depths, depth), strict=True)
    ]
    return depths, of_each(checked_boundaries, boundary)


def checked_axis(axis: Any, ndim: int) -> int:
    """Return the axis as a number from 0; None is the first axis."""
    number = 0 if axis is None else as_integer(axis, ndim)
    if not -ndim <= number < ndim:
        raise InputError(f"expected one of the {ndim} axes of the output, got axis={axis!r}.")
    return number % ndim


def checked_output(chunks: Any, sizes: Chunks, axis: int, is_reduced: bool) -> Chunks:
    """Return the chunks of the output."""
    ones = tuple((1,) * len(s) if a == axis and is_reduced else s for a, s in enumerate(sizes))
    if chunks is None:
        return ones
    try:
        pairs = zip(chunks, sizes, strict=True)
        found = tuple(_sizes_of_blocks(given, len(along)) for given, along in pairs)
    except (TypeError, ValueError):
        found = ()
    if tuple(map(len, found)) != tuple(map(len, sizes)):
        raise ChunksError(
            f"expected one entry for each of {len(sizes)} axes, a size for all output blocks or a "
            f"tuple of sizes for {tuple(map(len, sizes))} blocks, got chunks={chunks!r}."
        )
    if not is_reduced and found[axis] != sizes[axis]:
        raise ChunksError(
            f"expected output blocks of the arrays' sizes {sizes[axis]} along axis {axis}, which "
            f"is split into parts, got {found[axis]}. Split along another axis with axis=, or pass "
            f"reduce=."
        )
    return found


def _sizes_of_blocks(given: Any, count: int) -> tuple[int, ...]:
    each = given if isinstance(given, (tuple, list)) else (given,) * count
    return tuple(map(as_int, each))


def checked_fallback(fallback: Any) -> Kind | None:
    """Return the kind of arrays for the function on a worker without a GPU."""
    if fallback not in (None, "numpy"):
        raise InputError(
            f"expected fallback=None, or 'numpy' to call the function with NumPy arrays on workers "
            f"without a GPU, got {fallback!r}."
        )
    return None if fallback is None else "numpy"


def checked_part_bytes(part_bytes: Any) -> int:
    """Return the largest size of a part."""
    try:
        return positive_bytes(part_bytes)
    except ValueError as exc:
        raise InputError(f"{exc}, got part_bytes={part_bytes!r}.") from None


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
        return _found_dtype(partial(func, **keywords), inputs)
    checked: DType = np.dtype(dtype)
    return checked


def _found_dtype(func: Callable[..., Any], inputs: list[DaskArray]) -> DType:
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
