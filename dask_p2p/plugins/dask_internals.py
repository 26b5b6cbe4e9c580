"""Uses of Dask's private parts: streams, threads of the pool, resources.

Dask's client, scheduler and workers batch their messages: at least 10, 5 and 2 ms pass between two
batches. Batches save work in graphs of many small tasks. They only delay an idle worker whose next
task is in the batch, so `StreamFlusher` flushes them. Dask has no public setting for this.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from time import monotonic
from typing import Any
from weakref import WeakSet

from dask.utils import format_bytes
from distributed import Worker, secede
from distributed.batched import BatchedSend
from distributed.core import Status
from distributed.threadpoolexecutor import thread_state, threads_lock
from distributed.worker import thread_state as task_state
from distributed.worker_state_machine import SecedeEvent, UnpauseEvent

from dask_p2p.errors import P2PWarning
from dask_p2p.types import Key


class StreamFlusher:
    """Flushes batched streams at the next iteration of the event loop."""

    def __init__(self) -> None:
        self._streams: set[BatchedSend] = set()

    def flush(self, *streams: Any) -> None:
        """Flush these streams soon, with messages that are added until then."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._flush)
        self._streams.update(stream for stream in streams if isinstance(stream, BatchedSend))

    def _flush(self) -> None:
        while self._streams:
            stream = self._streams.pop()
            stream.next_deadline = None
            stream.waker.set()


warned: WeakSet[Any] = WeakSet()  # workers that have warned of their missing plugin


def warn_of_whole_blocks(worker: Any, keys: Sequence[Any]) -> None:
    """Warn users of the bytes that a task has moved without the plugin; once for each worker."""
    if worker in warned:
        return
    input_keys = set(keys)
    moved_bytes = sum(
        nbytes
        for transfer in list(worker.transfer_incoming_log)
        for key, nbytes in transfer["keys"].items()
        if key in input_keys
    )
    if not moved_bytes:
        return
    warned.add(worker)
    text = (
        f"dask_p2p: {format_bytes(moved_bytes)} were moved as whole blocks to {worker.address} "
        f"for one block of a result, because the worker lacked the dask_p2p plugin. Call "
        f"dask_p2p.register(client) first, or start the scheduler with --preload dask_p2p.preload."
    )
    warn_client(worker, text)


def warn_client(worker: Any, text: str) -> None:
    """Issue a `P2PWarning` in all clients, as `distributed.warn` does, but not in the worker.

    Python shows a warning once, even if several workers send the same text.
    """
    event = {"message": pickle.dumps(text), "category": pickle.dumps(P2PWarning)}
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


# The pool thread that runs a rank: it releases its slot to other tasks if it runs for long.
#
# A function may wait for tasks that it has submitted. If ranks kept all slots of the cluster, these
# tasks would never run.

_LONG_S = 2.0  # time until a rank releases its slot
_RETURNED_S = 0.2  # the same, from the return of its function on
_RETRY_S = 0.05  # time to the next try if another thread holds the lock


