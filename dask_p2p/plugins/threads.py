"""The threads of a worker's pool, and a task's slot, which it may release while it waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed import secede
from distributed.threadpoolexecutor import thread_state, threads_lock

_LOOK_S = 0.05  # between looks at a pool whose lock another thread holds


@contextmanager
def locked_threads(executor: Any) -> Iterator[bool]:
    """Hold the lock of a pool's threads; return False, without the lock, if the pool shuts down.

    Dask's pool holds the lock while it waits for the end of its threads. A thread that waited for
    the lock would not end before that times out, after 30 seconds.
    """
    while not executor._shutdown:
        if threads_lock.acquire(timeout=_LOOK_S):
            try:
                yield True
            finally:
                threads_lock.release()
            return
    yield False


@contextmanager
def only_waiting() -> Iterator[None]:
    """Return a context that lets the worker start its next task.

    At the end the thread returns to the pool, unlike with Dask's `secede` alone, since libraries
    keep plans and handles for each thread. If one thread at a time is in the context, the pool has
    one thread more than the worker runs tasks.
    """
    executor = getattr(thread_state, "executor", None)  # None outside Dask's thread pool
    thread = threading.current_thread()
    if executor is None or thread not in executor._threads or executor._shutdown:
        yield
        return
    secede()
    try:
        yield
    finally:
        with locked_threads(executor) as is_open:
            if is_open:
                executor._threads.add(thread)
        thread_state.proceed = True
