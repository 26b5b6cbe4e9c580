"""The packed arrays of a message, which its receiver takes one after the other.

They are in the message, or in the memory of the sender. There the receiver reads a part of them at
a time, so that it never holds a second copy of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from dask_p2p import tuning
from dask_p2p.geometry import round_up
from dask_p2p.types import Array, DType

_ALIGNMENT_BYTES = 16  # of the arrays in a message


class PackedArrays:
    """Packed arrays, in their order.

    Parameters
    ----------
    message
        The arrays' bytes, if they are in the message.
    size_bytes
        Otherwise their size.
    read
        Otherwise the function that reads bytes of the sender. Its arguments are a position and a
        number of bytes.
    """

    def __init__(
        self,
        message: memoryview,
        size_bytes: int = 0,
        read: Callable[[int, int], memoryview] | None = None,
    ) -> None:
        self._part: memoryview | None = message
        self._start, self._stop = 0, len(message) if read is None else 0  # position of the part
        self._size_bytes, self._read = size_bytes, read
        self._next = 0  # position after the arrays that are taken

    def take(self, shape: Sequence[int], dtype: DType) -> Array:
        """Return the next array, which is not empty. It is valid until the next call."""
        start = aligned(self._next)
        self._next = stop = start + prod(shape) * dtype.itemsize
        if self._read is not None and stop > self._stop:
            self._part = None  # before the next one takes memory
            least_bytes = tuning.current.packed_part_bytes
            self._start, self._stop = start, min(max(stop, start + least_bytes), self._size_bytes)
            self._part = self._read(start, self._stop - start)
        return array_at(self._part, start - self._start, shape, dtype)


def aligned(position: int) -> int:
    """Return the position of an array in a message, at or after this one."""
    return round_up(position, _ALIGNMENT_BYTES)


def array_at(memory: Any, start: int, shape: Sequence[int], dtype: DType) -> Array:
    """Return the array at a position of a message."""
    return np.frombuffer(memory, dtype, prod(shape), start).reshape(shape)
