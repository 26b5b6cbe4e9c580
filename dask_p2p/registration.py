"""How the worker plugin gets onto a cluster."""

from __future__ import annotations

import sys
import time
from typing import Any
from weakref import WeakSet

__all__ = ["register", "register_if_possible"]

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

    from dask_p2p.worker import make_plugin

    client = default_client(client)
    return client.register_plugin(make_plugin()) if client.asynchronous else _register(client)


def _register(client: Any) -> None:
    from dask_p2p.worker import make_plugin

    plugin = make_plugin()
    for left in reversed(range(_TRIES)):
        try:
            client.register_plugin(plugin)
            break
        except OSError:
            # A worker died while all were being told. The scheduler knows the plugin now, and would
            # take a second registration for done; but some of the living may not have heard of it.
            if not left:
                raise
            plugin.idempotent = False
            time.sleep(_PAUSE_S)
    _registered.add(client)


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
