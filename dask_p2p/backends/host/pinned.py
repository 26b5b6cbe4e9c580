"""Pinned (*registered*) host memory, which a GPU's copy engines access directly.

The driver copies other host memory through its own pinned memory, and the caller waits for it.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from dask_p2p.backends.device import device_work
from dask_p2p.backends.host.first_touch import touch_by_threads

CANNOT_PIN = "host memory cannot be pinned"
REMEDY = (
    "Copies to and from its GPU go through other memory, and are slower. Check the limits of the "
    "system and the container: ulimit -l, and memory limits."
)
_PORTABLE_AND_MAPPED = 3  # flags of cudaHostRegister: for all GPUs of the process, and kernels


class Pinned:
    """Memory of this process that is pinned until it is freed, with NumPy's array interface.

    It is a mapping of its own, because whole pages are pinned, which no other memory may share.
    """

    def __init__(self, size_bytes: int) -> None:
        pages = mmap.mmap(-1, max(1, size_bytes))
        with suppress(OSError):  # as NumPy does; not all systems have huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(pages, np.uint8)
        touch_by_threads(self.bytes)
        self.nbytes = size_bytes
        pin_while(self, self.bytes)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self.bytes.__array_interface__
        return interface


def is_pinned(array: Any) -> bool:
    """Return true if an array lies in memory that this package has pinned for its lifetime."""
    return any(isinstance(getattr(b, "memory", b), Pinned) for b in bases(array))


def registered(array: np.ndarray[Any, Any]) -> Callable[[], None] | None:
    """Pin an array's memory in place; return the function that unpins it, or None on failure.

    Memory cannot be pinned if it, or another part of one of its pages, is pinned already.
    """
    import cupy

    try:
        return register(array)
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


_warned: set[tuple[str, str]] = set()


def warn_once(
    warn: Callable[[str], None],
    where: str,
    problem: str,
    cause: str,
    remedy: str = REMEDY,
) -> None:
    """Warn of a worker's problem once in this process."""
    if (where, problem) not in _warned:
        _warned.add((where, problem))
        warn(f"dask_p2p: {where}: {problem} ({cause}). {remedy}")


def pin_while(owner: Any, memory: np.ndarray[Any, Any]) -> None:
    """Pin memory until its owner is freed."""
    unpin = register(memory)
    _start()
    weakref.finalize(owner, _leaving.put, (unpin, memory)).atexit = False


def register(array: np.ndarray[Any, Any]) -> Callable[[], None]:
    """Pin the memory of an array; return the function that unpins it."""
    import cupy

    runtime = cupy.cuda.runtime
    low, high = np.lib.array_utils.byte_bounds(array)
    runtime.hostRegister(low, high - low, _PORTABLE_AND_MAPPED)
    return partial(runtime.hostUnregister, low)


# Memory to unpin, which takes 16 ms a GB. A thread does it, because the last reference may be
# dropped on an event loop, or in a garbage collection that interrupts the holder of a lock.
_leaving: SimpleQueue[tuple[Callable[[], None], Any]] = SimpleQueue()


@cache
def _start() -> None:
    threading.Thread(target=_unpin, name="p2p-unpin", daemon=True).start()


def _unpin() -> None:
    while True:
        unpin, memory = _leaving.get()
        with suppress(Exception), device_work():  # for example, the GPU is lost
            unpin()
        del unpin, memory


def bases(array: Any) -> Iterator[Any]:
    """Yield an array and the chain of objects that own its memory."""
    while array is not None:
        yield array
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
