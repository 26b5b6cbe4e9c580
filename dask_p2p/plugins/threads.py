"""Releases the worker's slot for the next task, while a task's thread waits for a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from distributed import secede
from distributed.threadpoolexecutor import thread_state, threads_lock


@contextmanager
def only_waiting() -> Iterator[None]:
    """Return a context that lets the worker start its next task.

    At the end the thread returns to the pool, unlike with Dask's `secede` alone, since libraries
    keep plans and handles for each thread. If one thread at a time is in the context, the pool has
    one thread more than the worker runs tasks.
    """
    executor = getattr(thread_state, "executor", None)  # None outside Dask's thread pool
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
