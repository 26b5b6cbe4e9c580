"""Requests to holders and replies to readers, with errors passed from one side to the other.

A reply is plain text and numbers. Its ``"status"`` is ``"ok"``, ``"missing"``, ``"mismatch"``,
``"unsuitable"``, ``"silent"`` or ``"error"``. The last four have a ``"message"``. An error also has
its ``"obstacle"``, if it has one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from functools import lru_cache, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

from dask_p2p.backends import as_array, backend_for
from dask_p2p.errors import (
    BlockMismatchError,
    BlockUnavailableError,
    DeviceLostError,
    Obstacle,
    SilentError,
    TransferError,
    UnreachableError,
    UnsuitableError,
    UnsupportedArrayError,
)
from dask_p2p.interprocess.requests import reject_unknown
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.silence import EVENT_LOOP_GRACE_S
from dask_p2p.types import Array, Key

if TYPE_CHECKING:
    from dask_p2p.transports.base import Request


Handler = Callable[..., Awaitable[dict[str, Any]]]

#: Errors of a holder by the status of its reply. For all other errors it is "error".
_STATUSES: dict[str, tuple[type[Exception], ...]] = {
    "missing": (KeyError, DeviceLostError),  # a lost device loses its blocks
    "mismatch": (BlockMismatchError, UnsupportedArrayError),
    "unsuitable": (UnsuitableError,),
    "silent": (SilentError,),
}


async def ask(
    worker: WorkerContext, holder: str, op: str, timeout_s: float, about: Any, **kwargs: Any
) -> Any:
    """Call a holder's handler, and return the reply.

    Raises `UnreachableError` if the holder cannot be reached or does not answer in time. Raises
    `TransferError` if the handler fails or the reply cannot be read.
    """
    try:
        calling = asyncio.ensure_future(worker.call(holder, op, **kwargs))
        for task in (calling, asyncio.current_task()):
            if task is not None:
                task.add_done_callback(_retrieve_error)
        return await asyncio.wait_for(calling, timeout_s)
    except TimeoutError:
        raise UnreachableError(
            f"no answer from {holder} about {about} within {timeout_s:g} s"
        ) from None
    except OSError as exc:  # connection failed or refused
        raise UnreachableError(f"{holder} cannot be reached to ask about {about}: {exc}") from exc
    except MemoryError:  # no memory for the reply on this worker
        raise
    except Exception as exc:  # the handler's error, raised here by Dask; or an unreadable reply
        why = f"{type(exc).__name__}: {exc}"
        raise TransferError(f"{holder} could not answer about {about}: {why}", why) from exc


def ask_and_wait(
    worker: WorkerContext, holder: str, op: str, timeout_s: float, about: Any, **kwargs: Any
) -> Any:
    """Call `ask` from a task thread.

    Raises `TransferError` also if this worker's event loop does not respond.
    """
    asking = ask(worker, holder, op, timeout_s, about, **kwargs)
    try:
        return asyncio.run_coroutine_threadsafe(asking, worker.loop).result(
            timeout_s + EVENT_LOOP_GRACE_S
        )
    except TimeoutError:
        raise TransferError("the worker's event loop did not respond") from None


def _retrieve_error(task: asyncio.Future[Any]) -> None:
    """Retrieve a task's error, so that asyncio does not log it if no caller waits any longer."""
    if not task.cancelled():
        task.exception()


