"""How the plugins get onto a cluster.

The client, or a worker that lacks them, gives the scheduler its plugin
(`dask_p2p.plugins.scheduler`); that sees to the workers.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
import weakref
from collections.abc import Awaitable, Sequence
from typing import Any, overload
from weakref import WeakSet

from dask_p2p.engine.task import current_worker
from dask_p2p.errors import P2PError, P2PWarning, RegistrationError
from dask_p2p.inputs import checked_client
from dask_p2p.plugins.notices import warn_of_whole_blocks
from dask_p2p.types import AsynchronousClient, Client, Key
from dask_p2p.versioned import check_dask, this_version

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_MOST_NAMED = 4  # workers in a warning
_LIBRARIES = ("dask_p2p", "dask", "distributed", "xarray")  # whose lines no warning is about
_LOOK_S = 0.5  # for another scheduler at a client's address
#: Connections of clients to schedulers that have the plugins. A client may outlive its scheduler
#: and connect to the next one at the same address; a connection does not.
_registered: WeakSet[Any] = WeakSet()
_watched: WeakSet[Any] = WeakSet()  # clients that are looked after: see `_watch`
askers: WeakSet[Any] = WeakSet()  # workers that lack the plugin, and have asked for it


@overload
def register(client: Client | None = None) -> None: ...


@overload
def register(client: AsynchronousClient) -> Awaitable[None]: ...


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
    ValueError, InputError
        If there is no client, or it is closed.
    RegistrationError
        If the scheduler or a worker cannot take part, since it lacks the package, has another
        version of it, or runs a release of Dask that this version does not work with.
    """
    client = checked_client(client)
    if client.asynchronous:
        return _register_async(client)
    # A warning is issued in this thread, not on the event loop, so it has the user's line.
    connection = connection_of(client)
    _report(client.sync(_prepare, client))
    _note(client, connection)
    return None


def connection_of(client: Any) -> Any:
    """Return a client's connection to its scheduler, which ends with the scheduler.

    State about a cluster is kept by the connection. None while there is none.
    """
    return getattr(client, "scheduler_comm", None)


def current_client() -> Any:
    """Return the current client, if there is one and it is connected."""
    # Without distributed imported there cannot be a client, and importing it takes a while.
    if "distributed" not in sys.modules:
        return None
    from distributed import default_client

    try:
        client = default_client()
    except ValueError:
        return None
    return client if client.status == "running" else None


def register_if_possible() -> None:
    """Register with the current client, or within a task for its worker.

    Once with each scheduler: a client may find another one when it connects again.
    """
    if "distributed" not in sys.modules:
        return
    from distributed.utils import sync

    worker, context = current_worker()
    if worker is not None:
        if context is None:
            _report(sync(worker.loop, ask, worker.scheduler))
        return
    client = current_client()
    if client is None or connection_of(client) in _registered:
        return
    if client.asynchronous:
        _note(client, connection_of(client))
        client.loop.add_callback(register_later, client)
    else:
        register(client)


def on_missing_plugin(worker: Any, keys: Sequence[Key]) -> None:
    """Note that a task, which has blocks of these keys, runs on a worker without the plugin.

    It is asked for, so that later tasks have it.
    """
    if worker not in askers:
        askers.add(worker)
        worker.loop.add_callback(ask_later, worker)
    warn_of_whole_blocks(worker, keys)


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
    connection = connection_of(client)
    _report(await _prepare(client))
    _note(client, connection)


def _note(client: Any, connection: Any) -> None:
    """Note that the scheduler of a connection has the plugins, or is about to."""
    if connection is None:  # lost meanwhile
        return
    _registered.add(connection)
    if client not in _watched:
        _watched.add(client)
        client.loop.add_callback(_watch, weakref.ref(client), weakref.ref(connection))


def _watch(reference: weakref.ref[Any], known: weakref.ref[Any]) -> None:
    """Register again when a client has found another scheduler: some of its graphs are older.

    Once with each. Runs on the client's event loop, as long as the client is open.
    """
    client = reference()
    if client is None or client.status in ("closing", "closed"):
        return
    connection = connection_of(client)
    if client.status == "running" and connection not in (None, known()):
        known = weakref.ref(connection)
        if connection not in _registered:
            _registered.add(connection)
            client.loop.add_callback(register_later, client)
    client.loop.call_later(_LOOK_S, _watch, reference, known)


async def _prepare(client: Any) -> dict[str, Any]:
    """Have a client's cluster take part, as far as it does; return what `ask` does."""
    check_dask()
    return await ask(client.scheduler)


async def register_later(client: Any) -> None:
    """Register an asynchronous client; if that fails, warn its user."""
    connection = connection_of(client)
    try:
        await _register_async(client)
    except (P2PError, OSError) as exc:
        if connection is not None:
            _registered.discard(connection)
        if client.status == "running":  # and has not been closed meanwhile
            warnings.warn(f"dask_p2p: {exc}", P2PWarning, stacklevel=2)


async def ask(scheduler: Any) -> dict[str, Any]:
    """Ask a scheduler to have all workers take part; return which cannot, and which are silent."""
    await _give_plugin(scheduler)
    answer: dict[str, Any] = await scheduler.p2p_register()
    if answer.get("status", "ok") != "ok":
        raise RegistrationError(f"the scheduler could not reach its workers: {answer}")
    return answer


async def _give_plugin(scheduler: Any) -> None:
    from distributed.protocol.pickle import dumps

    from dask_p2p.plugins.scheduler import P2PSchedulerPlugin, installed_version

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
    from dask_p2p.plugins.scheduler import ANSWER_S, cannot_take_part

    if answer["failed"]:
        raise RegistrationError(cannot_take_part(answer["failed"]))
    if answer["silent"]:
        silent = sorted(answer["silent"])
        named = ", ".join(silent[:_MOST_NAMED]) + (", ..." if len(silent) > _MOST_NAMED else "")
        text = (
            f"{len(silent)} of {answer['workers']} workers have not answered the registration for "
            f"{ANSWER_S:g} s: they are busy or suspended ({named}). Tasks sent there wait until "
            f"they answer; close a worker that is dead."
        )
        warnings.warn(text, P2PWarning, stacklevel=_level_of_user())


def _level_of_user() -> int:
    """Return the `stacklevel` of the line that led here from outside: the user's, as a rule."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    return level


def workers_of(client: Any) -> dict[str, dict[str, Any]]:
    """Return what the scheduler says of each worker, by address, to a synchronous client.

    `Client.scheduler_info` asks for the same, but the client itself asks now and then, for no
    workers, and may put its own answer in the place of this one.
    """
    workers: dict[str, dict[str, Any]]
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return workers


def cluster_size() -> tuple[int, int] | None:
    """Return the workers of the current cluster, and the most threads of one; None without any."""
    client = current_client()
    if client is None or client.asynchronous:
        return None
    workers = workers_of(client)
    if not workers:
        return None
    return len(workers), max(worker["nthreads"] for worker in workers.values())
