"""The pool thread that runs a rank: it releases its slot to other tasks if it runs for long.

A function may wait for tasks that it has submitted. If ranks kept all slots of the cluster, these
tasks would never run.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from distributed.threadpoolexecutor import thread_state, threads_lock
from distributed.worker import thread_state as task_state
from distributed.worker_state_machine import SecedeEvent

from dask_p2p.plugins.threads import locked_threads

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
        self._worker.loop.add_callback(self._begin_again)

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

    def _begin(self) -> None:
        self._timer = self._worker.loop.call_later(_LONG_S, self._leave)

    def _begin_again(self) -> None:
        self._end()
        self._timer = self._worker.loop.call_later(_RETURNED_S, self._leave)

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
        self._worker.handle_stimulus(
            SecedeEvent(
                key=self._key,
                compute_duration=now_s - self._start_s,
                stimulus_id=f"secede-{now_s}",
            )
        )
