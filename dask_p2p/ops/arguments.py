"""Checks of users' arguments: arrays, axes and chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from operator import index as as_int
from typing import Any

import numpy as np
from dask.array.core import normalize_chunks
from dask.array.rechunk import _balance_chunksizes

from dask_p2p.backends import backend_for
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.geometry import Chunks, normalize_axes
from dask_p2p.graph import is_dask_array
from dask_p2p.inputs import describe_function
from dask_p2p.plans.halo import BOUNDARIES, ODD, both_ends
from dask_p2p.types import ChunksLike, DaskArray, DType

# Instructions for making a Dask array, by package and class.
_REMEDIES = {
    "xarray.DataArray": "Pass x.data; if that is in memory, x.chunk(...).data",
    "xarray.Variable": "Pass x.data; if that is in memory, x.chunk(...).data",
    "xarray.Dataset": "Pass the array of one of its variables, x[name].data",
    "dask.Delayed": "Make one with dask.array.from_delayed(x, shape=..., dtype=...)",
    "dask.FrameBase": "Make one with x.to_dask_array(lengths=True)",
    "dask.Item": "Make one with dask.array.from_delayed(x.to_delayed(), shape=..., dtype=...)",
    "dask.Bag": (
        "Make one with dask.array.from_delayed of each of x.to_delayed(), and "
        "dask.array.concatenate"
    ),
    "builtins.dict": "Pass one of its arrays, x[name]",
    "builtins.tuple": "Pass one of its arrays, x[0]",
    "dask_p2p.Handle": "Pass run.array(x), of the resident gang",
    "pint.Quantity": "Pass x.magnitude, and give the result the units x.units",
}
_REMEDY = "Make one with dask.array.from_array(x, chunks=...)"
#: Accepted forms of `chunks`.
CHUNKS_REMEDY = (
    "Pass a size like 1000 or '128 MiB', a tuple with one for each axis like (1000, -1), or a dict "
    "by axis like {0: 1000}."
)
#: Keywords of `dask.array.map_overlap`, and of `dask.array.map_blocks`.
_OF_DASK = {"align_arrays", "allow_rechunk", "boundary", "depth", "trim"} | {
    "chunks", "drop_axis", "dtype", "enforce_ndim", "meta", "name", "new_axis", "token",
}  # fmt: skip
_NAMES = "For names of dimensions see dask_p2p.xarray."


def check_function(func: Any, argument: str, call: str) -> None:
    """Raise `InputError` if `func` is not callable; `call` is the example in its message."""
    if not callable(func):
        raise InputError(
            f"expected a function of {argument}, got {func!r:.200}. Pass the function first and "
            f"the arrays after it: {call}."
        )


def check_names(
    func: Callable[..., Any],
    count: int,  # number of leading parameters, which receive arrays
    operation: Callable[..., Any],
    arguments: Mapping[str, Any],  # the operation's arguments, by name
) -> None:
    """Raise `InputError` for a keyword that both the operation and the function take.

    Keywords of `dask.array.map_overlap` go to the operation, as with Dask. A keyword that equals
    the operation's default may have been omitted, so it is accepted.
    """
    try:
        parameters = list(signature(func).parameters.values())[count:]
    except (TypeError, ValueError):
        return  # functions of extension modules may have no signature
    keywords = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if isinstance(func, partial):
        keywords -= func.keywords.keys()
    for name, parameter in signature(operation).parameters.items():
        default = parameter.default
        is_given = default is not parameter.empty and arguments[name] is not default
        if is_given and name in keywords - _OF_DASK:
            raise InputError(
                f"expected an unambiguous keyword, got {name}={arguments[name]!r:.80}, which "
                f"{operation.__name__} and {describe_function(func)} both take. Bind the "
                f"function's own one with functools.partial(func, {name}=...)."
            )


def check_array(x: DaskArray) -> None:
    """Raise `UnsupportedArrayError` unless `x` is a Dask array whose blocks are plain memory."""
    if not is_dask_array(x):
        names = (f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(x).__mro__)
        remedy = next((_REMEDIES[name] for name in names if name in _REMEDIES), _REMEDY)
        raise UnsupportedArrayError(
            f"expected a Dask array, got {type(x).__module__}.{type(x).__qualname__}. {remedy}."
        )
    backend = backend_for(x._meta)
    if x.dtype.hasobject and not backend.holds_objects:
        raise UnsupportedArrayError(
            f"expected a dtype that GPU memory can hold, got {x.dtype}. Convert it with "
            f"x.astype(...), or keep the array in NumPy blocks."
        )


def has_unknown_chunks(x: DaskArray) -> bool:
    """Return whether `x` has unknown chunk sizes along any axis."""
    return any(size != size for sizes in x.chunks for size in sizes)  # nan


def check_chunks_are_known(x: DaskArray) -> None:
    """Raise `InputError` if `x` has unknown chunk sizes: no plan can be made for it."""
    if has_unknown_chunks(x):
        raise InputError(
            f"expected known chunk sizes, got {x.chunks}. Call x.compute_chunk_sizes() first."
        )


def check_known_array(x: DaskArray) -> None:
    """Raise the errors of `check_array`, or `InputError` if `x` has unknown chunk sizes."""
    check_array(x)
    check_chunks_are_known(x)


def checked_axes(axes: Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return a permutation of `ndim` axes without negative numbers; None reverses the axes."""
    order = normalize_axes(axes, ndim)
    if order is None:
        raise InputError(
            f"expected a permutation of the {ndim} axes of the array, "
            f"{tuple(range(ndim))} in any order, got axes={axes!r}. {_NAMES}"
        )
    return order


