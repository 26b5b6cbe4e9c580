"""Checks of what users say to `map_on_gpu`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from operator import index as as_int
from typing import Any

import numpy as np
from dask.utils import funcname

from dask_p2p.backends import backend_for
from dask_p2p.backends.device import gpu_obstacle
from dask_p2p.errors import ChunksError, InputError, UnsupportedArrayError
from dask_p2p.geometry import Chunks
from dask_p2p.ops.arguments import check_array, check_chunks_are_known, check_function
from dask_p2p.ops.overlap import aligned
from dask_p2p.ops.rims import checked_boundaries, checked_depths
from dask_p2p.types import DaskArray, DType


def check_functions(func: Any, reduce: Any) -> None:
    """Raise `InputError` if these are no functions."""
    check_function(func, "a part", "map_on_gpu(func, x)")
    if reduce is not None and not callable(reduce):
        raise InputError(f"expected a function of two results of parts, got reduce={reduce!r}.")


def portable(function: Any) -> Any:
    """Return NumPy's ufunc for one of CuPy's, which cannot be pickled: it calls that of its arrays.

    `InputError` if NumPy has none of its name.
    """
    if type(function).__name__ != "ufunc" or not type(function).__module__.startswith("cupy"):
        return function
    name = function.name.removeprefix("cupy_")
    if not isinstance(found := getattr(np, name, None), np.ufunc):
        raise InputError(
            f"expected a function that can be pickled, got CuPy's ufunc {function.name}. Wrap "
            f"it in one: lambda a: ...(a)."
        )
    return found


def checked_arrays(arrays: tuple[Any, ...]) -> list[DaskArray]:
    """Return arrays of one library, cut in the same places; raise an error that says what else."""
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
    kinds = {backend_for(x._meta).name for x in arrays}
    if len(kinds) > 1:
        raise UnsupportedArrayError(
            f"expected arrays of one library, got blocks of {' and '.join(sorted(kinds))}. Convert "
            f"some: map_blocks(cupy.asarray)."
        )
    inputs = list(arrays) if len(arrays) == 1 else aligned(arrays)
    if not max(x.ndim for x in inputs):
        raise InputError("expected an array that can be cut, got one without axes. Give it one.")
    return inputs


def common_chunks(inputs: list[DaskArray]) -> Chunks:
    """Return the chunks of all arrays together: along each axis of the first that is not 1 long."""
    ndim = max(x.ndim for x in inputs)
    common = []
    for axis in range(-ndim, 0):
        along = [x.chunks[axis] for x in inputs if x.ndim >= -axis]
        longest = next((sizes for sizes in along if sum(sizes) != 1), along[0])
        common.append(tuple(map(int, longest)))
    return tuple(common)


def checked_rims(
    inputs: list[DaskArray], sizes: Chunks, depth: Any, boundary: Any
) -> tuple[list[tuple[tuple[int, int], ...]], list[tuple[Any, ...]]]:
    """Return for each array, and each of its axes, the widths of rims, and what is beyond ends.

    What is not given for each array is given for the axes of the output.
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
    """Return the number of an axis, by default of the first one."""
    try:
        number = 0 if axis is None else as_int(axis)
    except TypeError:
        number = ndim
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
            f"expected for each of {len(sizes)} axes the size of all blocks of the output, or a "
            f"tuple with one for each of {tuple(map(len, sizes))} blocks, got chunks={chunks!r}."
        )
    if not is_reduced and found[axis] != sizes[axis]:
        raise ChunksError(
            f"expected an output with blocks as long as those of the arrays along the axis that is "
            f"cut, {sizes[axis]}, got {found[axis]}. Cut along another one by axis=, or give "
            f"reduce=."
        )
    return found


def _sizes_of_blocks(given: Any, count: int) -> tuple[int, ...]:
    each = given if isinstance(given, (tuple, list)) else (given,) * count
    return tuple(map(as_int, each))


def found_dtype(func: Callable[..., Any], inputs: list[DaskArray]) -> DType:
    """Return the dtype of what a function makes of arrays that are empty, or hold one element."""
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
            except Exception as exc:  # whatever a function does of arrays that it is not meant for
                errors.append(f"{type(exc).__name__}: {exc}")
    name = funcname(func)
    raise InputError(
        f"expected dtype=, since the dtype of what {name} returns cannot be found out here: called "
        f"with small {modules[-1].__name__} arrays it raised {errors[-1]}."
    )
