"""Operations that combine the values of ranks: sums, extremes and their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.types import Array

_UFUNCS: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "any": np.logical_or,
    "all": np.logical_and,
}
_EXTREMES: dict[str, Any] = {"maxloc": np.argmax, "minloc": np.argmin}
_OPS = (*_UFUNCS, *_EXTREMES)


def check_op(op: Any) -> None:
    """Refuse an unknown operation: `InputError`."""
    if not isinstance(op, str) or op not in _OPS:
        raise InputError(
            f"op: expected one of {', '.join(_OPS)}, got {op!r}. Give one of these, or "
            f"combine the values that ctx.allgather(value) returns."
        )


def is_elementwise(op: str) -> bool:
    """Return whether an operation combines two arrays to one of the same dtype."""
    return op in _UFUNCS


def prepared(own: Array, op: str) -> Array:
    """Return an array with the dtype of the result, which `combined` needs.

    Raises `InputError` if the operation cannot combine the dtype.
    """
    try:
        if op in _EXTREMES:
            if own.dtype.kind in "biufmM":
                return own
            raise TypeError
        return own.astype(_UFUNCS[op].reduce(np.ones(1, own.dtype)).dtype, copy=False)
    except TypeError:
        raise InputError(
            f"value: expected a dtype that {op!r} combines, got {own.dtype}."
        ) from None


def combined(given: Sequence[Array], op: str, out: Array | None = None) -> Any:
    """Combine arrays of the same shape and dtype, in their order; into `out` if that is given.

    "maxloc" and "minloc" return a tuple: the extremes, and their positions in `given`.
    """
    if op in _EXTREMES:
        stacked = np.stack(given)
        found = _EXTREMES[op](stacked, axis=0)
        values = np.take_along_axis(stacked, found[np.newaxis], axis=0)[0]
        return values[()], found
    first, *others = given
    total = first.copy() if out is None else out
    for number, other in enumerate(others):
        _UFUNCS[op](total if number else first, other, out=total)
    return total[()]
