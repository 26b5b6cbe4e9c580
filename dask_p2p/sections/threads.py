"""The pool's thread that runs a member: other tasks get its place if it stays for long.

A function may wait for tasks that it has submitted. If members had all threads of the cluster,
these would never run.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from distributed.threadpoolexecutor import thread_state, threads_lock
from distributed.worker import thread_state as task_state
from distributed.worker_state_machine import SecedeEvent

_LONG_S = 2.0  # a member that has run for so long gives its place away


class PoolThread:
    """The calling thread, which runs one task of a worker.

    It gives its place away as `distributed.secede` does, which only the thread itself may call. But
    it stays among the pool's threads: a function that secedes, as `worker_client` does, may.
    """

    def __init__(self, worker: Any) -> None:
        self._worker, self._thread = worker, threading.current_thread()
        # None in an executor of the user's own.
        self._executor: Any = getattr(thread_state, "executor", None)
        self._key, self._start_s = task_state.key, task_state.start_time
        self._is_beside = self._is_closed = False
        self._timer: Any = None
        worker.loop.add_callback(self._begin)

    def secede(self) -> None:
        """Give the place away. In the thread."""
        if self._has_left():
            self._worker.loop.add_callback(self._tell)

    def close(self) -> None:
        """Stay for good, or end after the task if another thread has the place. In the thread."""
        with threads_lock:
            self._is_closed = True
            if self._is_beside and self._executor is not None:
                self._executor._max_workers -= 1
                self._executor._threads.discard(self._thread)
                thread_state.proceed = False
        self._worker.loop.add_callback(self._end)

    def _has_left(self) -> bool:
        """Give the place away, and return whether it had not been."""
        with threads_lock:
            if self._executor is None or self._is_beside or self._is_closed:
                return False
            self._is_beside = True
            self._executor._max_workers += 1
            self._executor._adjust_thread_count()
            return True

    def _begin(self) -> None:
        self._timer = self._worker.loop.call_later(_LONG_S, self._leave)

    def _leave(self) -> None:
        if self._has_left():  # at once: Dask must not hear of it after the task's end
            self._tell()

    def _end(self) -> None:
        self._worker.loop.remove_timeout(self._timer)

    def _tell(self) -> None:
        """Make the task a long-running one of the worker. On the event loop."""
        now_s = time.time()
        self._worker.handle_stimulus(
            SecedeEvent(
                key=self._key,
                compute_duration=now_s - self._start_s,
                stimulus_id=f"secede-{now_s}",
            )
        )
