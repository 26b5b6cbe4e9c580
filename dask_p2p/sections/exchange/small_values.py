"""Small values as bytes: numbers and arrays that lie in the header of a message.

A message of a few bytes takes about as long as the calls that make it. So the values that are most
frequent are made here with few calls, into the same bytes as by `values`.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import numpy as np

from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.exchange.values import decoded, encoded, plain_array
from dask_p2p.sections.wire.messages.format import MOST_INLINE_BYTES
from dask_p2p.types import DType

_KINDS = "biufc"


class _Number:
    """A type of Python's numbers as bytes."""

    def __init__(self, example: Any, elements: str) -> None:
        self.description, self._struct = (
            encoded(example, HOST).description,
            struct.Struct(elements),
        )

    def pack(self, value: Any) -> bytes | None:
        try:
            return self._struct.pack(value)
        except struct.error:  # too large
            return None

    def unpack(self, data: bytes) -> Any:
        return self._struct.unpack_from(data)[0]


_NUMBERS = {bool: _Number(False, "?"), int: _Number(0, "<q"), float: _Number(0.0, "<d")}
_BY_DESCRIPTION = {number.description: number for number in _NUMBERS.values()}


def encoded_small(value: Any) -> tuple[bytes, bytes] | None:
    """Return the description and the bytes of a value; None for other values than small ones."""
    kind = type(value)
    if kind is np.ndarray:
        if value.nbytes > MOST_INLINE_BYTES or not value.flags.c_contiguous:
            return None
        description = _description(value.dtype, value.shape)
        data = value.tobytes()
    elif (number := _NUMBERS.get(kind)) is not None:
        description, data = number.description, number.pack(value)
    else:
        return None
    if description is None or data is None or len(description) + len(data) > MOST_INLINE_BYTES:
        return None
    return description, data


@lru_cache(1024)
def _description(dtype: DType, shape: tuple[int, ...]) -> bytes | None:
    return encoded(np.empty(shape, dtype), HOST).description if dtype.kind in _KINDS else None


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