def checked_chunks(
    chunks: ChunksLike,  # the user's argument
    before: Chunks,  # the input's chunks
    dtype: DType,  # the input's dtype
    balance: bool = False,  # see `dask.array.rechunk`
    block_size_limit: int | None = None,
) -> Chunks:
    """Return the sizes of all blocks for `chunks` in any form that `dask.array.rechunk` takes."""
    shape = tuple(map(sum, before))
    try:
        axis_chunks = _chunks_by_axis(chunks, before)
        result = normalize_chunks(
            axis_chunks, shape, limit=block_size_limit, dtype=dtype, previous_chunks=before
        )
        if balance:
            result = tuple(_balance_chunksizes(along) if sum(along) else along for along in result)
        sizes = tuple(tuple(map(int, axis_sizes)) for axis_sizes in result)
        if tuple(map(sum, sizes)) != shape:
            raise ValueError("their sums differ from the shape")
        if min(map(min, sizes), default=0) < 0:
            raise ValueError("block sizes must not be negative")
    except Exception as exc:  # Dask does not document the errors for invalid chunks
        # Dask repeats the chunks and the shape.
        reason = str(exc).partition("\n")[0].partition(" Got chunks=")[0].rstrip(".")
        raise InputError(
            f"expected chunks for an array of shape {shape}, as dask.array.rechunk takes them, got "
            f"chunks={chunks!r}: {reason}. {CHUNKS_REMEDY}"
        ) from exc
    return sizes


def _chunks_by_axis(chunks: Any, before: Chunks) -> Any:
    """Return `chunks` as one value for each axis; values after the last axis are ignored."""
    ndim = len(before)
    if isinstance(chunks, (int, float, np.number, str)):
        chunks = (chunks,) * ndim
    elif isinstance(chunks, Mapping):
        for axis in chunks:
            if not isinstance(axis, (int, np.integer)) or not -ndim <= axis < ndim:
                raise ValueError(
                    f"{axis!r} is not an axis: axes are numbered from 0 to {ndim - 1}. {_NAMES}"
                )
        chunks_by_axis = {axis % ndim: value for axis, value in chunks.items()}
        chunks = tuple(chunks_by_axis.get(axis) for axis in range(ndim))
    if not isinstance(chunks, (tuple, list)) or len(chunks) < ndim:
        return chunks  # not a valid form: Dask raises the error
    chunks = chunks[:ndim]
    for size, sizes in zip(chunks, before, strict=True):
        if isinstance(size, (int, float, np.number)) and (size < -1 or size == 0 < sum(sizes)):
            raise ValueError(f"{size} is not a valid size: pass 1 or more, or -1 for all")
    return tuple(old if new is None else new for new, old in zip(chunks, before, strict=True))


#: Boundaries by their names in `numpy.pad`.
_OF_NUMPY = {"wrap": "periodic", "symmetric": "reflect", "edge": "nearest"}


def checked_depths(
    depth: Any, shapes: Sequence[tuple[int, ...]]
) -> list[tuple[tuple[int, int], ...]]:
    """Return the halo widths before and after a block: for each array, one pair for each axis."""
    depths = []
    for shape, axis_depths in _each_array("depth", depth, shapes, 0):
        widths = tuple(map(_width, axis_depths))
        for axis, (width, length) in enumerate(zip(widths, shape, strict=True)):
            if max(width) > length:
                raise InputError(
                    f"expected a halo no wider than the array, got depth={depth!r} for an axis of "
                    f"length {length} (axis {axis}). Pass a smaller depth."
                )
        depths.append(widths)
    return depths


def _width(width: Any) -> tuple[int, int]:
    sides = width if isinstance(width, tuple) else (width, width)
    try:
        before, after = map(as_int, sides)
    except (TypeError, ValueError):
        before = after = -1
    if min(before, after) < 0:
        raise InputError(
            f"expected a halo width, got {width!r}. Pass a number of elements, at least 0, or a "
            f"pair (before, after)."
        )
    return before, after


