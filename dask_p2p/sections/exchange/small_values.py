"""Small values as bytes: numbers and arrays that lie in the header of a message.

A message of a few bytes takes about as long as the calls that make it. So the values that are most
frequent are made here with few calls, into the same bytes as by `values`.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.exchange.values import decoded, encoded, plain_array
from dask_p2p.sections.wire.messages.format import (
    HEADER,
    MOST_INLINE_BYTES,
    VALUE,
    inline_format,
    inline_start,
)
from dask_p2p.types import DType

_KINDS = "biufc"


class _Number:
    """A type of Python's numbers as bytes."""

    def __init__(self, example: Any, elements: str) -> None:
        self.description = encoded(example, HOST).description
        self._length = len(self.description)
        self._header = inline_format(self._length, elements)
        self._value = struct.Struct(f"<{elements}")

    def header(self, value: Any, tag: int, communicator: int) -> bytes | None:
        given = tag, 0, VALUE, communicator, self._length, self.description, value
        try:
            return self._header.pack(*given)
        except struct.error:  # too large
            return None

    def unpack(self, data: bytes) -> Any:
        return self._value.unpack_from(data)[0]


_NUMBERS = {bool: _Number(False, "?"), int: _Number(0, "q"), float: _Number(0.0, "d")}
_BY_DESCRIPTION = {number.description: number for number in _NUMBERS.values()}


def small_header(value: Any, tag: int, communicator: int) -> bytes | None:
    """Return the header of a message with a value; None for other values than small ones."""
    kind = type(value)
    if (number := _NUMBERS.get(kind)) is not None:
        return number.header(value, tag, communicator)
    if kind is not np.ndarray or not value.flags.c_contiguous:
        return None
    start = _array_start(value.dtype, value.shape, tag, communicator)
    return None if start is None else (start + value.tobytes()).ljust(HEADER.size, b"\0")


@lru_cache(1024)
def _array_start(dtype: DType, shape: tuple[int, ...], tag: int, communicator: int) -> bytes | None:
    """Return the start of the header, before the elements; None if they do not fit in it."""
    if dtype.kind not in _KINDS or prod(shape) * dtype.itemsize > MOST_INLINE_BYTES:
        return None
    description, (data,) = encoded(np.empty(shape, dtype), HOST)
    if len(description) + len(data) > MOST_INLINE_BYTES:
        return None
    return inline_start(tag, communicator, description)


def decoded_small(description: bytes, data: bytes, out: Any, device: Host) -> Any:
    """Return a value from its description and bytes: `out`, if that is an array like it."""
    if (number := _BY_DESCRIPTION.get(description)) is not None:
        return number.unpack(data)
    if (like := plain_array(description)) is None:
        return decoded(description, data, device)
    dtype, shape = like
    if type(out) is np.ndarray and out.dtype == dtype and out.shape == shape:
        out[...] = np.ndarray(shape, dtype, data)
        return out
    return np.ndarray(shape, dtype, bytearray(data))
