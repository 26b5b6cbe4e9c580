"""Warnings from workers to the users of all clients."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from dask.utils import format_bytes

from dask_p2p.errors import P2PWarning

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