class PoolThread:
    """The calling thread, which runs one task of a worker.

    It releases its slot as `distributed.secede` does, which only the thread itself may call. But
    it remains a thread of the pool, so the user's function may still secede, as `worker_client`
    does.
    """

    def __init__(self, worker: Any) -> None:
        self._worker, self._thread = worker, threading.current_thread()
        # None in a user's own executor.
        self._executor: Any = getattr(thread_state, "executor", None)
        self._key, self._start_s = task_state.key, task_state.start_time
        self._is_outside_pool = self._is_closed = False
        self._timer: Any = None
        worker.loop.add_callback(self._begin)

    def secede(self) -> None:
        """Release the slot. To be called in the thread."""
        if self._executor is None:
            return
        with locked_threads(self._executor) as is_open:
            has_left = is_open and self._has_left()
        if has_left:
            self._worker.loop.add_callback(self._give_up_slot)

    def release_soon(self) -> None:
        """Release the slot soon: the function has returned, and waits for those of other ranks.

        They may wait for tasks that Dask has placed on this worker.
        """
        self._worker.loop.add_callback(self._end)
        self._worker.loop.add_callback(self._begin, _RETURNED_S)

    def close(self) -> None:
        """Keep the slot from now on. If another thread has it, end this thread after the task.

        To be called in the thread.
        """
        self._is_closed = True  # from here on the event loop does not release the slot
        if self._executor is not None:
            with locked_threads(self._executor) as is_open:
                if is_open and self._is_outside_pool:
                    self._executor._max_workers -= 1
                    self._executor._threads.discard(self._thread)
                    thread_state.proceed = False
        self._worker.loop.add_callback(self._end)

    def _has_left(self) -> bool:
        """Release the slot; return False if it was released before. Under the lock of the pool."""
        if self._is_outside_pool or self._is_closed:
            return False
        self._is_outside_pool = True
        self._executor._max_workers += 1
        self._executor._adjust_thread_count()
        return True

    def _begin(self, leave_s: float = _LONG_S) -> None:
        self._timer = self._worker.loop.call_later(leave_s, self._leave)

    def _leave(self) -> None:
        """Release the slot. On the event loop, which must not wait for the lock."""
        if self._executor is None or self._executor._shutdown:
            return
        if not threads_lock.acquire(blocking=False):
            self._timer = self._worker.loop.call_later(_RETRY_S, self._leave)
            return
        try:
            has_left = self._has_left()
        finally:
            threads_lock.release()
        if has_left:  # send the event now: after the task's end Dask must not get it
            self._give_up_slot()

    def _end(self) -> None:
        self._worker.loop.remove_timeout(self._timer)

    def _give_up_slot(self) -> None:
        """Mark the task as long-running on the worker. On the event loop."""
        now_s = time.time()
        event = SecedeEvent(
            key=self._key,
            compute_duration=now_s - self._start_s,
            stimulus_id=f"secede-{now_s}",
        )
        self._worker.handle_stimulus(event)


# Resource units of a rank's task: lent to other tasks while the rank waits.
#
# Dask assigns units to a task until it ends. A waiting rank that kept its units could block the
# inputs of other ranks of its gang. It could also block ranks of another gang, which has units that
# this gang needs.

_ROUNDING = 1e-9  # rounding error of fractional units, such as 0.1


class Units:
    """The resource units of one task. They are changed on the worker's event loop."""

    def __init__(self, worker: Any, key: Key) -> None:
        task = worker.state.tasks.get(key)
        self._needs = dict((task and task.resource_restrictions) or {})
        self._worker, self._is_lent = worker, False

    def lend(self) -> None:
        """Lend the units to other tasks. These start at the worker's next event, so secede next."""
        if self._needs and not self._is_lent:
            self._is_lent = True
            self._worker.loop.add_callback(self._add, 1)

    def lend_while_idle(self) -> None:
        """Lend the units of a task that has seceded; tasks that wait for them start now."""
        if self._needs and not self._is_lent:
            self.lend()
            self._worker.loop.add_callback(self._start_waiting)

    def take(self, wait: Callable[[], bool]) -> None:
        """Take the units back, and wait until enough tasks that borrowed them have ended.

        From now on no other task gets the units. `wait` waits a moment, and returns whether to
        continue.
        """
        if not self._is_lent:
            return
        self._is_lent, is_taken = False, Event()
        self._worker.loop.add_callback(self._add, -1, is_taken)
        while not (is_taken.is_set() and self._are_enough()) and wait():
            pass

    def close(self) -> None:
        """Take the units back without waiting: Dask frees them when the task ends."""
        if self._is_lent:
            self._is_lent = False
            self._worker.loop.add_callback(self._add, -1)

    def _start_waiting(self) -> None:
        if self._worker.status == Status.running:  # then the event has no other effect
            self._worker.handle_stimulus(UnpauseEvent(stimulus_id=f"p2p-units-{monotonic()}"))

    def _are_enough(self) -> bool:
        available = self._worker.state.available_resources
        return all(available.get(name, 0) >= -_ROUNDING for name in self._needs)

    def _add(self, sign: int, on_added: Event | None = None) -> None:
        available = self._worker.state.available_resources
        for name, n in self._needs.items():
            available[name] = available.get(name, 0) + sign * n
        if on_added is not None:
            on_added.set()