def checked_boundaries(
    boundary: Any,
    shapes: Sequence[tuple[int, ...]],
    dtype: DType | None = None,
    in_section: bool = False,  # whether a pair for both ends, functions and `ODD` are possible
) -> list[tuple[Any, ...]]:
    """Return the boundaries: for each array, one for each axis."""
    boundaries_by_shape = _each_array("boundary", boundary, shapes, "none")
    kind_of = _sides if in_section else _boundary
    boundaries = [tuple(map(kind_of, kinds)) for _, kinds in boundaries_by_shape]
    ends = (end for along in boundaries for ends in map(both_ends, along) for end in ends)
    for value in ends:
        if value == ODD and dtype is not None and dtype.kind not in "ifcm":
            raise InputError(
                f"expected a boundary other than {ODD!r} for {dtype}, which has no negative "
                f"numbers. Pass another one, or convert the array with x.astype(...)."
            )
        if isinstance(value, str) or callable(value):
            continue
        if dtype is not None and not _holds(dtype, value):
            raise InputError(
                f"expected a boundary that {dtype} can hold, got {value!r}. Pass another one, or "
                f"convert the array with x.astype(...)."
            )
    return boundaries


def _holds(dtype: DType, value: Any) -> bool:
    """Return whether the dtype can hold a number exactly; NumPy's rules decide for other values."""
    number = np.asarray(value)
    if dtype.kind in "biu" and number.dtype.kind in "biuf":
        with np.errstate(all="ignore"):
            return bool(number.astype(dtype) == number)
    return dtype.kind not in "biufc" or bool(np.can_cast(number.dtype, dtype, "same_kind"))


def _sides(boundary: Any) -> Any:
    if not isinstance(boundary, tuple) or len(boundary) != 2:
        return _end(boundary)
    ends = tuple(map(_end, boundary))
    if "periodic" in [end for end in ends if isinstance(end, str)] and ends[0] != ends[1]:
        raise InputError(
            f"expected 'periodic' at both ends of an axis or at none, got {boundary!r}. An end has "
            f"the elements of the other end then."
        )
    return ends[0] if ends[0] == ends[1] else ends


def _end(boundary: Any) -> Any:
    if callable(boundary) or (isinstance(boundary, str) and boundary == ODD):
        return boundary
    return _boundary(boundary, f", {ODD!r}, a function of (rim, inside, at),")


def _boundary(kind: Any, alternatives: str = ",") -> Any:
    boundary = _OF_NUMPY.get(kind, kind) if isinstance(kind, str) else kind
    if boundary not in BOUNDARIES if isinstance(boundary, str) else not np.isscalar(boundary):
        also = ", ".join(f"{numpy_name} for {name}" for numpy_name, name in _OF_NUMPY.items())
        raise InputError(
            f"expected a boundary out of {', '.join(BOUNDARIES)} (also NumPy's names: {also})"
            f"{alternatives} or a number, got {kind!r}."
        )
    return boundary


def _each_array(
    name: str, value: Any, shapes: Sequence[tuple[int, ...]], default: Any
) -> list[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Return the shape of each array, with a value for each axis; a list has one for each array."""
    if isinstance(value, list):
        if len(value) != len(shapes):
            raise InputError(
                f"expected a list with one {name} for each of {len(shapes)} arrays, got "
                f"{name}={value!r}."
            )
        return [
            (shape, _values_by_axis(name, array_value, len(shape), default))
            for shape, array_value in zip(shapes, value, strict=True)
        ]
    by_axis = _values_by_axis(name, value, max(map(len, shapes)), default)
    return [(shape, by_axis[: len(shape)]) for shape in shapes]


def _values_by_axis(name: str, value: Any, ndim: int, default: Any) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        axes = {axis: value[axis] for axis in value if axis in range(-ndim, ndim)}
        values = {axis % ndim: default if n is None else n for axis, n in axes.items()}
        if len(values) == len(value):
            return tuple(values.get(axis, default) for axis in range(ndim))
        for axis in value:
            if axis not in axes:
                raise InputError(
                    f"{name}: expected axes from 0 to {ndim - 1}, got the axis {axis!r} in "
                    f"{value!r}. Give axes of the array."
                )
    elif not isinstance(value, (tuple, list)):
        return (default if value is None else value,) * ndim
    elif len(value) == ndim:
        return tuple(default if axis_value is None else axis_value for axis_value in value)
    raise InputError(
        f"expected one {name} for all of {ndim} axes, a tuple with one for each, or a dict by "
        f"axis, got {name}={value!r}."
    )
