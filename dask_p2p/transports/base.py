"""What every transport promises.

A transport brings regions of blocks that another worker holds to this worker. It knows keys, boxes
and bytes; not axes, plans or Dask graphs. It has two sides in one object: as *reader* it reads
blocks of other workers, as *holder* it answers their requests with its `handlers`.

Requests
    A reader asks for all that it wants of one holder at once (`Transport.read`), and gets a
    `Reading`: an iterator of regions on their way. The transport cuts them into parts, asks for
    several ahead, and keeps below the staging limit.
Completion
    Each region can be waited for. When it is here, its array can be read on this worker: by any
    thread, or by a kernel on any stream.
Who may touch what, when
    An array is read-only. If it lies in the holder's memory (`Transport.in_place`) it is valid
    until its `Reading` is closed, and the holder's block is *leased* until then: it stays where it
    is even if Dask spills, cancels or releases it. Close only after all kernels that read are
    synchronised. Otherwise it is the reader's own: let go of it when it has been read.
Failure
    `BlockUnavailableError` if the holder lacks a block or is silent, `BlockMismatchError` if a
    block is not of the declared kind, `TransferError` for anything else. A block that fails does
    not keep the others of its holder from coming. Never wrong data, as far as can be told: a region
    that comes changed is found where `Options.checksum` asks for it.
Threads
    `read` and a `Reading` are used by task threads, several at a time; handlers run on the worker's
    event loop and never block it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from dask_p2p.config import Options
from dask_p2p.errors import (
    BlockMismatchError,
    BlockUnavailableError,
    DeviceLostError,
    TransferError,
    UnsupportedArrayError,
)
from dask_p2p.kernels import as_array, kernel_for
from dask_p2p.layout import Box, box_size, split_box, taper_last
from dask_p2p.transports.budget import Budget
from dask_p2p.transports.pacing import Pacing
from dask_p2p.transports.probe import PROBE_BYTES, check_probe, probe_key

__all__ = [
    "GRACE_S",
    "MEET_S",
    "Arrived",
    "Failed",
    "Handler",
    "Host",
    "Pacing",
    "Part",
    "Pending",
    "Reading",
    "Region",
    "Request",
    "SilentError",
    "Transport",
    "UnreachableError",
    "UnsuitableError",
    "ask",
    "check_block",
    "check_reply",
    "dtype_text",
    "find_block",
    "mismatch",
    "refuse",
]

Handler = Callable[..., Awaitable[dict[str, Any]]]

# Of a holder that stands still: an attempt at a task takes `Options.request_timeout_s` for it, and
# `MEET_S` for each transport that has not met it, whatever the number of its blocks. After
# `Options.attempts` of them, with a pause of 2 s at most between two, the task ends in an error.
#: How long to wait for a worker that is met for the first time.
MEET_S = 10.0
#: Transports keep their deadlines themselves; this much later something is wrong with them.
GRACE_S = 10.0

_BYTE = np.dtype("u1")
_LAST_PART_BYTES = 2**24  # which kernels put into place in 10 µs
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted of a block of another worker, which is as the Dask array declares it."""

    key: Any  # Dask key
    holder: str  # address of the worker that holds it
    shape: tuple[int, ...]
    dtype: Any  # numpy.dtype
    kind: str  # that is wanted here: "numpy" or "cupy"
    boxes: Sequence[Box]

    def __str__(self) -> str:
        return f"block {self.key!r} of {self.holder}"


class UnsuitableError(TransferError):
    """Another transport brings this block better. That is no failure, and nobody is warned."""


class UnreachableError(BlockUnavailableError):
    """A holder does not answer, or cannot be reached: so it is for all its blocks."""


class SilentError(TransferError):
    """Nothing came from a holder in time: so it is for all its blocks by the same transport."""


class Host(Protocol):
    """What a transport needs of the worker that it lives on."""

    address: str
    loop: AbstractEventLoop
    folder: str  # of this worker's own; it goes when the worker goes
    encrypted_only: bool  # whether nothing may leave this process unencrypted

    def block(self, key: Any) -> Any:
        """Return the block with this key, which may be a probe's; `KeyError` if it is not here.

        It may be read from disk, so this is nothing for the event loop.
        """

    def is_on_disk(self, key: Any) -> bool:
        """Tell whether a block is spilled, so that `block` would have to read it."""

    async def call(self, address: str, op: str, **kwargs: Any) -> dict[str, Any]:
        """Call the handler `op` of the worker at `address`; `OSError` if it cannot be reached."""

    async def offload(
        self, function: Callable[..., _T], *args: Any, threads: Executor | None = None
    ) -> _T:
        """Run a blocking function on a thread: of these, or of those that answer requests."""