def checked_block(array: Array, key: Key, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Return a block in its declared dtype. Raise `BlockMismatchError` if it differs otherwise.

    Without a dtype only the shape is compared. Not all NumPy dtypes can be sent as text, so the
    reader compares them when it has the data.
    """
    backend_for(array)  # rejects masked arrays, and others that are more than their bytes
    block = array if dtype is None else in_dtype(array, dtype)
    if tuple(array.shape) != tuple(shape) or block is None:
        declared = f"{tuple(shape)}" if dtype is None else f"{dtype} {tuple(shape)}"
        raise mismatch(f"block {key!r}", declared, f"{array.dtype} {tuple(array.shape)}")
    return block


def in_dtype(array: Array, dtype: Any) -> Any:
    """Return an array in the declared dtype; None if the dtypes differ in more than byte order.

    Dask converts arrays that a client sends to the native byte order, but declares the original.
    """
    if array.dtype == dtype:
        return array
    if backend_for(array).on_device or array.dtype.newbyteorder("=") != dtype.newbyteorder("="):
        return None
    return array.astype(dtype)


def find_block(worker: WorkerContext, key: Key, shape: tuple[int, ...]) -> Any:
    """Return the block of a reader's request, checked. Raises `KeyError` if it is not here."""
    return checked_block(as_array(worker.block(key)), key, shape)


@lru_cache(maxsize=64)  # NumPy builds the name at each call, which takes most of the time
def dtype_text(dtype: Any) -> str:
    """Return a text for a dtype, equal for equal dtypes and different for all others.

    For comparisons only: not all NumPy dtypes can be made from text.
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{shape} of {dtype_text(base)}"
    text = f"{dtype.name} {dtype.str}"
    if dtype.names is None:
        return text
    # NumPy's own text of a structured dtype has only the total size, not the fields.
    fields = ((name, *dtype.fields[name][:2]) for name in dtype.names)
    return f"{text} {[(name, offset, dtype_text(field)) for name, field, offset in fields]}"


def check_dtype_text(block: Any, declared: str, real: str) -> None:
    """Raise unless a block has the declared dtype, for a transport that moves unconverted bytes.

    Raises `UnsuitableError` if only the byte order differs, as comm can convert the block. Raises
    `BlockMismatchError` for any other difference.
    """
    if declared == real:
        return
    if declared.replace(">", "<") == real.replace(">", "<"):
        raise UnsuitableError(
            f"{block} is declared as {declared}, but it is {real}: only comm changes the byte "
            f"order. Name it in p2p.transports.order, or correct the dtype"
        )
    raise mismatch(block, declared, real)


def mismatch(block: Any, declared: Any, real: Any) -> BlockMismatchError:
    """Return the error for a block that differs from its Dask array's declaration."""
    return BlockMismatchError(
        f"{block} is declared as {declared}, but it is {real}. Correct the chunks or the dtype "
        f"where the array is made (map_blocks, from_delayed, ...)."
    )


def answering(handler: Handler) -> Handler:
    """Return a method as an RPC handler that replies with the method's result or error.

    The handler rejects unknown argument names. The method checks the values.
    """
    known = signature(handler).parameters.keys()

    @wraps(handler)
    async def answer(self: Any, /, **request: Any) -> dict[str, Any]:
        try:
            reject_unknown(request.keys() - known)
            return {"status": "ok", **await handler(self, **request)}
        except Exception as exc:
            return refuse(exc)

    return answer


def refuse(exc: Exception) -> dict[str, Any]:
    """Return the reply for a holder's error, in plain text without pickled objects."""
    for status, errors in _STATUSES.items():
        if isinstance(exc, errors):
            return {"status": status} | ({} if status == "missing" else {"message": str(exc)})
    text = f"{type(exc).__name__}: {exc}"
    if isinstance(exc, MemoryError):
        text = f"out of memory while packing the requested regions ({text})"
    obstacle = getattr(exc, "obstacle", None)
    extra = {} if obstacle is None else {"obstacle": astuple(obstacle)}
    return {"status": "error", "message": text, **extra}


def check_reply(reply: Any, block: Request) -> dict[str, Any]:
    """Return a holder's reply if its status is "ok". Otherwise raise the error that it reports."""
    fields = reply if isinstance(reply, dict) else {}
    status, message = fields.get("status"), fields.get("message", reply)
    if status == "ok":
        return dict(fields)
    if status == "missing":
        raise BlockUnavailableError(f"{block} is no longer there")
    if status == "mismatch":
        raise BlockMismatchError(f"{message} (held by {block.holder})")
    if status == "unsuitable":
        raise UnsuitableError(f"{block} is for another transport: {message}")
    text = f"{block.holder} could not send {block}: {message}"
    if status == "silent":
        raise SilentError(text, str(message))
    raise TransferError(text, str(message), _obstacle_of(fields.get("obstacle")))


def _obstacle_of(parts: Any) -> Obstacle | None:
    """Return the obstacle that a holder reports, if it is a valid one."""
    is_valid = type(parts) in (list, tuple) and [type(part) for part in parts] == 3 * [str]
    return Obstacle(*parts) if is_valid else None
