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
    synchronised. Otherwise it is the reader's own: drop it when it has been read.
Failure
    `BlockUnavailableError` if the holder lacks a block or is silent, `BlockMismatchError` if a
    block is not of the declared kind, `TransferError` for anything else; its `scope` says what else
    will not come. None of them names the transport: whoever reads knows it. A block that fails
    does not keep the others of its holder from coming. Never wrong data, as far as can be told: a
    region that comes changed is found where `Options.checksum` asks for it.
Threads
    `read` and a `Reading` are used by task threads, several at a time; handlers run on the worker's
    event loop and never block it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar

from dask_p2p.backends import backend_named
from dask_p2p.config import Options, Section
from dask_p2p.errors import Obstacle, TransferError
from dask_p2p.interprocess.buffers import Buffers
from dask_p2p.transports.budget import ByteBudget
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.footprint import Footprint
from dask_p2p.transports.probe import PROBE_BYTES, PROBE_DTYPE, check_probe, probe_key
from dask_p2p.transports.reading import Reading, Request
from dask_p2p.transports.replies import Handler, answering
from dask_p2p.transports.silence import EVENT_LOOP_GRACE_S, PROBE_TIMEOUT_S
from dask_p2p.types import DType, Key, Kind

__all__ = ["Handler", "Transport", "answers"]


class Transport(ABC):
    """How regions get from worker to worker.

    Parameters
    ----------
    worker
        The worker that this transport lives on.
    options
        The worker's own, for what does not depend on a task.
    """

    name: ClassVar[str]

    #: Of the blocks that it moves.
    kinds: ClassVar[tuple[str, ...]] = ("numpy", "cupy")
    #: Whether it moves Python objects: all others move bytes.
    moves_objects: ClassVar[bool] = False
    #: Whether arrays lie in the holder's memory rather than in a copy of the reader's own.
    in_place: ClassVar[bool] = False
    #: Whether the reader's own thread, or its GPU, reads memory of this host.
    within_host: ClassVar[bool] = False
    #: Of options that it reads.
    sections: ClassVar[tuple[type[Section], ...]] = ()

    def __init__(self, worker: WorkerContext, options: Options) -> None:
        self.worker = worker
        self.options = options
        #: What is packed for readers; the transports of one worker share one.
        self.packed = ByteBudget(options.staging_limit_bytes)
        self.pools: list[Buffers] = []  # those that it has
        self.is_closed = False
        self.serving = 0  # requests; changed on the event loop only
        self._in_background: set[asyncio.Future[Any]] = set()

    @abstractmethod
    def handlers(self) -> Mapping[str, Handler]:
        """RPC handlers of the holder's side, by the name of their operation."""

    def obstacle(self, holder: str, kind: Kind, dtype: DType) -> Obstacle | None:
        """Why blocks of this kind ("numpy", "cupy") cannot come from `holder`; None if they may."""
        if kind not in self.kinds:
            titles = " and ".join(backend_named(own).title for own in self.kinds)
            return Obstacle("other-kind", f"{self.name} moves {titles} blocks, not {kind}")
        if dtype.hasobject and not self.moves_objects:
            return Obstacle("objects", f"{self.name} moves bytes, not Python objects")
        try:
            return self.holder_obstacle(holder)
        except TransferError as exc:  # it may answer the next time
            return exc.obstacle or Obstacle("no-answer", str(exc))

    def holder_obstacle(self, holder: str) -> Obstacle | None:
        """Why nothing can come from `holder`; None if blocks may. `TransferError`: nobody knows."""
        return None

    def boot_id(self, worker: str) -> str | None:
        """Return what tells the host of a worker, this one or another; None if it is not known."""
        return None

    def probe(self, holder: str, kind: Kind) -> None:
        """Bring a small known block from `holder`; raise `TransferError` if that fails.

        What is opened for it stays open.
        """
        timeouts = replace(self.options, request_timeout_s=PROBE_TIMEOUT_S)
        whole = ((0, PROBE_BYTES),)
        request = Request(probe_key(kind), holder, (PROBE_BYTES,), PROBE_DTYPE, kind, [whole])
        with closing(self.read([request], timeouts)) as reading:
            try:
                for region in reading:
                    start, _ = region.box[0]
                    check_probe(region.result(PROBE_TIMEOUT_S + EVENT_LOOP_GRACE_S), start)
            except TimeoutError:
                raise TransferError("the worker's event loop did not respond") from None

    @abstractmethod
    def read(self, requests: Sequence[Request], options: Options) -> Reading:
        """Begin to read blocks of one holder.

        Raises
        ------
        TransferError
            If nothing of it will come. What fails for one block only is told by its regions.
        """

    # --- arithmetic, which needs no worker ---

    @classmethod
    def is_in_auto(cls, options: Options, kind: Kind) -> bool:
        """Return whether it is used for blocks of this kind where the order is auto."""
        return kind in cls.kinds

    @classmethod
    @abstractmethod
    def footprint(cls, options: Options, kind: Kind) -> Footprint:
        """Return in what parts it asks for regions, and what it holds of them."""

    # --- both sides ---

    @property
    def kept_bytes(self) -> int:
        """Bytes of buffers that nobody uses, and that are kept for later."""
        return sum(buffers.idle_bytes for buffers in self.pools)

    def publish(self, blocks: Mapping[Any, Any]) -> None:  # noqa: B027  # optional
        """Note that these blocks of this worker are about to be read by others."""

    def on_released(self, key: Key) -> None:  # noqa: B027  # optional
        """Note that Dask gave up a block of this worker. Called on the event loop."""

    def on_worker_left(self, holder: str) -> None:  # noqa: B027  # optional
        """Note that a worker has left. Called on the event loop."""

    def offload(self, function: Callable[..., Any], *args: Any) -> None:
        """Have a thread run a blocking function, and go on. Called on the event loop."""
        running = asyncio.ensure_future(self.worker.offload(function, *args))
        self._in_background.add(running)  # the loop itself keeps only a weak reference
        running.add_done_callback(self._in_background.discard)

    def usage(self) -> dict[str, int]:
        """Count what is kept for others, or of others: all zero when nobody reads or is read."""
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Refuse further requests, wait for readers within reason, free everything."""


def answers(handler: Handler) -> Handler:
    """Have a method of a transport answer requests while it is open: see `answering`."""
    answered = answering(handler)

    @wraps(handler)
    async def answer(self: Transport, /, **request: Any) -> dict[str, Any]:
        if self.is_closed:
            return {"status": "error", "message": "the worker is closing"}
        self.serving += 1
        try:
            return await answered(self, **request)
        finally:
            self.serving -= 1

    return answer
