"""Who writes to unfinished outputs in this process, so that an output is removed after the last.

A task that is cancelled runs on, and Zarr writes chunks in threads of its own, which go on after
the first error: neither knows that the folder they write to is about to be removed, and would make
it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from dask_p2p.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["stop_writers", "writing"]

_TIMEOUT_S = 30
_POLL_S = 0.05

_lock = threading.Lock()
_writers: Counter[str] = Counter()  # by output
_stopped: set[str] = set()  # outputs that are given up; each has a name of its own


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Count as a writer of an output.

    Parameters
    ----------
    path : str
        The output's path for the time being.

    Raises
    ------
    FileError
        If the output was given up.
    """
    with _lock:
        if path in _stopped:
            raise FileError(f"{path} is not written any more: the transpose failed or was stopped")
        _writers[path] += 1
    try:
        yield
    finally:
        with _lock:
            _writers[path] -= 1


async def stop_writers(path: str) -> None:
    """Let nobody in this process begin to write to an output, and wait until nobody does."""
    with _lock:
        _stopped.add(path)
    deadline_s = time.monotonic() + _TIMEOUT_S
    while _writers[path] and time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)
