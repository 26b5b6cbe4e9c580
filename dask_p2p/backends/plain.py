"""Arrays that are no more than their elements, which a copy of these is equal to.

Other arrays have a mask, a unit or operators of their own: masked arrays and matrices of NumPy, and
quantities of astropy and pint. Ranks, messages and buffers have the elements alone. So values of
users that they take are checked here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_p2p.errors import UnsupportedArrayError

#: Classes whose arrays have the operators of plain ones.
PLAIN = np.ndarray, np.memmap, np.recarray
#: Packages whose arrays are plain or lazy.
_PLAIN_OF = {"cupy", "cupyx", "dask", "dask_array", "dask_p2p"}


def is_plain(value: Any) -> bool:
    """Return whether a value is a plain array of NumPy or CuPy, or a value of another kind.

    Such kinds are numbers, lists and lazy arrays, and arrays whose class NumPy's functions drop.
    """
    kind = type(value)
    if kind in PLAIN or not hasattr(kind, "__array_function__"):
        return True
    return kind.__module__.partition(".")[0] in _PLAIN_OF


def check_plain(name: str, value: Any) -> None:
    """Refuse an array whose mask, unit or operators would be lost: `UnsupportedArrayError`."""
    if is_plain(value):
        return
    kind = type(value)
    if isinstance(value, np.ma.MaskedArray):
        raise UnsupportedArrayError(
            f"{name}: expected a plain array or a number, got {kind.__name__}, whose mask "
            f"would be lost. Fill it first, np.ma.filled(...)."
        )
    raise UnsupportedArrayError(
        f"{name}: expected a plain array or a number, got {kind.__module__}.{kind.__name__}, "
        f"whose unit or operators would be lost. Convert it first, np.asarray(...)."
    )
