"""Asking holders, and answering readers: errors on one side are reported on the other.

A holder's answer is plain text and numbers. Its ``"status"`` is ``"ok"``, ``"missing"``,
``"mismatch"``, ``"unsuitable"``, ``"silent"`` or ``"error"``. The last four come with a
``"message"``, and an error with the ``"obstacle"`` too, where that is known.
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

#: What a holder answers in the place of these errors; of all others, "error".
_STATUSES: dict[str, tuple[type[Exception], ...]] = {
    "missing": (KeyError, DeviceLostError),  # with the device its blocks are lost
    "mismatch": (BlockMismatchError, UnsupportedArrayError),
    "unsuitable": (UnsuitableError,),
    "silent": (SilentError,),
}


async def ask(
    worker: WorkerContext, holder: str, op: str, timeout_s: float, about: Any, **kwargs: Any
) -> Any:
    """Call a holder's handler.

    It raises `UnreachableError` if the holder cannot be reached, or does not answer in time;
    `TransferError` if its handler raises, or its answer cannot be read.
    """
    try:
        calling = asyncio.ensure_future(worker.call(holder, op, **kwargs))
        for task in (calling, asyncio.current_task()):
            if task is not None:
                task.add_done_callback(_retrieve_error)
        return await asyncio.wait_for(calling, timeout_s)
    except TimeoutError:
        raise UnreachableError(
            f"no answer of {holder} about {about} within {timeout_s:g} s"
        ) from None
    except OSError as exc:  # connections that break, or cannot be made
        raise UnreachableError(f"{holder} cannot be reached about {about}: {exc}") from exc
    except MemoryError:  # for the answer, here
        raise
    except Exception as exc:  # of the holder's, which Dask raises here; or its answer is garbled
        why = f"{type(exc).__name__}: {exc}"
        raise TransferError(f"{holder} could not answer about {about}: {why}", why) from exc


def ask_and_wait(
    worker: WorkerContext, holder: str, op: str, timeout_s: float, about: Any, **kwargs: Any
) -> Any:
    """Do the same from a task thread.

    It raises `TransferError`, too, if this worker's event loop does not respond.
    """
    asking = ask(worker, holder, op, timeout_s, about, **kwargs)
    try:
        return asyncio.run_coroutine_threadsafe(asking, worker.loop).result(
            timeout_s + EVENT_LOOP_GRACE_S
        )
    except TimeoutError:
        raise TransferError("the worker's event loop did not respond") from None


def _retrieve_error(task: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging an error that nobody waits for any longer."""
    if not task.cancelled():
        task.exception()


def checked_block(array: Array, key: Key, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Return a block as its Dask array declares it; raise `BlockMismatchError` if it is not.

    Without a dtype only the shape is compared: NumPy's dtypes do not all survive being sent as
    text, so a reader compares them itself when it has the data.
    """
    backend_for(array)  # refuses masked arrays and whatever else has more than its bytes
    block = array if dtype is None else in_dtype(array, dtype)
    if tuple(array.shape) != tuple(shape) or block is None:
        declared = f"{tuple(shape)}" if dtype is None else f"{dtype} {tuple(shape)}"
        raise mismatch(f"block {key!r}", declared, f"{array.dtype} {tuple(array.shape)}")
    return block


def in_dtype(array: Array, dtype: Any) -> Any:
    """Return an array in the dtype that is declared; None if they differ in more than byte order.

    Dask makes native arrays of the others that a client sends, and declares them as they were.
    """
    if array.dtype == dtype:
        return array
    if backend_for(array).on_device or array.dtype.newbyteorder("=") != dtype.newbyteorder("="):
        return None
    return array.astype(dtype)


def find_block(worker: WorkerContext, key: Key, shape: tuple[int, ...]) -> Any:
    """Return the block that a reader asks for, checked; `KeyError` if it is not here."""
    return checked_block(as_array(worker.block(key)), key, shape)


@lru_cache(maxsize=64)  # NumPy makes the name anew each time, which takes longer than the rest
def dtype_text(dtype: Any) -> str:
    """Return a dtype as text that is the same for equal ones, and for no others.

    It is for comparing: NumPy's dtypes cannot all be made from text again.
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{shape} of {dtype_text(base)}"
    text = f"{dtype.name} {dtype.str}"
    if dtype.names is None:
        return text
    # Of its fields NumPy's own text says no more than how many bytes they are.
    fields = ((name, *dtype.fields[name][:2]) for name in dtype.names)
    return f"{text} {[(name, offset, dtype_text(field)) for name, field, offset in fields]}"


def check_dtype_text(block: Any, declared: str, real: str) -> None:
    """Raise unless a block is of the declared dtype, for a transport that moves bytes as they are.

    It raises `UnsuitableError` if only the byte order differs: that is for a transport whose reader
    converts what comes; else `BlockMismatchError`.
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
    """Return the error for a block that is not what its Dask array declares."""
    return BlockMismatchError(
        f"{block} is declared as {declared}, but it is {real}. Correct the chunks or the dtype "
        f"where the array is made (map_blocks, from_delayed, ...)."
    )


def answering(handler: Handler) -> Handler:
    """Have a method answer requests: with what it returns, or why that failed.

    A request has its arguments by name, and no others. What they hold is for the method to check.
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
    """Turn a holder's error into a reply: plain text, nothing that is unpickled."""
    for status, errors in _STATUSES.items():
        if isinstance(exc, errors):
            return {"status": status} | ({} if status == "missing" else {"message": str(exc)})
    text = f"{type(exc).__name__}: {exc}"
    if isinstance(exc, MemoryError):
        text = f"out of memory for packing what was asked for ({text})"
    obstacle = getattr(exc, "obstacle", None)
    extra = {} if obstacle is None else {"obstacle": astuple(obstacle)}
    return {"status": "error", "message": text, **extra}


def check_reply(reply: Any, block: Request) -> dict[str, Any]:
    """Return a holder's reply if its status is "ok"; else raise the error that it reports."""
    told = reply if isinstance(reply, dict) else {}
    status, message = told.get("status"), told.get("message", reply)
    if status == "ok":
        return dict(told)
    if status == "missing":
        raise BlockUnavailableError(f"{block} is not there any more")
    if status == "mismatch":
        raise BlockMismatchError(f"{message} (held by {block.holder})")
    if status == "unsuitable":
        raise UnsuitableError(f"{block} is for another transport: {message}")
    text = f"{block.holder} could not send {block}: {message}"
    if status == "silent":
        raise SilentError(text, str(message))
    raise TransferError(text, str(message), _obstacle_of(told.get("obstacle")))


def _obstacle_of(parts: Any) -> Obstacle | None:
    """Return the obstacle that a holder reports, if it is a valid one."""
    is_valid = type(parts) in (list, tuple) and [type(part) for part in parts] == 3 * [str]
    return Obstacle(*parts) if is_valid else None
