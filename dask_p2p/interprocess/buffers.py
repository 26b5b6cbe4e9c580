"""Reused buffers for regions in transit, in host or device memory.

New memory is expensive if another library writes it. Host pages fault at their first touch. On a
GPU, kernels that were queued by its previous owner may still write a pool's memory, and a library
without streams would have to wait for the whole device.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from math import prod
from typing import Any

import numpy as np

from dask_p2p.backends import backend_named
from dask_p2p.backends.device import current_device
from dask_p2p.types import Array, DTypeLike, Kind

_GRANULE_BYTES = 2**9  # least size; sizes are powers of two, so that few differ


def buffer_bytes(nbytes: int) -> int:
    """Return the size of the buffer for an array of `nbytes`.

    >>> buffer_bytes(70_000), buffer_bytes(1)
    (131072, 512)
    """
    return max(_GRANULE_BYTES, 1 << max(0, nbytes - 1).bit_length())


class Buffers:
    """A pool of buffers, of the kind "numpy" or "cupy", with a limit of idle bytes.

    A buffer is taken as an array, and returns to the pool when the array and all its views are
    freed. Drop the last view only after all work with it, kernels included.
    """

    def __init__(self, kind: Kind, idle_bytes: int) -> None:
        self.kind = kind
        self.idle_limit_bytes = idle_bytes
        self._idle: defaultdict[tuple[int | None, int], deque[Any]]
        self._idle = defaultdict(deque)  # by device and size

    @property
    def idle_bytes(self) -> int:
        """Bytes of idle buffers."""
        return sum(size * len(kept) for (_, size), kept in list(self._idle.items()))

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a C-ordered array with undefined values."""
        dtype = np.dtype(dtype)
        _, lent = self.lend(prod(shape) * dtype.itemsize)
        return lent.view(dtype).reshape(shape)

    def lend(self, nbytes: int) -> tuple[Any, Array]:
        """Return a buffer, and its bytes, which are lent until all views of them are freed."""
        size_bytes = self.size_of(nbytes)
        device = current_device() if backend_named(self.kind).on_device else None
        try:
            memory = self._idle[device, size_bytes].pop()
        except IndexError:
            memory = self._allocate(size_bytes)
        owner = _Owner(memory)
        weakref.finalize(owner, self.put_back, size_bytes, memory).atexit = False
        return memory, backend_named(self.kind).bytes_of(memory, size_bytes, owner)[:nbytes]

    def size_of(self, nbytes: int) -> int:
        """Return the size of the buffer for an array of `nbytes`."""
        return buffer_bytes(nbytes)

    def _allocate(self, size_bytes: int) -> Any:
        try:
            return allocate(self.kind, size_bytes)
        except MemoryError:
            if not self.idle_bytes:
                raise
        self.clear()  # free idle buffers before an error
        return allocate(self.kind, size_bytes)

    def clear(self) -> None:
        """Free all idle buffers."""
        self._idle.clear()

    def put_back(self, size_bytes: int, memory: Any) -> None:
        # No locks here: the last view may be freed anywhere, also during a garbage collection. Two
        # concurrent calls may keep one buffer too many.
        if self.idle_bytes + size_bytes <= self.idle_limit_bytes:
            device = getattr(memory, "device_id", None)
            self._idle[device, size_bytes].append(memory)


class _Owner:
    """The owner of a lent buffer, which its views keep alive: its end returns the memory.

    It has NumPy's array interface.
    """

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self.memory.__array_interface__
        return interface


def allocate(kind: Kind, size_bytes: int) -> Any:
    """Return new memory of a kind."""
    return backend_named(kind).allocate(size_bytes)
