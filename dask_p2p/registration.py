"""How the plugins get onto a cluster.

The client, or a worker that lacks them, gives the scheduler its plugin (`dask_p2p.scheduler`); that
sees to the workers.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from functools import partial
from typing import Any
from weakref import WeakSet, proxy

from dask_p2p.config import options
from dask_p2p.errors import P2PError, P2PWarning, RegistrationError
from dask_p2p.task import assemble_block, whereabouts
from dask_p2p.versioned import check_dask, this_version

__all__ = [
    "ask_later",
    "assemble",
    "cluster_size",
    "register",
    "register_if_possible",
    "workers_of",
]

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_registered: WeakSet[Any] = WeakSet()  # clients whose cluster has the plugins
_asked: WeakSet[Any] = WeakSet()  # workers that lack the plugin, and have asked for it


def register(client: Any = None) -> Any:
    """Put the plugins on a cluster: on its scheduler, its workers, and those that join later.

    Calling it again changes nothing. `dask_p2p.transpose` calls it by itself where it finds a
    client; an asynchronous one registers while `transpose` goes on. A worker that does not answer
    for ten seconds is named in a warning, and gets the plugin when it goes on.

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
    RegistrationError
        If the scheduler or a worker cannot take part, since it lacks the package, has another
        version of it, or runs a release of Dask that this version does not work with.
    """
    from distributed import default_client

    client = default_client(client)
    if client.asynchronous:
        return _register_async(client)
    client.sync(_register_async, client)
    return None


def register_if_possible() -> None:
    """Register with the current client, once with each, or within a task for its worker."""
    # Without distributed imported there cannot be a client, and importing it takes a while.
    if "distributed" not in sys.modules:
        return
    from distributed import default_client
    from distributed.utils import sync

    worker, runtime = whereabouts()
    if worker is not None:
        if runtime is None:
            _report(sync(worker.loop, _ask, worker.scheduler))
        return
    try:
        client = default_client()
    except ValueError:
        return
    if client in _registered or client.status != "running":
        return
    if client.asynchronous:
        _registered.add(client)
        client.loop.add_callback(_register_later, client)
    else:
        register(client)


def assemble(*args: Any) -> Any:
    """Do a task's work; where the plugin is missing, ask for it, so that later tasks have it."""
    worker, runtime = whereabouts()
    if worker is not None and runtime is None and worker not in _asked:
        _asked.add(worker)
        worker.loop.add_callback(ask_later, worker)
    return assemble_block(*args)


async def ask_later(worker: Any) -> None:
    """Have the scheduler put the plugins on the cluster, as soon as it can be reached."""
    from distributed.core import Status

    while worker.status in (Status.init, Status.running, Status.paused):
        try:
            await _give_plugin(worker.scheduler)
            return
        except OSError:
            await asyncio.sleep(_RETRY_S)
        except Exception as exc:  # it works without, if slower
            logger.warning("the scheduler did not take the plugin: %s", exc)
            return


async def _register_async(client: Any) -> None:
    check_dask()
    client._get_versions = partial(_get_versions, proxy(client))
    if options().low_latency:
        from dask_p2p.low_latency import shorten

        shorten(client.scheduler_comm)
    _report(await _ask(client.scheduler))
    _registered.add(client)


async def _get_versions(client: Any, check: bool = False, packages: Any = None) -> Any:
    """Do what `Client.get_versions` does, with this package among the others.

    A place in Dask's own list would not do. What is in there is compared whenever somebody
    connects, and processes that have not loaded this package would seem to lack it.
    """
    from distributed import Client

    return await Client._get_versions(client, check, [*(packages or ()), "dask-p2p"])


async def _register_later(client: Any) -> None:
    try:
        await _register_async(client)
    except (P2PError, OSError) as exc:
        _registered.discard(client)
        if client.status == "running":  # and has not been closed meanwhile
            warnings.warn(f"dask_p2p: {exc}", P2PWarning, stacklevel=2)


async def _ask(scheduler: Any) -> dict[str, Any]:
    """Ask a scheduler to have all workers take part; return which cannot, and which are silent."""
    await _give_plugin(scheduler)
    answer: dict[str, Any] = await scheduler.p2p_register()
    return answer


async def _give_plugin(scheduler: Any) -> None:
    from distributed.protocol.pickle import dumps

    from dask_p2p.scheduler import P2PSchedulerPlugin, installed_version

    plugin = P2PSchedulerPlugin()
    try:
        await scheduler.register_scheduler_plugin(
            plugin=dumps(plugin), name=plugin.name, idempotent=True
        )
    except (ImportError, AttributeError) as exc:  # it cannot read the plugin
        remote = await installed_version(scheduler.run_function)
        raise RegistrationError(
            f"expected {this_version()} on the scheduler, got {remote} ({exc}). Install the same "
            f"version on clients, scheduler and workers."
        ) from exc


def _report(answer: dict[str, Any]) -> None:
    """Raise if workers cannot take part, and warn of those that do not answer."""
    from dask_p2p.scheduler import ANSWER_S, cannot_take_part

    if answer["failed"]:
        raise RegistrationError(cannot_take_part(answer["failed"]))
    if answer["silent"]:
        text = (
            f"no answer of {', '.join(sorted(answer['silent']))} within {ANSWER_S:g} s: what is "
            f"sent there waits. If it goes on, it takes part; if not, close it."
        )
        warnings.warn(text, P2PWarning, stacklevel=4)


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


def cluster_size() -> tuple[int, int] | None:
    """Return the workers of the current cluster, and the most threads of one; None without any."""
    if "distributed" not in sys.modules:
        return None
    from distributed import default_client

    try:
        client = default_client()
    except ValueError:
        return None
    if client.asynchronous or client.status != "running":
        return None
    workers = workers_of(client)
    if not workers:
        return None
    return len(workers), max(worker["nthreads"] for worker in workers.values())
