"""Registration of the plugins on a cluster.

The client, or a worker without the plugin, sends the scheduler plugin to the scheduler
(`dask_p2p.plugins.scheduler`). The scheduler plugin then installs the worker plugin on all workers.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from collections.abc import Awaitable, Sequence
from typing import Any, overload
from weakref import WeakSet

from dask_p2p import tuning
from dask_p2p.config import transport_classes
from dask_p2p.engine.task import current_worker, plugin_context
from dask_p2p.errors import P2PError, P2PWarning, RegistrationError
from dask_p2p.inputs import checked_client
from dask_p2p.plugins.dask_internals import warn_of_whole_blocks
from dask_p2p.types import AsynchronousClient, Client, Key
from dask_p2p.versions import check_dask, this_version

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_MOST_NAMED = 4  # most workers listed in a warning
#: Connections of clients to schedulers that have the plugins. A client may outlive its scheduler
#: and connect to a new one at the same address; a connection ends with its scheduler.
_registered: WeakSet[Any] = WeakSet()
askers: WeakSet[Any] = WeakSet()  # workers that lack the plugin, and have requested it


@overload
def register(client: Client | None = None) -> None: ...


@overload
def register(client: AsynchronousClient) -> Awaitable[None]: ...


def register(client: Any = None) -> Any:
    """Install the plugins on a cluster: on its scheduler, its workers, and workers that join later.

    Another call has no effect. `dask_p2p.transpose` calls `register` itself if there is a client;
    an asynchronous client registers in the background. A worker that does not answer for ten
    seconds is named in a warning, and gets the plugin when it responds again.

    Parameters
    ----------
    client : distributed.Client, optional
        Default: the current client.

    Returns
    -------
    None or awaitable
        An awaitable if the client is asynchronous.

    Raises
    ------
    ValueError, InputError
        If there is no client, or it is closed.
    ConfigError
        If the scheduler or a worker lacks the package, has another version of it, or runs a Dask
        release that this version does not support.

    See Also
    --------
    local_cluster : Start a cluster with the plugins.

    Examples
    --------
    >>> client = distributed.Client("tcp://scheduler:8786")  # doctest: +SKIP
    >>> dask_p2p.register(client)  # doctest: +SKIP
    """
    client = checked_client(client)
    return client.sync(_register, client)


async def _register(client: Any) -> None:
    connection = connection_of(client)
    _report(await ask(client.scheduler))
    _remember(connection)


def register_cluster(cluster: Any) -> None:
    """Register the plugins with a cluster that this process has started.

    The first call of each client then finds them there. The errors are those of `register`.
    """
    _report(cluster.sync(ask, cluster.scheduler_comm))
    transport_classes()  # to search all packages for them takes 10 ms, once


def connection_of(client: Any) -> Any:
    """Return a client's connection to its scheduler; None if it is not connected.

    The connection ends with its scheduler, so it is the key for state about a cluster.
    """
    return getattr(client, "scheduler_comm", None)


def current_client() -> Any:
    """Return the current client, or None if there is none that is connected."""
    # There is no client before distributed is imported, and importing it is slow.
    if "distributed" not in sys.modules:
        return None
    from distributed import default_client

    try:
        client = default_client()
    except ValueError:
        return None
    return client if client.status == "running" else None


def register_if_possible() -> None:
    """Register with the current client, or inside a task with its worker's scheduler.

    Registers once with each scheduler: a client may reconnect to a new scheduler.
    """
    if "distributed" not in sys.modules:
        return
    from distributed.utils import sync

    worker, _ = current_worker()
    if worker is not None:
        if plugin_context(worker) is None:
            _report(sync(worker.loop, ask, worker.scheduler))
        return
    client = current_client()
    if client is None or connection_of(client) in _registered:
        return
    if client.asynchronous:
        _remember(connection_of(client))
        client.loop.add_callback(register_later, client)
    else:
        register(client)


def on_missing_plugin(worker: Any, keys: Sequence[Key]) -> None:
    """Request the plugin for a worker that runs a task without it, and warn of whole blocks.

    `keys` are those of the task's input blocks.
    """
    if worker not in askers:
        askers.add(worker)
        worker.loop.add_callback(ask_later, worker)
    warn_of_whole_blocks(worker, keys)


async def ask_later(worker: Any) -> None:
    """Send the plugin to the scheduler as soon as the scheduler can be reached."""
    from distributed.core import Status

    while worker.status in (Status.init, Status.running, Status.paused):
        try:
            await give_plugin(worker.scheduler)
            return
        except OSError:
            await asyncio.sleep(_RETRY_S)
        except Exception as exc:  # tasks work without the plugin, but slower
            logger.warning("the scheduler did not take the plugin: %s", exc)
            return


def _remember(connection: Any) -> None:
    if connection is not None:  # not lost since
        _registered.add(connection)


async def register_later(client: Any) -> None:
    """Register an asynchronous client; if that fails, warn its user."""
    connection = connection_of(client)
    try:
        await _register(client)
    except (P2PError, OSError) as exc:
        if connection is not None:
            _registered.discard(connection)
        if client.status == "running":  # not closed since
            warnings.warn(f"dask_p2p: {exc}", P2PWarning, stacklevel=2)


async def ask(scheduler: Any) -> dict[str, Any]:
    """Register the plugins with a scheduler; return its answer on failed and silent workers."""
    check_dask()
    await give_plugin(scheduler)
    reply: dict[str, Any] = await scheduler.p2p_register()
    if reply.get("status", "ok") != "ok":
        raise RegistrationError(
            f"the scheduler could not register the plugin on its workers: {reply}. Call "
            f"dask_p2p.register(client) again."
        )
    return reply


async def give_plugin(scheduler: Any) -> None:
    """Install the scheduler's plugin, unless the scheduler has it."""
    from distributed.protocol.pickle import dumps

    from dask_p2p.plugins.scheduler import P2PSchedulerPlugin, installed_version

    plugin = P2PSchedulerPlugin()
    try:
        await scheduler.register_scheduler_plugin(
            plugin=dumps(plugin), name=plugin.name, idempotent=True
        )
    except (ImportError, AttributeError) as exc:  # the scheduler cannot unpickle the plugin
        remote = await installed_version(scheduler.run_function, exc)
        raise RegistrationError(
            f"expected {this_version()} on the scheduler, got {remote}. Install the "
            f"same version on clients, scheduler and workers."
        ) from exc