class Pending(Protocol):
    """A region on its way; a `concurrent.futures.Future` is one."""

    def result(self, timeout_s: float | None = None, /) -> Any:
        """Wait until it is here, and return the array.

        Raises
        ------
        TransferError, BlockMismatchError
            If it will not come.
        TimeoutError
            If it does not come in time, and nobody has noticed.
        """


@dataclass(frozen=True, slots=True)
class Arrived:
    """A region that is here already."""

    region: Any

    def result(self, timeout_s: float | None = None, /) -> Any:
        """Return the array."""
        return self.region


@dataclass(frozen=True, slots=True)
class Failed:
    """A region that will not come."""

    error: Exception

    def result(self, timeout_s: float | None = None, /) -> Any:
        """Raise the error."""
        raise self.error


class Part(NamedTuple):
    """A part of what is wanted, small enough to be asked for at once."""

    request: int  # number among the requests
    piece: int  # number of the box, among those of the request
    box: Box


class Region(NamedTuple):
    """A part on its way."""

    part: Part
    pending: Pending


class Reading(ABC):
    """Regions of one holder's blocks on their way here.

    Iterating asks for one region after another.

    Attributes
    ----------
    ahead : int
        Regions that may be asked for while the one before them is put into place.
    part_bytes : int or None
        Of the largest part; None if there is no limit.
    """

    def __init__(self, requests: Sequence[Request], pacing: Pacing) -> None:
        self.requests = requests
        self.ahead = pacing.parts_in_flight
        self.part_bytes = pacing.part_bytes
        self._dropped: set[int] = set()

    @abstractmethod
    def __iter__(self) -> Iterator[Region]:
        """Ask for the next regions."""

    def drop(self, request: int) -> None:
        """Ask for nothing more of this request, which has failed."""
        self._dropped.add(request)

    def confirm(self) -> None:  # noqa: B027  # optional
        """Raise `TransferError` if what was read may be wrong, now that all reading is done.

        That is for transports whose holder can go away under a reader that cannot notice, or
        says only in the end what it has sent.
        """

    @abstractmethod
    def close(self) -> None:
        """End all leases. Whatever is still under way is given up. Idempotent."""

    def parts(self, *, is_tapered: bool = False) -> Iterator[Part]:
        """Cut what is wanted into parts, but for what was dropped.

        They are made as late as may be: a region can have hundreds of parts, and the first should
        soon be here.

        Parameters
        ----------
        is_tapered
            Whether the last parts are smaller and smaller: nothing comes any more while the end of
            the last one is put into place.
        """
        last = len(self.requests) - 1
        for number, request in enumerate(self.requests):
            itemsize = max(1, request.dtype.itemsize)
            for piece, box in enumerate(request.boxes):
                size = box_size(box)
                limit = size if self.part_bytes is None else self.part_bytes // itemsize
                boxes = split_box(box, max(1, limit)) if size else iter([box])
                if is_tapered and number == last and self.part_bytes is not None:
                    boxes = taper_last(boxes, max(1, _LAST_PART_BYTES // itemsize))
                for part in boxes:
                    if number in self._dropped:
                        break
                    yield Part(number, piece, part)


class Transport(ABC):
    """One way for regions to get from worker to worker.

    Parameters
    ----------
    host
        The worker that this transport lives on.
    options
        The worker's own, for what does not depend on a task.
    """

    name: ClassVar[str]

    #: Whether arrays lie in the holder's memory rather than in a copy of the reader's own.
    in_place: ClassVar[bool] = False

    def __init__(self, host: Host, options: Options) -> None:
        self.host = host
        self.options = options
        #: What is packed for readers; the transports of one worker share one.
        self.packed = Budget(options.staging_limit_bytes)
        self._in_background: set[asyncio.Future[Any]] = set()

    @abstractmethod
    def handlers(self) -> Mapping[str, Handler]:
        """RPC handlers of the holder's side, by the name of their operation."""

    @property
    def refusal(self) -> str | None:
        """Why nobody can read this worker's blocks by this transport; None if others may."""
        return None

    @abstractmethod
    def obstacle(self, holder: str, kind: str, dtype: Any) -> str | None:
        """Why blocks of this kind ("numpy", "cupy") cannot come from `holder`; None if they may."""

    def probe(self, holder: str, kind: str) -> None:
        """Bring a small known block from `holder`; raise `TransferError` if that fails.

        What is opened for it stays open.
        """
        timeouts = replace(self.options, request_timeout_s=MEET_S)
        whole = ((0, PROBE_BYTES),)
        request = Request(probe_key(kind), holder, (PROBE_BYTES,), _BYTE, kind, [whole])
        with closing(self.read([request], timeouts)) as reading:
            try:
                for region in reading:
                    start, _ = region.part.box[0]
                    check_probe(region.pending.result(MEET_S + GRACE_S), start)
            except TimeoutError:
                said = f"{self.name}: the worker's event loop did not respond"
                raise TransferError(said) from None

    @abstractmethod
    def read(self, requests: Sequence[Request], options: Options) -> Reading:
        """Begin to read blocks of one holder.

        Raises
        ------
        TransferError
            If nothing of it will come. What fails for one block only is told by its regions.
        """

    @abstractmethod
    def pacing(self, options: Options, kind: str) -> Pacing:
        """In what parts, and how many of them at a time, regions should be asked for."""

    def flow(self, requests: Sequence[Request], options: Options) -> Pacing:
        """Return how to ask for these requests: the pacing, as far as they allow it."""
        pacing, itemsize = self.pacing(options, requests[0].kind), requests[0].dtype.itemsize
        if pacing.part_bytes is not None and pacing.part_bytes < itemsize:
            # A part has one item at least, and so they go one at a time, or not through slots.
            pacing = Pacing(None if self.in_place else pacing.part_bytes, 0)
        return replace(pacing, parts_in_flight=0) if options.mode == "sync" else pacing

    @property
    def leased_bytes(self) -> int:
        """Bytes of this worker's blocks that are kept for readers."""
        return 0

    def serving(self, blocks: Mapping[Any, Any]) -> None:  # noqa: B027  # optional
        """Take note that these blocks of this worker are about to be read by others."""

    def released(self, key: Any) -> None:  # noqa: B027  # optional
        """Take note that Dask gave up a block of this worker. Called on the event loop."""

    def forget(self, holder: str) -> None:  # noqa: B027  # optional
        """Take note that a worker has left. Called on the event loop."""

    def offload(self, function: Callable[..., Any], *args: Any) -> None:
        """Have a thread run a blocking function, and go on. Called on the event loop."""
        running = asyncio.ensure_future(self.host.offload(function, *args))
        self._in_background.add(running)  # the loop itself keeps only a weak reference
        running.add_done_callback(self._in_background.discard)

    def held(self) -> dict[str, int]:
        """Count what is kept for others, or of others: all zero when nobody reads or is read."""
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Refuse further requests, wait for readers within reason, free everything."""


async def ask(host: Host, holder: str, op: str, timeout_s: float, about: Any, **kwargs: Any) -> Any:
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


def _retrieve_error(task: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging an error, since whoever asked may have given up by now."""
    if not task.cancelled():
        task.exception()


def check_block(array: Any, key: Any, shape: tuple[int, ...], dtype: Any = None) -> None:
    """Raise `BlockMismatchError` unless a block is what its Dask array declares.

    Without a dtype only the shape is compared: NumPy's dtypes do not all survive being sent as
    text, so a reader compares them itself when it has the data.
    """
    kernel_for(array)  # refuses masked arrays and whatever else has more than its bytes
    if tuple(array.shape) != tuple(shape) or (dtype is not None and array.dtype != dtype):
        declared = f"{tuple(shape)}" if dtype is None else f"{dtype} {tuple(shape)}"
        raise mismatch(f"block {key!r}", declared, f"{array.dtype} {tuple(array.shape)}")


def find_block(host: Host, key: Any, shape: tuple[int, ...]) -> Any:
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


def mismatch(block: Any, declared: Any, real: Any) -> BlockMismatchError:
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
    said = f"{type(exc).__name__}: {exc}"
    if isinstance(exc, MemoryError):
        said = f"out of memory for packing what was asked for ({said})"
    return {"status": "error", "message": said}


def check_reply(reply: Any, block: Request, transport: str) -> dict[str, Any]:
    """Return a holder's reply if it is a good one; else raise what it says."""
    status = reply.get("status") if isinstance(reply, dict) else None
    if status == "ok":
        return dict(reply)
    if status == "missing":
        raise BlockUnavailableError(f"{transport}: {block} is not there any more")
    if status == "mismatch":
        raise BlockMismatchError(f"{reply.get('message')} (held by {block.holder})")
    message = reply.get("message", reply) if isinstance(reply, dict) else reply
    raise TransferError(
        f"{transport}: {block.holder} could not send {block}: {message}", reason=str(message)
    )
