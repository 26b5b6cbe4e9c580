"""A worker whose GPU is lost leaves the cluster, and its process ends."""

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
_TELL_S = 1.0  # that tasks have to tell of the GPU that they lost
_LEAVE_S = 1.0  # from then on until a worker's process ends
_leaving: WeakKeyDictionary[Worker, asyncio.Future[None]] = WeakKeyDictionary()


def leave(worker: Worker, reason: str) -> None:
    """Have a worker leave, and tell users why; on its event loop. Idempotent."""
    if worker not in _leaving:
        logger.critical("Worker %s leaves the cluster: %s", worker.address, reason)
        warn_client(worker, f"dask_p2p: worker {worker.address} left: {reason}", P2PWarning)
        _leaving[worker] = asyncio.ensure_future(_end_process(worker))


async def _until_told(worker: Worker) -> None:
    """Wait, not long, until one of the tasks that run here has failed: it says what was wrong.

    All other tasks are done again elsewhere, and must not fail with the GPU as well.
    """
    worker.status = Status.closing_gracefully  # no other task begins
    running = set(worker.state.executing)
    deadline_s = time.monotonic() + _TELL_S
    while running and time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)
        if any(task.state == "error" for task in running):
            break
        running &= worker.state.executing


async def _end_process(worker: Worker) -> None:
    """Close a worker, and end its process soon: closing often hangs or fails with a lost GPU."""
    try:
        await _until_told(worker)
        closing = worker.close(nanny=False, executor_wait=False, reason="its GPU is lost")
        await asyncio.wait_for(closing, _LEAVE_S)
    finally:
        os._exit(1)