def _report(reply: dict[str, Any]) -> None:
    from dask_p2p.plugins.scheduler import describe_failed_workers

    if reply["failed"]:
        raise RegistrationError(describe_failed_workers(reply["failed"]))
    if reply["silent"]:
        silent = sorted(reply["silent"])
        named = ", ".join(silent[:_MOST_NAMED]) + (", ..." if len(silent) > _MOST_NAMED else "")
        text = (
            f"{len(silent)} of {reply['workers']} workers have not answered the registration for "
            f"{tuning.current.worker_answer_s:g} s: they are busy or suspended ({named}). Tasks "
            f"sent there wait until they answer. Close workers that are dead."
        )
        warnings.warn(text, P2PWarning, stacklevel=2)


def workers_of(client: Any) -> dict[str, dict[str, Any]]:
    """Return the scheduler's information on each worker, by address; for synchronous clients.

    `Client.scheduler_info` requests the same. But the client also sends such a request
    periodically, without workers, and its answer may replace this one.
    """
    workers: dict[str, dict[str, Any]]
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return workers


def cluster_workers() -> list[dict[str, Any]]:
    """Return the scheduler's information on each worker of the current cluster.

    The list is empty without a synchronous client.
    """
    client = current_client()
    if client is None or client.asynchronous:
        return []
    return [*workers_of(client).values()]


def cluster_size() -> tuple[int, int] | None:
    """Return the number of workers of the current cluster, and the largest number of threads.

    None without a synchronous client or without workers.
    """
    if not (workers := cluster_workers()):
        return None
    return len(workers), max(worker["nthreads"] for worker in workers)
