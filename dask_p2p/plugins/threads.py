"""Threads of Dask's worker that wait for a device: another one does the next task meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from distributed import secede
from distributed.threadpoolexecutor import thread_state, threads_lock


@contextmanager
def only_waiting() -> Iterator[None]:
    """Return a context in which the worker begins another task, if it has one.

    The thread comes back to the pool, which Dask's `secede` would have it leave for good: libraries
    keep plans and handles for each thread. So a worker ends up with one thread more than it does
    tasks at once, as long as one thread at a time is in the context.
    """
    executor = getattr(thread_state, "executor", None)  # None in a pool that is not Dask's
    thread = threading.current_thread()
    if executor is None or thread not in executor._threads:
        yield
        return
    secede()
    try:
        yield
    finally:
        with threads_lock:
            executor._threads.add(thread)
        thread_state.proceed = True
