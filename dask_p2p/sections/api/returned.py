"""Checks of the arrays and values that the function of a section returns."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_p2p.backends.plain import check_plain
from dask_p2p.errors import BlockMismatchError
from dask_p2p.sections.exchange.values import as_numbers
from dask_p2p.types import DType


def shape_of(name: str, array: Any, kind: Any = np.ndarray) -> tuple[int, ...] | str:
    """Return the shape of a returned value, or its type if it is no array.

    Raises `UnsupportedArrayError` if the array is more than its elements.
    """
    check_plain(name, array)
    if isinstance(array, (kind, np.generic)):
        shape: tuple[int, ...] = array.shape
        return shape
    module = "" if kind is np.ndarray else f"{type(array).__module__}."  # perhaps NumPy's own
    return f"{module}{type(array).__name__}"


def becomes(found: DType, dtype: DType, converts: bool) -> bool:
    """Return whether a returned dtype may be converted to the declared one.

    Without `converts`, as without a dtype from the caller, floats may only change their precision.
    """
    if converts or found.kind == dtype.kind in "fc":
        return np.can_cast(found, dtype, "same_kind")
    return found.kind == dtype.kind and np.can_cast(found, dtype, "safe")


def holds(dtype: DType, own: Any) -> bool:
    """Return whether a dtype holds the values of an array, apart from the precision of floats."""
    if not np.can_cast(own.dtype, dtype, "same_kind"):
        return False
    return dtype.kind not in "biu" or bool((own.astype(dtype) == own).all())


def checked_array(
    ctx: Any, value: Any, name: str, shape: tuple[Any, ...], dtype: Any, converts: bool = True
) -> Any:
    """Return a returned array of a shape, where None is any length."""
    found = shape_of(name, value, ctx.device.module.ndarray)
    lengths = found if isinstance(found, tuple) else (-1,)
    wanted = len(lengths) == len(shape) and all(
        length in (None, own) for length, own in zip(shape, lengths, strict=True)
    )
    if not wanted or isinstance(found, str):
        text = str(shape).replace("None", "any number")
        raise BlockMismatchError(
            f"{name}: expected an array of shape {text} from the function on rank {ctx.rank}, got "
            f"{found}. Return this rank's part of the output."
        )
    if not becomes(value.dtype, dtype, converts):
        raise BlockMismatchError(
            f"{name}: expected an array that becomes {dtype} from the function on rank "
            f"{ctx.rank}, got {value.dtype}. Give the output dtype={str(value.dtype)!r}, or "
            f"convert the array, astype(...)."
        )
    return value


def checked_value(ctx: Any, value: Any, name: str, example: Any) -> Any:
    """Return a returned value that is like an example."""
    check_plain(name, value)
    own = as_numbers(ctx.device.to_host(value))
    if own.shape != example.shape or not holds(example.dtype, own):
        raise BlockMismatchError(
            f"{name}: expected a value of shape {example.shape} that becomes {example.dtype} from "
            f"the function on rank {ctx.rank}, got {own.shape} {own.dtype}."
        )
    return own.astype(example.dtype)
