"""Functions of a local block whose results depend on the division of the array into blocks.

Results for halves of a block differ from those for the whole block, as of ``u - u.mean()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import cloudpickle
import numpy as np

from dask_p2p.errors import P2PWarning
from dask_p2p.geometry import Box, box_shape, box_slices, cut_box
from dask_p2p.replayable import is_isolated, is_replayable
from dask_p2p.types import Array

#: Calls of a function that are compared, until one shows something: a field of zeros shows nothing.
_MOST_CALLS = 8
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


class Comparison:
    """Compares the first calls of a function for a part of an array with calls for its halves.

    Parameters
    ----------
    name
        Name of the function in warnings.
    function
        Function that is compared, if its code shows that another call changes nothing.
    whole
        Bounds of the part. They begin at zero.
    is_divided
        By axis, whether its elements are divided between ranks.
    part, remedy
        Name of the part, and a sentence with another way, for warnings.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        whole: Box,
        is_divided: Sequence[bool],
        part: str,
        remedy: str,
    ) -> None:
        self._name, self._function, self._whole = name, function, whole
        self._halves = [box for pair in halves(whole, is_divided) for box in pair]
        self._part, self._remedy = part, remedy
        self._left = _MOST_CALLS if self._halves else 0

    def __bool__(self) -> bool:
        """Return whether the next call is compared."""
        return self._left > 0

    def __call__(
        self,
        module: Any,
        computed: Callable[[Callable[..., Any], Box], Array],
        read: Array | None = None,
    ) -> None:
        """Warn if the function returns other values for halves than for the whole.

        Parameters
        ----------
        module
            Module of the arrays.
        computed
            Returns the values of a function for a box.
        read
            Array that the function reads, by default its values: if it is uniform, the next call is
            compared, too.
        """
        left, self._left = self._left - 1, 0
        if (copies := copies_of(self._function)) is None:
            return
        is_same = True
        with suppress(Exception):  # of a function for parts of this size alone
            values = computed(copies(), self._whole)
            is_same = all(
                are_close(module, computed(copies(), box), values[box_slices(box)])
                for box in self._halves
            )
            if is_same and is_uniform(values if read is None else read):
                self._left = left
        if not is_same:
            warn_of_division(self._name, self._part, self._remedy)


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
