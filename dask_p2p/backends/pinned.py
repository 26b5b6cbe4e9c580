"""Host memory that a GPU's copy engines reach themselves: pinned, also *registered*.

Other memory the driver copies through memory of its own, and the caller waits for that.
"""

from __future__ import annotations

import mmap
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from dask_p2p.backends.device import device_work
from dask_p2p.backends.first_touch import touch_by_threads
from dask_p2p.errors import P2PWarning

CANNOT_PIN = "host memory cannot be pinned"
REMEDY = (
    "Copies to and from its GPU go through other memory, and are slower. See what the system and "
    "the container allow: ulimit -l, and memory limits."
)
_PORTABLE_AND_MAPPED = 3  # cudaHostRegister's flags: for all GPUs of the process, and kernels


class Pinned:
    """Memory of this process that is pinned until it goes. NumPy asks it where that is.

    It is a mapping of its own: pages are pinned, which others must not have a part in.
    """

    def __init__(self, size_bytes: int) -> None:
        pages = mmap.mmap(-1, max(1, size_bytes))
        with suppress(OSError):  # as NumPy asks for; not all systems have huge pages
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
    """Return whether an array lies in memory that this package has pinned for as long as it is."""
    return any(isinstance(getattr(b, "memory", b), Pinned) for b in bases(array))


def registered(array: np.ndarray[Any, Any]) -> Callable[[], None] | None:
    """Pin the memory of an array where it is; return what ends that. None if it cannot be pinned.

    It cannot if it is pinned already: as long as somebody else says, or by memory that it has a
    page in common with.
    """
    import cupy

    try:
        return register(array)
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


_warned: set[tuple[str, str]] = set()


def warn_once(
    warn: Callable[[str], None] | None,
    where: str,
    what: str,
    cause: str,
    remedy: str = REMEDY,
) -> None:
    """Tell what a worker lacks, once in this process. By default it is a Python warning."""
    if (where, what) not in _warned:
        _warned.add((where, what))
        text = f"dask_p2p: {where}: {what} ({cause}). {remedy}"
        if warn is None:
            warnings.warn(text, P2PWarning, stacklevel=2)
        else:
            warn(text)


def pin_while(owner: Any, memory: np.ndarray[Any, Any]) -> None:
    """Pin memory until its owner goes."""
    unpin = register(memory)
    _start()
    weakref.finalize(owner, _leaving.put, (unpin, memory)).atexit = False


def register(array: np.ndarray[Any, Any]) -> Callable[[], None]:
    """Pin the memory of an array; return what ends that."""
    import cupy

    runtime = cupy.cuda.runtime
    low, high = np.lib.array_utils.byte_bounds(array)
    runtime.hostRegister(low, high - low, _PORTABLE_AND_MAPPED)
    return partial(runtime.hostUnregister, low)


# Memory to be unpinned, which takes 16 ms a GB, wherever the last reference to it goes: perhaps on
# an event loop, or in a garbage collection, which may interrupt whoever holds a lock.
_leaving: SimpleQueue[tuple[Callable[[], None], Any]] = SimpleQueue()


@cache
def _start() -> None:
    threading.Thread(target=_unpin, name="p2p-unpin", daemon=True).start()


def _unpin() -> None:
    while True:
        unpin, memory = _leaving.get()
        with suppress(Exception), device_work():  # of a GPU that is lost, for one
            unpin()
        del unpin, memory


def bases(array: Any) -> Iterator[Any]:
    """Yield an array, and one after another what has the memory of the one before."""
    while array is not None:
        yield array
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
