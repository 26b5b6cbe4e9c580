"""For ``dask worker --preload dask_p2p.preload``, and the same for schedulers.

On a worker it sets up that worker; on a scheduler all workers that join.
"""

from __future__ import annotations

from typing import Any

from distributed import Scheduler, Worker
from distributed.protocol.pickle import dumps

from dask_p2p.worker import make_plugin

__all__ = ["dask_setup"]


async def dask_setup(server: Any) -> None:
    """Put the plugin on a worker, or on all workers of a scheduler."""
    plugin = make_plugin()
    if isinstance(server, Worker):
        await server.plugin_add(plugin, catch_errors=False)
    elif isinstance(server, Scheduler):
        await server.register_worker_plugin(None, dumps(plugin), plugin.name, idempotent=True)
