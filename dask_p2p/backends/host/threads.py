"""Threads of this process for work on host memory in the background: copies, first touches."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

_MOST = 8


@cache
def thread_count() -> int:
    """Return the number of threads: the cores that this process may use, at most eight."""
    return min(_MOST, len(os.sched_getaffinity(0)))


@cache
def pool() -> ThreadPoolExecutor:
    """Return the pool of these threads."""
    return ThreadPoolExecutor(thread_count(), "p2p-slots")
