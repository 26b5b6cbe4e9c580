"""Asking holders, and answering readers: errors on one side are reported on the other.

A holder's answer is plain text and numbers. Its ``"status"`` is ``"ok"``, ``"missing"``,
``"mismatch"``, ``"unsuitable"`` or ``"error"``. The last three come with a ``"message"``, and an
error with the ``"obstacle"`` too, where that is known.
"""

from __future__ import annotations

import asyncio
from dataclasses import astuple
from functools import lru_cache
from typing import Any

from dask_p2p.backends import as_array, backend_for
from dask_p2p.errors import (
    BlockMismatchError,
    BlockUnavailableError,
    DeviceLostError,
    Obstacle,
    TransferError,
    UnreachableError,
    UnsuitableError,
    UnsupportedArrayError,
)
from dask_p2p.retry import GRACE_S
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.reading import Request
from dask_p2p.types import Array, Key

__all__ = [
    "ask",
    "ask_and_wait",
    "check_block",
    "check_reply",
    "dtype_text",
    "find_block",
    "mismatch",
    "refuse",
]


async def ask(
    host: WorkerContext, holder: str, op: str, timeout_s: float, about: Any, **kwargs: Any
) -> Any:
    """Call a holder's handler.

    Raises
    ------
    UnreachableError
        If the holder cannot be reached, or does not answer in time.
    TransferError
        If its handler raises, or its answer cannot be read.
    """
    try:
        calling = asyncio.ensure_future(host.call(holder, op, **kwargs))
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
    transport: str,
    host: WorkerContext,
    holder: str,
    op: str,
    timeout_s: float,
    about: Any,
    **kwargs: Any,
) -> Any:
    """Do the same from a task thread, for a transport of this name.

    Raises
    ------
    TransferError
        In place of an answer, too, if this worker's event loop does not respond.
    """
    asking = ask(host, holder, op, timeout_s, about, **kwargs)
    try:
        return asyncio.run_coroutine_threadsafe(asking, host.loop).result(timeout_s + GRACE_S)
    except TimeoutError:
        raise TransferError(f"{transport}: the worker's event loop did not respond") from None


def _retrieve_error(task: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging an error that nobody waits for any longer."""
    if not task.cancelled():
        task.exception()


def check_block(array: Array, key: Key, shape: tuple[int, ...], dtype: Any = None) -> None:
    """Raise `BlockMismatchError` unless a block is what its Dask array declares.

    Without a dtype only the shape is compared: NumPy's dtypes do not all survive being sent as
    text, so a reader compares them itself when it has the data.
    """
    backend_for(array)  # refuses masked arrays and whatever else has more than its bytes
    if tuple(array.shape) != tuple(shape) or (dtype is not None and array.dtype != dtype):
        declared = f"{tuple(shape)}" if dtype is None else f"{dtype} {tuple(shape)}"
        raise mismatch(f"block {key!r}", declared, f"{array.dtype} {tuple(array.shape)}")


def find_block(host: WorkerContext, key: Key, shape: tuple[int, ...]) -> Any:
    """Return the block that a reader asks for.

    Raises
    ------
    KeyError
        If it is not here.
    BlockMismatchError, UnsupportedArrayError
        If it is not of the shape that the reader expects, or has more than its bytes.
    """
    block = as_array(host.block(key))
    check_block(block, key, shape)
    return block


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


def mismatch(block: Array, declared: Any, real: Any) -> BlockMismatchError:
    """Return the error for a block that is not what its Dask array declares."""
    return BlockMismatchError(
        f"{block} is declared as {declared}, but it is {real}. Correct the chunks or the dtype "
        f"where the array is made (map_blocks, from_delayed, ...)."
    )


def refuse(exc: Exception) -> dict[str, Any]:
    """Turn a holder's error into a reply: plain text, nothing that is unpickled."""
    if isinstance(exc, (KeyError, DeviceLostError)):  # with the device its blocks are lost
        return {"status": "missing"}
    if isinstance(exc, (BlockMismatchError, UnsupportedArrayError)):
        return {"status": "mismatch", "message": str(exc)}
    if isinstance(exc, UnsuitableError):
        return {"status": "unsuitable", "message": str(exc)}
    text = f"{type(exc).__name__}: {exc}"
    if isinstance(exc, MemoryError):
        text = f"out of memory for packing what was asked for ({text})"
    obstacle = getattr(exc, "obstacle", None)
    extra = {} if obstacle is None else {"obstacle": astuple(obstacle)}
    return {"status": "error", "message": text, **extra}


def check_reply(reply: Any, block: Request, transport: str) -> dict[str, Any]:
    """Return a holder's reply if its status is "ok"; else raise the error that it reports."""
    status = reply.get("status") if isinstance(reply, dict) else None
    if status == "ok":
        return dict(reply)
    if status == "missing":
        raise BlockUnavailableError(f"{transport}: {block} is not there any more")
    if status == "mismatch":
        raise BlockMismatchError(f"{reply.get('message')} (held by {block.holder})")
    message = reply.get("message", reply) if isinstance(reply, dict) else reply
    if status == "unsuitable":
        raise UnsuitableError(f"{transport} is not for {block}: {message}")
    text = f"{transport}: {block.holder} could not send {block}: {message}"
    raise TransferError(text, str(message), _obstacle_of(reply))


def _obstacle_of(reply: Any) -> Obstacle | None:
    """Return the obstacle that a holder reports, if it is a valid one."""
    parts: Any = reply.get("obstacle") if isinstance(reply, dict) else None
    if type(parts) not in (list, tuple) or any(type(part) is not str for part in parts):
        return None
    return Obstacle(*parts) if len(parts) == 3 else None
