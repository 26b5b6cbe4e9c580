"""Small values as bytes: numbers and arrays whose messages fit in a slot.

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
    header_before,
    inline_format,
    inline_start,
)
from dask_p2p.sections.wire.messages.slots import MOST_BYTES
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


def small_frame(value: Any, tag: int, communicator: int) -> bytes | None:
    """Return the bytes of a message with a value; None for other values than small ones."""
    kind = type(value)
    if (number := _NUMBERS.get(kind)) is not None:
        return number.header(value, tag, communicator)
    if kind is not np.ndarray:
        return None
    around = _around(value.dtype, value.shape, tag, communicator)
    if around is None:
        return None
    try:
        return b"".join((around[0], value, around[1]))
    except (TypeError, BufferError):  # in another order of memory
        return None


@lru_cache(1024)
def _around(
    dtype: DType, shape: tuple[int, ...], tag: int, communicator: int
) -> tuple[bytes, bytes] | None:
    """Return a message's bytes before and after the elements; None if they do not fit in a slot."""
    size_bytes = prod(shape) * dtype.itemsize
    if dtype.kind not in _KINDS or size_bytes > MOST_BYTES:
        return None
    description, _ = encoded(np.empty(shape, dtype), HOST)
    if len(description) > MOST_INLINE_BYTES:
        return None
    if len(description) + size_bytes > MOST_INLINE_BYTES:
        return header_before(tag, communicator, description, size_bytes), b""
    start = inline_start(tag, communicator, description)
    return start, bytes(HEADER.size - len(start) - size_bytes)


class LastOut:
    """The array that the last message filled: a loop of messages mostly fills it again.

    It is one that has its own memory, as a view would keep the memory of a large array.
    """

    def __init__(self) -> None:
        self._out: Any = None
        self._tag, self._begun, self._where = -1, b"", slice(0)
        self._memory = memoryview(bytearray())

    def fill(self, out: Any, tag: int, frame: bytes) -> bool:
        """Fill the array if it is `out`, and was filled with such a message; return whether."""
        if out is not self._out or tag != self._tag or not frame.startswith(self._begun):
            return False
        self._memory[:] = frame[self._where]
        return True

    def set(self, out: Any, tag: int, frame: bytes, at: int) -> None:
        """Take an array, which was filled from the bytes of a message from `at` on."""
        if out.base is None and out.flags.c_contiguous and out.size:
            self._out, self._tag, self._begun = out, tag, frame[:at]
            self._where = slice(at, at + out.nbytes)
            self._memory = memoryview(out.reshape(-1).view(np.uint8))


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
