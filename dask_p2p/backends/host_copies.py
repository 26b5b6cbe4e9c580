"""Copies within host memory by several threads."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from dask_p2p.backends.host_threads import pool, thread_count
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.geometry import box_slices, split_box

# On an H200's host with 16 cores, blocks of 256 MiB went through its GPU at 10, 17, 25, 32 and 28
# GB/s, both ways together, as 1, 2, 4, 8 and 12 threads filled slots of pinned memory. From where
# they lay, pinned for that time, it was 23 to 26. Blocks of 1 GiB took 50 GB/s with 8 threads as
# with 12, and 31 pinned.
_FEW_THREADS = 4
_REGISTER_FROM_BYTES = 2**24
_LEAST_BYTES = 2**20  # to be copied by another thread
_BYTES_EACH = 2**22  # at least: to give one its part takes as long as to copy half a MiB


def copy_on_host(to: np.ndarray[Any, Any], of: np.ndarray[Any, Any]) -> None:
    """Copy an array of the host, by several threads if it is large; return when that is done."""
    begin_copy(to, of)()


def begin_copy(to: np.ndarray[Any, Any], of: np.ndarray[Any, Any]) -> Callable[[], None]:
    """Have threads begin to copy an array of the host; return what waits until that is done.

    A small one is copied when this returns.
    """

    def copy(part: Any) -> None:
        NUMPY.permute_into(to[part], of[part], range(of.ndim))

    if of.nbytes < _LEAST_BYTES:
        copy(...)
        return lambda: None
    box, count = tuple((0, n) for n in of.shape), min(thread_count(), -(-of.nbytes // _BYTES_EACH))
    parts = map(box_slices, split_box(box, -(-of.size // count)))
    copies = [pool().submit(copy, part) for part in parts]

    def wait() -> None:
        for each in copies:
            each.result()

    return wait


def register_from_bytes() -> float:
    """Return how large a block is that a GPU reads sooner if it is pinned where it lies.

    Where there are less than four threads that could copy it into pinned memory.
    """
    return _REGISTER_FROM_BYTES if thread_count() < _FEW_THREADS else inf
