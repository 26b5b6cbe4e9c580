"""Copies within host memory by several threads."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from dask_p2p.backends.host.permute import permute_into
from dask_p2p.backends.host.threads import pool, thread_count
from dask_p2p.geometry import box_slices, split_box, whole_box

# Threads fill slots of pinned memory. With 1, 2, 4, 8 and 12 of them, on an H200's host with 16
# cores, blocks of 256 MiB went through the GPU at 10, 17, 25, 32 and 28 GB/s, both ways together.
# Pinned in place for that time, such blocks reached 23 to 26 GB/s. Blocks of 1 GiB reached 50 GB/s
# with 8 or 12 threads, and 31 GB/s pinned in place.
_FEW_THREADS = 4
_REGISTER_FROM_BYTES = 2**24
_LEAST_COPY_BYTES = 2**20  # least size of a copy by other threads
_BYTES_EACH = 2**22  # least for each thread: a submission takes as long as a copy of half a MiB


def copy_on_host(to: np.ndarray[Any, Any], of: np.ndarray[Any, Any]) -> None:
    """Copy an array of the host, by several threads if it is large, and wait for the end."""
    begin_copy(to, of)()


def begin_copy(to: np.ndarray[Any, Any], of: np.ndarray[Any, Any]) -> Callable[[], None]:
    """Start to copy an array of the host by threads; return a function that waits for the end.

    A small array is copied before the call returns.
    """

    def copy(part: Any) -> None:
        permute_into(to[part], of[part], range(of.ndim))

    if of.nbytes < _LEAST_COPY_BYTES:
        copy(...)
        return lambda: None
    box, count = whole_box(of.shape), min(thread_count(), -(-of.nbytes // _BYTES_EACH))
    parts = map(box_slices, split_box(box, -(-of.size // count)))
    copies = [pool().submit(copy, part) for part in parts]

    def wait() -> None:
        for each in copies:
            each.result()

    return wait


def register_from_bytes() -> float:
    """Return the least size of a block that a GPU reads faster if it is pinned in place.

    It is infinite with four or more threads that can copy blocks into pinned memory.
    """
    return _REGISTER_FROM_BYTES if thread_count() < _FEW_THREADS else inf
