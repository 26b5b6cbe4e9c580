"""For ``dask scheduler --preload dask_p2p.preload``, and the same for workers.

On a scheduler it sets up the scheduler and all workers that join. On a worker it sets up that
worker, which then asks its scheduler for the rest.
"""

from __future__ import annotations

from typing import Any

from distributed import Scheduler, Worker

from dask_p2p.registration import ask_later
from dask_p2p.scheduler import P2PSchedulerPlugin
from dask_p2p.worker import P2PPlugin

__all__ = ["dask_setup"]


async def dask_setup(server: Any) -> None:
    """Put the plugin on a scheduler or a worker."""
    if isinstance(server, Worker):
        await server.plugin_add(P2PPlugin(), catch_errors=False)
        server.loop.add_callback(ask_later, server)
    elif isinstance(server, Scheduler):
        plugin = P2PSchedulerPlugin()
        await server.register_scheduler_plugin(plugin, name=plugin.name, idempotent=True)
