"""What several test modules need."""

from __future__ import annotations

import numpy as np


def indexed(shape, dtype=np.int64):
    """An array whose cells say where they are."""
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def bits(positions, dtype):
    """An array of any dtype whose cells' bits follow from these numbers, one for each cell."""
    dtype = np.dtype(dtype)
    if dtype.kind == "U":  # not all bits are characters
        return (positions % 1000).astype(dtype)
    number = np.asarray(positions)[..., None] * 31 + np.arange(dtype.itemsize) * 7
    raw = (number % (2 if dtype.kind == "b" else 251)).astype("u1")
    for field, start in (dtype.fields or {}).values():
        if field.kind == "b":
            raw[..., start] %= 2
    return np.ascontiguousarray(raw).view(dtype)[..., 0]
