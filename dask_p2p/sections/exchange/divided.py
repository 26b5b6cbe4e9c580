"""Functions of a local block whose results depend on the division of the array into blocks.

Results for halves of a block differ from those for the whole block, as of ``u - u.mean()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np

from dask_p2p.errors import P2PWarning
from dask_p2p.geometry import Box, box_shape, cut_box
from dask_p2p.replayable import is_isolated, is_replayable
from dask_p2p.types import Array

#: Calls of a function that are compared, until one shows something: a field of zeros shows nothing.
MOST_CALLS = 8
_ROUNDING = 2**10  # largest difference of rounding errors, in units of the last place


def copies_of(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]] | None:
    """Return a function that returns copies for further calls, all with the present state.

    A function without a state serves all calls itself. None: further calls may change other values.
    """
    if is_replayable(function):
        return lambda: function
    try:
        if not is_isolated(function):
            return None
        pickled = cloudpickle.dumps(function)
    except Exception:  # it refers to objects without a pickle, or nested too deeply
        return None
    return lambda: cloudpickle.loads(pickled)


def halves(whole: Box, is_divided: Sequence[bool]) -> list[tuple[Box, Box]]:
    """Return the two halves of a box along each axis that is divided between ranks."""
    along = enumerate(zip(box_shape(whole), is_divided, strict=True))
    return [cut_box(whole, axis, n // 2) for axis, (n, is_cut) in along if is_cut and n > 1]


def are_close(module: Any, part: Array, whole: Array) -> bool:
    """Return whether arrays of a module differ by rounding errors only."""
    if whole.dtype.kind not in "fc":
        return bool((whole == part).all())
    tolerance = _ROUNDING * float(np.finfo(whole.dtype).eps)
    largest = float(module.nan_to_num(abs(whole)).max())
    limits = tolerance, tolerance * largest  # relative, absolute
    return bool(module.allclose(part, whole, *limits, equal_nan=True))


def is_uniform(array: Array) -> bool:
    """Return whether all elements are equal: then their mean is like each of them."""
    return not array.size or bool((array == array[(0,) * array.ndim]).all())


def warn_of_division(name: str, of_block: str, remedy: str) -> None:
    """Warn of a function of local blocks, in the client and in this worker."""
    from distributed import warn

    warn(
        f"{name} returns other values for halves of {of_block} than for the whole, so its result "
        f"depends on the number of ranks. {remedy}",
        P2PWarning,
    )
