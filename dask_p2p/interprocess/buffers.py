"""Memory that is used again and again for regions on their way, in host or device memory.

New memory is dear where another library writes to it. Pages of the host fault at their first touch.
On a GPU, what a pool hands out may still be written by kernels that were queued before its last
owner let go, and a library that follows no stream would have to wait for the whole device.
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

_GRANULE_BYTES = 2**9  # sizes are powers of two from here on, so that few differ


def buffer_bytes(nbytes: int) -> int:
    """Return the size of the buffer that an array of `nbytes` is put into.

    >>> buffer_bytes(70_000), buffer_bytes(1)
    (131072, 512)
    """
    return max(_GRANULE_BYTES, 1 << max(0, nbytes - 1).bit_length())


class Buffers:
    """A pool of buffers, of the kind "numpy" or "cupy"; so many idle bytes are kept for later.

    A buffer is taken as an array, and comes back when that array and all its views are gone. So let
    go of the last one only when all that uses it is done, kernels included.
    """

    def __init__(self, kind: Kind, idle_bytes: int) -> None:
        self.kind = kind
        self.idle_limit_bytes = idle_bytes
        self._idle: defaultdict[tuple[int | None, int], deque[Any]]
        self._idle = defaultdict(deque)  # by device and size

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept, and not in use."""
        return sum(size * len(kept) for (_, size), kept in list(self._idle.items()))

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a C-ordered array whose values are undefined."""
        dtype = np.dtype(dtype)
        _, lent = self.lend(prod(shape) * dtype.itemsize)
        return lent.view(dtype).reshape(shape)

    def lend(self, nbytes: int) -> tuple[Any, Array]:
        """Return a buffer, and bytes in it, which are lent until all views of them are gone."""
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
        """Return the size of the buffer that an array of `nbytes` is put into."""
        return buffer_bytes(nbytes)

    def _allocate(self, size_bytes: int) -> Any:
        try:
            return allocate(self.kind, size_bytes)
        except MemoryError:
            if not self.idle_bytes:
                raise
        self.clear()  # memory that nobody uses comes before an error
        return allocate(self.kind, size_bytes)

    def clear(self) -> None:
        """Drop what is not in use."""
        self._idle.clear()

    def put_back(self, size_bytes: int, memory: Any) -> None:
        # Called wherever the last view dies, perhaps in the middle of a garbage collection: no
        # locks here. Two that come at once may both stay; that is one buffer too many.
        if self.idle_bytes + size_bytes <= self.idle_limit_bytes:
            device = getattr(memory, "device_id", None)
            self._idle[device, size_bytes].append(memory)


class _Owner:
    """What the views of a lent buffer keep alive: when it dies, the memory is given back.

    NumPy asks it where the memory is.
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
