"""For ``dask scheduler --preload dask_p2p.preload``, and the same for workers.

On a scheduler it sets up the scheduler and all workers that join. On a worker it sets up that
worker, which then asks its scheduler for the rest. In a client, which loads it where Dask's option
``distributed.client.preload`` names it, and on a worker it also does what ``p2p.install`` says.
"""

from __future__ import annotations

from typing import Any

from distributed import Client, Scheduler, Worker

from dask_p2p.config import installs_with_preload
from dask_p2p.plugins.registration import ask_later
from dask_p2p.plugins.scheduler import P2PSchedulerPlugin
from dask_p2p.plugins.worker import P2PPlugin
from dask_p2p.tools.dropin import install


async def dask_setup(server: Any) -> None:
    """Put the plugin on a scheduler or a worker, and have Dask use this package if wanted."""
    if isinstance(server, (Client, Worker)) and installs_with_preload():
        install()
    if isinstance(server, Worker):
        await server.plugin_add(P2PPlugin(), catch_errors=False)
        server.loop.add_callback(ask_later, server)
    elif isinstance(server, Scheduler):
        plugin = P2PSchedulerPlugin()
        await server.register_scheduler_plugin(plugin, name=plugin.name, idempotent=True)
