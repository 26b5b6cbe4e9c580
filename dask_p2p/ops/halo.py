"""Checks of halo arguments: the widths, and the values beyond the array's ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index as as_int
from typing import Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.plans.halo import BOUNDARIES, ODD
from dask_p2p.types import DType

#: Boundaries by their names in `numpy.pad`.
_OF_NUMPY = {"wrap": "periodic", "symmetric": "reflect", "edge": "nearest"}


def checked_depths(
    depth: Any, shapes: Sequence[tuple[int, ...]]
) -> list[tuple[tuple[int, int], ...]]:
    """Return the halo widths before and after a block: for each array, one pair for each axis.

    Raises `InputError` for invalid widths, and for widths larger than the array.
    """
    each = []
    for shape, given in _each_array("depth", depth, shapes, 0):
        widths = tuple(map(_width, given))
        for axis, (width, length) in enumerate(zip(widths, shape, strict=True)):
            if max(width) > length:
                raise InputError(
                    f"expected a halo no wider than the array, got depth={depth!r} for an axis of "
                    f"length {length} (axis {axis}). Pass a smaller depth."
                )
        each.append(widths)
    return each


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
    """Return the boundaries: for each array, one for each axis.

    Raises `InputError` for an invalid boundary, and for a number that `dtype` cannot hold.
    """
    given = _each_array("boundary", boundary, shapes, "none")
    kind_of = _sides if in_section else _boundary
    found = [tuple(map(kind_of, kinds)) for _, kinds in given]
    of_axes = (each for kinds in found for each in kinds)
    of_ends = (end for each in of_axes for end in (each if isinstance(each, tuple) else (each,)))
    for value in of_ends:
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
    return found


def _holds(dtype: DType, value: Any) -> bool:
    """Return whether the dtype can hold a number exactly; NumPy's rules decide for other values."""
    own = np.asarray(value)
    if dtype.kind in "biu" and own.dtype.kind in "biuf":
        with np.errstate(all="ignore"):
            return bool(own.astype(dtype) == own)
    return dtype.kind not in "biufc" or bool(np.can_cast(own.dtype, dtype, "same_kind"))


def _sides(given: Any) -> Any:
    """Return the boundary of an axis: one for both ends, or a pair."""
    if not isinstance(given, tuple) or len(given) != 2:
        return _end(given)
    ends = tuple(map(_end, given))
    if "periodic" in [end for end in ends if isinstance(end, str)] and ends[0] != ends[1]:
        raise InputError(
            f"expected 'periodic' at both ends of an axis or at none, got {given!r}. An end has "
            f"the elements of the other end then."
        )
    return ends[0] if ends[0] == ends[1] else ends


def _end(given: Any) -> Any:
    """Return the boundary at an end of the array of a section."""
    if callable(given) or (isinstance(given, str) and given == ODD):
        return given
    return _boundary(given, f", {ODD!r}, a function of (rim, inside, at),")


def _boundary(kind: Any, others: str = ",") -> Any:
    known = _OF_NUMPY.get(kind, kind) if isinstance(kind, str) else kind
    if known not in BOUNDARIES if isinstance(known, str) else not np.isscalar(known):
        also = ", ".join(f"{theirs} for {ours}" for theirs, ours in _OF_NUMPY.items())
        raise InputError(
            f"expected a boundary out of {', '.join(BOUNDARIES)} (also NumPy's names: {also})"
            f"{others} or a number, got {kind!r}."
        )
    return known


def _each_array(
    name: str, value: Any, shapes: Sequence[tuple[int, ...]], default: Any
) -> list[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Return the shape of each array, with a value for each of its axes.

    A list has one entry for each array. Any other value applies to all arrays, which share their
    first axes, as in Dask.
    """
    if isinstance(value, list):
        if len(value) != len(shapes):
            raise InputError(
                f"expected a list with one {name} for each of {len(shapes)} arrays, got "
                f"{name}={value!r}."
            )
        return [
            (shape, _by_axis(name, each, len(shape), default))
            for shape, each in zip(shapes, value, strict=True)
        ]
    by_axis = _by_axis(name, value, max(map(len, shapes)), default)
    return [(shape, by_axis[: len(shape)]) for shape in shapes]


def _by_axis(name: str, value: Any, ndim: int, default: Any) -> tuple[Any, ...]:
    """Return a value for each axis, from one value, a tuple or a dict by axis."""
    if isinstance(value, Mapping):
        axes = {axis: value[axis] for axis in value if axis in range(-ndim, ndim)}
        given = {axis % ndim: default if of is None else of for axis, of in axes.items()}
        if len(given) == len(value):
            return tuple(given.get(axis, default) for axis in range(ndim))
        for axis in value:
            if axis not in axes:
                raise InputError(
                    f"{name}: expected axes from 0 to {ndim - 1}, got the axis {axis!r} in "
                    f"{value!r}. Give axes of the array."
                )
    elif not isinstance(value, (tuple, list)):
        return (default if value is None else value,) * ndim
    elif len(value) == ndim:
        return tuple(default if of is None else of for of in value)
    raise InputError(
        f"expected one {name} for all of {ndim} axes, a tuple with one for each, or a dict by "
        f"axis, got {name}={value!r}."
    )
