"""Forms of numbers and small arrays, such as the parts of a sum, that are pickled quickly.

A header of a superstep's message is one pickle of all its values. Pickles of arrays take up to
20 us, since they contain dtypes. A pickle of text and bytes takes 1 us. Messages of `ctx.send` hold
one value each, as bytes without a pickle: see `sections.exchange.small_values`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_MOST_BYTES = 2**8
_NUMBERS = {bool, int, float, complex}
# Dtypes of native byte order without metadata: a process has one object of each.
_DTYPES: dict[str, Any] = {each: np.dtype(each) for each in "?bBhHiIlLqQefdFD"}


def quick_form(value: Any) -> Any:
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


def from_quick_form(form: Any) -> Any:
    """Return the value of a form."""
    if type(form) is not tuple:
        return form
    char, shape, data = form
    if shape is None:
        return np.frombuffer(data, _DTYPES[char])[0]
    return np.ndarray(shape, _DTYPES[char], bytearray(data))
