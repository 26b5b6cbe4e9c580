"""Preload module for ``dask scheduler --preload dask_p2p.preload``, and for workers and clients.

On a scheduler it registers the plugins on the scheduler and on all workers that join. On a worker
it registers that worker's plugin; the worker then requests the scheduler's. Clients load the module
if Dask's option ``distributed.client.preload`` lists it. On clients and workers it also calls
`install` if the option ``p2p.install`` is true.
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
    """Register the plugin on a scheduler or worker, and call `install` if configured."""
    if isinstance(server, (Client, Worker)) and installs_with_preload():
        install()
    if isinstance(server, Worker):
        await server.plugin_add(P2PPlugin(), catch_errors=False)
        server.loop.add_callback(ask_later, server)
    elif isinstance(server, Scheduler):
        plugin = P2PSchedulerPlugin()
        await server.register_scheduler_plugin(plugin, name=plugin.name, idempotent=True)
