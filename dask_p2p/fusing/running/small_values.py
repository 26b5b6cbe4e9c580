"""Numbers and small arrays in the header of a message, such as the parts of a sum.

Their pickles take up to 20 us, since they contain dtypes. A pickle of text and bytes takes 1 us.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_MOST_BYTES = 2**8
_NUMBERS = {bool, int, float, complex}
# Dtypes of native byte order without metadata: a process has one object of each.
_DTYPES: dict[str, Any] = {each: np.dtype(each) for each in "?bBhHiIlLqQefdFD"}


def packed_small(value: Any) -> Any:
    """Return a value in a form that is pickled quickly; None for other values than small ones."""
    kind = type(value)
    if kind in _NUMBERS:
        return value
    is_array = kind is np.ndarray
    if not is_array and not isinstance(value, np.generic):
        return None
    dtype = value.dtype
    is_plain = dtype.char in _DTYPES and dtype is _DTYPES[dtype.char]
    if not is_plain or value.nbytes > _MOST_BYTES:
        return None
    if not is_array:
        return (dtype.char, None, value.tobytes()) if kind is dtype.type else None
    return (dtype.char, value.shape, value.tobytes()) if value.flags.c_contiguous else None


def unpacked_small(packed: Any) -> Any:
    """Return the value that `packed_small` has packed."""
    if type(packed) is not tuple:
        return packed
    char, shape, data = packed
    if shape is None:
        return np.frombuffer(data, _DTYPES[char])[0]
    return np.ndarray(shape, _DTYPES[char], bytearray(data))
