"""Threads of this process for work on host memory that is beside a task: copies, first touches."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

_MOST = 8


@cache
def thread_count() -> int:
    """Return how many there are: as many as cores that this process may use, but at most eight."""
    return min(_MOST, len(os.sched_getaffinity(0)))


@cache
def pool() -> ThreadPoolExecutor:
    """Return them."""
    return ThreadPoolExecutor(thread_count(), "p2p-slots")
