"""Copies within host memory by several threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from dask_p2p.backends.numpy import NUMPY
from dask_p2p.geometry import box_slices, split_box

__all__ = ["begin_copy", "copy_on_host"]

# With 1, 4 and 12 threads, slots were filled and emptied at 7, 18 and 35 GB/s (H200, 16 cores).
_MOST_THREADS = 12
_LEAST_BYTES = 2**20  # to be copied by several threads


def copy_on_host(to: np.ndarray[Any, Any], of: np.ndarray[Any, Any]) -> None:
    """Copy an array of the host, by several threads if it is large."""
    begin_copy(to, of)()


def begin_copy(to: np.ndarray[Any, Any], of: np.ndarray[Any, Any]) -> Callable[[], None]:
    """Have threads begin to copy an array of the host; return what waits until that is done.

    A small one is copied when this returns.
    """

    def copy(part: Any) -> None:
        NUMPY.permute_into(to[part], of[part], range(of.ndim))

    if of.nbytes < _LEAST_BYTES:
        copy(...)
        return _nothing
    box = tuple((0, n) for n in of.shape)
    parts = map(box_slices, split_box(box, -(-of.size // _cores())))
    copies = [_threads().submit(copy, part) for part in parts]

    def wait() -> None:
        for each in copies:
            each.result()

    return wait


def _nothing() -> None:
    """Wait for nothing."""


@cache
def _cores() -> int:
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_cores(), "p2p-slots")
