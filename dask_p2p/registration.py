"""How the worker plugin gets onto a cluster."""

from __future__ import annotations

import sys
import time
from typing import Any
from weakref import WeakSet

from dask_p2p.task import PLUGIN_NAME

__all__ = ["register", "register_if_possible", "workers_of"]

_TRIES = 5
_PAUSE_S = 0.2  # for the scheduler to notice who died

_registered: WeakSet[Any] = WeakSet()  # clients whose cluster has the plugin


def register(client: Any = None) -> Any:
    """Put the worker plugin on a cluster: on its workers, and on those that join later.

    Calling it again changes nothing. `dask_p2p.transpose` calls it by itself where it finds a
    synchronous client.

    Parameters
    ----------
    client : distributed.Client, optional
        By default the current one.

    Returns
    -------
    None or awaitable
        Something to await if the client is asynchronous.

    Raises
    ------
    ValueError
        If there is no client.
    """
    from distributed import default_client

    client = default_client(client)
    return _register_async(client) if client.asynchronous else _register(client)


async def _register_async(client: Any) -> None:
    for plugin in _plugins(client):
        await client.register_plugin(plugin)
    # Workers that die meanwhile need not meet anybody.
    await client.run(meet, [*await _workers_of(client)], on_error="ignore")


def _register(client: Any) -> None:
    for plugin in _plugins(client):
        _tell_all(client, plugin)
    _registered.add(client)
    client.run(meet, [*workers_of(client)], on_error="ignore")


def workers_of(client: Any) -> dict[str, dict[str, Any]]:
    """Return what the scheduler says of each worker, by address, to a synchronous client.

    `Client.scheduler_info` asks for the same, but the client itself asks now and then, for no
    workers, and may put its own answer in the place of this one.
    """
    workers: dict[str, dict[str, Any]] = client.sync(_workers_of, client)
    return workers


async def _workers_of(client: Any) -> dict[str, dict[str, Any]]:
    workers: dict[str, dict[str, Any]] = (await client.scheduler.identity(n_workers=-1))["workers"]
    return workers


def _plugins(client: Any) -> list[Any]:
    """Return what has to be registered, by the options that are configured here."""
    from dask_p2p.worker import make_plugin

    plugins = [make_plugin()]
    if plugins[0].options.low_latency:
        from dask_p2p.low_latency import SchedulerLatency, WorkerLatency, shorten

        shorten(client.scheduler_comm)
        plugins += [SchedulerLatency(), WorkerLatency()]
    return plugins


def _tell_all(client: Any, plugin: Any) -> None:
    for left in reversed(range(_TRIES)):
        try:
            client.register_plugin(plugin)
            return
        except OSError:
            # A worker died while all were being told. The scheduler knows the plugin now, and would
            # take a second registration for done; but some of the living may not have heard of it.
            if not left:
                raise
            plugin.idempotent = False
            time.sleep(_PAUSE_S)


def meet(addresses: list[str], dask_worker: Any) -> None:
    """Have a worker find out how it reaches the others, before it needs to."""
    plugin = dask_worker.plugins.get(PLUGIN_NAME)
    if plugin is not None:
        plugin.meet(addresses)


def register_if_possible() -> None:
    """Register with the current client, if there is a synchronous one, and only once with each."""
    # Without distributed imported there cannot be a client, and importing it takes a while.
    if "distributed" not in sys.modules:
        return
    from distributed import default_client

    try:
        client = default_client()
    except ValueError:
        return
    if client.asynchronous or client in _registered or client.status != "running":
        return
    _register(client)
