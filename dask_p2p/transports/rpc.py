"""Calls of other workers' handlers, and replies with errors passed from one side to the other.

A reply is plain text and numbers. Its ``"status"`` is ``"ok"``, ``"missing"``, ``"mismatch"``,
``"unsuitable"``, ``"silent"`` or ``"error"``. The last four have a ``"message"``. An error also has
its ``"obstacle"``, if it has one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from functools import wraps
from typing import Any, Protocol

from dask_p2p import tuning
from dask_p2p.errors import (
    BlockMismatchError,
    DeviceLostError,
    Obstacle,
    TransferError,
    UnsupportedArrayError,
)

Handler = Callable[..., Awaitable[dict[str, Any]]]


class Caller(Protocol):
    """A worker that calls handlers of others."""

    loop: asyncio.AbstractEventLoop

    async def call(self, address: str, op: str, **kwargs: Any) -> dict[str, Any]:
        """Call the handler `op` of the worker at `address`. Raises `OSError` if unreachable."""


async def ask(
    worker: Caller, holder: str, op: str, timeout_s: float, about: Any, **kwargs: Any
) -> Any:
    """Call a holder's handler, and return the reply.

    Raises `TransferError` if the holder cannot be reached or does not answer in time (`scope`
    "holder"), if the handler fails or the reply cannot be read.
    """
    try:
        calling = asyncio.ensure_future(worker.call(holder, op, **kwargs))
        for task in (calling, asyncio.current_task()):
            if task is not None:
                # Retrieved, so that asyncio does not log an error that no caller waits for.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.wait_for(calling, timeout_s)
    except TimeoutError:
        text = f"no answer from {holder} about {about} within {timeout_s:g} s"
        raise TransferError(text, scope="holder", is_silence=True) from None
    except OSError as exc:  # connection failed or refused
        text = f"{holder} cannot be reached to ask about {about}: {exc}"
        raise TransferError(text, scope="holder", is_silence=True) from exc
    except MemoryError:  # no memory for the reply on this worker
        raise
    except Exception as exc:  # the handler's error, raised here by Dask; or an unreadable reply
        why = f"{type(exc).__name__}: {exc}"
        raise TransferError(f"{holder} could not answer about {about}: {why}", why) from exc


def ask_and_wait(
    worker: Caller, holder: str, op: str, timeout_s: float, about: Any, **kwargs: Any
) -> Any:
    """Call `ask` from a task thread.

    Raises `TransferError` also if this worker's event loop does not respond.
    """
    asking = ask(worker, holder, op, timeout_s, about, **kwargs)
    try:
        return asyncio.run_coroutine_threadsafe(asking, worker.loop).result(
            timeout_s + tuning.current.event_loop_grace_s
        )
    except TimeoutError:
        raise TransferError("the worker's event loop did not respond") from None


def rpc_handler(handler: Handler) -> Handler:
    """Return a method as an RPC handler that replies with the method's result or error."""

    @wraps(handler)
    async def reply(self: Any, /, **request: Any) -> dict[str, Any]:
        try:
            return {"status": "ok", **await handler(self, **request)}
        except Exception as exc:
            return refuse(exc)

    return reply


def refuse(exc: Exception) -> dict[str, Any]:
    """Return the reply for a holder's error, in plain text without pickled objects."""
    if isinstance(exc, (KeyError, DeviceLostError)):  # a lost device loses its blocks
        return {"status": "missing"}
    if isinstance(exc, (BlockMismatchError, UnsupportedArrayError)):
        return {"status": "mismatch", "message": str(exc)}
    if isinstance(exc, TransferError) and exc.scope == "region":
        return {"status": "unsuitable", "message": str(exc)}
    if isinstance(exc, TransferError) and exc.scope == "route" and exc.is_silence:
        return {"status": "silent", "message": str(exc)}
    text = f"{type(exc).__name__}: {exc}"
    if isinstance(exc, MemoryError):
        text = f"out of memory while packing the requested regions ({text})"
    obstacle = getattr(exc, "obstacle", None)
    extra = {} if obstacle is None else {"obstacle": astuple(obstacle)}
    return {"status": "error", "message": text, **extra}


def check_reply(reply: Any, holder: str, about: Any) -> dict[str, Any]:
    """Return a holder's reply if its status is "ok". Otherwise raise the error that it reports."""
    fields = reply if isinstance(reply, dict) else {}
    status, message = fields.get("status"), fields.get("message", reply)
    if status == "ok":
        return dict(fields)
    if status == "missing":
        raise TransferError(f"{about} is no longer there", scope="block")
    if status == "mismatch":
        raise BlockMismatchError(f"{message} (held by {holder})")
    if status == "unsuitable":
        raise TransferError(f"{about} is for another transport: {message}", scope="region")
    text = f"{holder} could not send {about}: {message}"
    if status == "silent":
        raise TransferError(text, str(message), is_silence=True)
    obstacle = fields.get("obstacle")
    raise TransferError(text, str(message), obstacle and Obstacle(*obstacle))


logger = logging.getLogger(__name__)


class Background:
    """The running coroutines of one object: the event loop has only weak references to them."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    def start(self, work: Awaitable[Any]) -> None:
        """Run a coroutine; ignore its result and its errors. On the event loop."""
        running = asyncio.ensure_future(work)
        self._running.add(running)
        running.add_done_callback(self._finished)

    def cancel(self) -> None:
        for running in self._running:
            running.cancel()

    def _finished(self, running: asyncio.Future[Any]) -> None:
        self._running.discard(running)
        if not running.cancelled() and (error := running.exception()) is not None:
            logger.debug("a coroutine in the background has failed", exc_info=error)
