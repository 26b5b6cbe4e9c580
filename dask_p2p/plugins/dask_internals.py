"""Flushes Dask's batched streams for messages about this package's tasks.

Dask's client, scheduler and workers batch their messages: at least 10, 5 and 2 ms pass between two
batches. Batches save work in graphs of many small tasks. They only delay an idle worker whose next
task is in the batch.

Dask has no public setting for this, so this module sets attributes of the streams. It leaves
streams of any other type alone.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from dask.utils import format_bytes
from distributed import Worker, secede
from distributed.batched import BatchedSend
from distributed.threadpoolexecutor import thread_state, threads_lock

from dask_p2p.errors import P2PWarning


class AtOnce:
    """Flushes batched streams at the next iteration of the event loop."""

    def __init__(self) -> None:
        self._streams: set[BatchedSend] = set()

    def send(self, *streams: Any) -> None:
        """Flush these streams soon, with messages that are added until then."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._send)
        self._streams.update(each for each in streams if isinstance(each, BatchedSend))

    def _send(self) -> None:
        while self._streams:
            stream = self._streams.pop()
            stream.next_deadline = None
            stream.waker.set()


warned: WeakSet[Any] = WeakSet()  # workers that have warned of their missing plugin


def warn_of_whole_blocks(worker: Any, keys: Sequence[Any]) -> None:
    """Warn users of the bytes that a task has moved without the plugin; once for each worker."""
    if worker in warned:
        return
    wanted = set(keys)
    moved_bytes = sum(
        nbytes
        for transfer in list(worker.transfer_incoming_log)
        for key, nbytes in transfer["keys"].items()
        if key in wanted
    )
    if not moved_bytes:
        return
    warned.add(worker)
    text = (
        f"dask_p2p: {format_bytes(moved_bytes)} were moved as whole blocks to {worker.address} "
        f"for one block of a result, because the worker lacked the dask_p2p plugin. Call "
        f"dask_p2p.register(client) first, or start the scheduler with --preload dask_p2p.preload."
    )
    warn_client(worker, text, P2PWarning)


def warn_client(worker: Any, text: str, category: type[Warning]) -> None:
    """Issue a warning in all clients, as `distributed.warn` does, but not in the worker itself.

    Python shows a warning once, even if several workers send the same text.
    """
    event = {"message": pickle.dumps(text), "category": pickle.dumps(category)}
    worker.log_event("warn", event)


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


#: Name of the profiler among the worker's periodic callbacks.
PROFILE = "profile"


class SamplingInterval:
    """The interval of a worker's profiler. Without a profiler, changes have no effect."""

    def __init__(self, worker: Worker) -> None:
        self._sampling = worker.periodic_callbacks.get(PROFILE)  # None: the profiler is off
        self._own_ms = 0.0 if self._sampling is None else self._sampling.callback_time

    def set_least(self, least_ms: float) -> None:
        """Set Dask's own interval, or this one if it is longer. On the event loop."""
        if self._sampling is not None:
            self._sampling.callback_time = max(self._own_ms, least_ms)
