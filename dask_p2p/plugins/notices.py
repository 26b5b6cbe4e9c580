"""What workers and the scheduler tell the users of all clients."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from dask.utils import format_bytes

from dask_p2p.errors import P2PWarning

warned: WeakSet[Any] = WeakSet()  # workers that have said that they lack the plugin


def warn_of_whole_blocks(worker: Any, keys: Sequence[Any]) -> None:
    """Warn the user, once for each worker, what a task has moved because the plugin is missing."""
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
        f"dask_p2p: {format_bytes(moved_bytes)} were moved as whole blocks to {worker.address}, "
        f"for one block of a result, because the worker lacked the package's plugin. Call "
        f"dask_p2p.register(client) first, or start the scheduler with --preload dask_p2p.preload."
    )
    warn_client(worker, text, P2PWarning)


def warn_client(worker: Any, text: str, category: type[Warning]) -> None:
    """Have the clients warn their users: as `distributed.warn` does, but not in the worker too.

    Workers that find the same send the same text, and Python shows it once.
    """
    event = {"message": pickle.dumps(text), "category": pickle.dumps(category)}
    worker.log_event("warn", event)
