"""Closes a worker whose GPU is lost, and ends its process."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from weakref import WeakKeyDictionary

from distributed import Status, Worker

from dask_p2p.errors import P2PWarning
from dask_p2p.plugins.notices import warn_client

logger = logging.getLogger(__name__)

_POLL_S = 0.01
_REPORT_S = 3.0  # time for running tasks to report the lost GPU, on a busy machine too
_LEAVE_S = 1.0  # time after that until the worker's process ends
_leaving: WeakKeyDictionary[Worker, asyncio.Future[None]] = WeakKeyDictionary()


def leave(worker: Worker, reason: str) -> None:
    """Warn users, and close the worker. Idempotent; call it on the worker's event loop."""
    if worker not in _leaving:
        logger.critical("Worker %s leaves the cluster: %s", worker.address, reason)
        warn_client(worker, f"dask_p2p: worker {worker.address} left: {reason}", P2PWarning)
        _leaving[worker] = asyncio.ensure_future(_end_process(worker))


async def _until_reported(worker: Worker) -> None:
    """Wait up to `_REPORT_S` until a running task has failed and so reported the cause.

    Dask reruns all other tasks elsewhere, so these must not fail because of this GPU.
    """
    worker.status = Status.closing_gracefully  # no other task starts
    running = set(worker.state.executing)
    deadline_s = time.monotonic() + _REPORT_S
    while running and time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)
        if any(task.state == "error" for task in running):
            break
        running &= worker.state.executing


async def _end_process(worker: Worker) -> None:
    """Close a worker, and end its process even if closing hangs or fails, as with a lost GPU."""
    try:
        await _until_reported(worker)
        closing = worker.close(nanny=False, executor_wait=False, reason="its GPU is lost")
        await asyncio.wait_for(closing, _LEAVE_S)
    finally:
        os._exit(1)
