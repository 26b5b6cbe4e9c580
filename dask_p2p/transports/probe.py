"""Probe blocks: known bytes that every worker can provide, to prove that a transport works.

A probe block has a key of its own form, and is made at its first request. Its content follows from
its size, so that the reader can check the bytes that arrive.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, cast

import numpy as np

from dask_p2p.backends import BACKENDS, backend_for, backend_named
from dask_p2p.errors import TransferError
from dask_p2p.types import Array, Key, Kind

PROBE_BYTES = 2**16  # large enough for a rendezvous of UCX
PROBE_DTYPE = np.dtype("u1")
_MOST_OF_MEMORY = 1 / 32  # upper bound of a probe block, as a fraction of the memory
_NAME = "dask-p2p-probe"
_KEPT = 3  # one block for probing routes, two for measuring links


#: Key of a probe block: a name, the kind "numpy" or "cupy", and the size in bytes.
_Key = tuple[str, str, int]


def probe_key(kind: Kind, nbytes: int = PROBE_BYTES) -> _Key:
    """Return the key of a probe block: a 1-D array of this many bytes."""
    return (_NAME, kind, nbytes)


def most_probe_bytes(kind: Kind, memory_bytes: int | None) -> int:
    """Return the size of the largest probe block of a worker with this memory limit, if any.

    Sizes are powers of two. All probe blocks together take at most twice the largest size.
    """
    most_bytes = backend_named(kind).most_probe_bytes
    if memory_bytes is not None:
        most_bytes = max(PROBE_BYTES, min(most_bytes, int(memory_bytes * _MOST_OF_MEMORY)))
    return int(2 ** (most_bytes.bit_length() - 1))


def is_probe(key: Key) -> bool:
    """Return whether this is the key of a probe block."""
    return isinstance(key, (tuple, list)) and len(key) == 3 and key[0] == _NAME


class Probes:
    """The probe blocks of one worker."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[_Key, Any] = OrderedDict()
        self._lock = threading.Lock()

    def block(self, key: Key, memory_bytes: int | None = None) -> Any:
        """Return a probe block of a worker with this memory limit, if any.

        Raises `ValueError` if the key is invalid, or the block would be too large.
        """
        _, kind, nbytes = cast(tuple[Any, ...], key)
        if kind not in tuple(BACKENDS):  # a tuple, as `kind` may be unhashable
            raise ValueError(f"expected a probe block of {', '.join(BACKENDS)}, got {key!r}")
        most_bytes = most_probe_bytes(kind, memory_bytes)
        if type(nbytes) is not int or nbytes.bit_count() != 1 or not 0 < nbytes <= most_bytes:
            raise ValueError(
                f"expected a probe block of a power of two, at most {most_bytes} bytes, got {key!r}"
            )
        key = probe_key(kind, nbytes)
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = _content(kind, nbytes)
                while len(self._blocks) > _KEPT:
                    self._blocks.popitem(last=False)
            return self._blocks[key]

    def clear(self) -> list[_Key]:
        """Drop all probe blocks, and return their keys."""
        with self._lock:
            keys = list(self._blocks)
            self._blocks.clear()
        return keys


# This code does not compute with CuPy, which would compile a kernel for each operation. The first
# transpose on a machine would wait for the compiler.


def _content(kind: Kind, nbytes: int) -> Any:
    pattern = _pattern(nbytes)
    backend = backend_named(kind)
    if not backend.on_device:
        return pattern
    queue = backend.queue()
    block = queue.scratch(pattern.shape, pattern.dtype)
    queue.permute_and_drop(block, pattern, (0,))
    queue.synchronize()
    return block


def _pattern(nbytes: int) -> np.ndarray[Any, Any]:
    """Return bytes whose period is no power of two, so that a shifted copy is detected."""
    return np.resize(np.arange(251, dtype=PROBE_DTYPE), nbytes)


def check_probe(region: Array, start: int = 0) -> None:
    """Raise `TransferError` unless a region has the bytes of a probe block from `start` on.

    The region may lie in the holder's memory. A kernel then reads it, as kernels read blocks: a
    copy engine's success would prove too little.
    """
    if not isinstance(region, np.ndarray):
        queue = backend_for(region).queue()
        reversed_copy = queue.scratch(region.shape, region.dtype)
        queue.permute(reversed_copy, region[::-1], (0,))  # unreversed, a copy engine would do it
        region = queue.to_host(reversed_copy)[::-1]
    wrong = int((region != _pattern(start + region.shape[0])[start:]).sum())
    if wrong:
        raise TransferError(f"{wrong} of {region.shape[0]} bytes of a probe arrived changed")
