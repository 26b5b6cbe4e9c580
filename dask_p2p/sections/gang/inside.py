"""Threads of this process that run the function of a gang."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dask_p2p.plugins.gangs.nesting import OF_WORKERS
from dask_p2p.plugins.registration import current_client

_thread = threading.local()
_running: list[int] = []  # threads that run the function of a gang


@contextmanager
def within_gang() -> Iterator[None]:
    """Mark this thread as one that runs the function of a gang, until the context ends."""
    _thread.is_in_gang = True
    _running.append(threading.get_ident())
    try:
        yield
    finally:
        _running.remove(threading.get_ident())
        _thread.is_in_gang = False


def is_within_gang() -> bool:
    """Return whether this thread runs the function of a gang."""
    return getattr(_thread, "is_in_gang", False)


def gang_may_wait_for_this_thread() -> bool:
    """Return whether this thread, outside any task, uses a worker's client while a gang runs.

    The gang's function has then started the thread, and may wait for it.
    """
    if not _running:
        return False
    from distributed.worker import thread_state

    client = current_client()
    is_of_worker = client is not None and client.id.startswith(OF_WORKERS)
    return is_of_worker and not hasattr(thread_state, "key")
