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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar

from dask_p2p.backends import RUN_BYTES, backend_named
from dask_p2p.config import Options, Section
from dask_p2p.errors import Obstacle, TransferError, without_frames
from dask_p2p.geometry import Box, Runs, box_size, split_box, taper_last
from dask_p2p.interprocess.buffers import Buffers
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.footprint import ByteBudget, Footprint
from dask_p2p.transports.probe import PROBE_BYTES, PROBE_DTYPE, check_probe, probe_key
from dask_p2p.transports.replies import Handler, answering
from dask_p2p.transports.silence import EVENT_LOOP_GRACE_S, PROBE_TIMEOUT_S
from dask_p2p.types import Array, DType, Key, Kind

LAST_PART_BYTES = 2**24  # which kernels put into place in 10 µs

#: Returns a region's array: see `Region.result`, which calls it with the same arguments.
Bring = Callable[[float | None, Array | None], Any]


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted of a block of another worker, which is as the Dask array declares it."""

    key: Any  # Dask key
    holder: str  # address of the worker that holds it
    shape: tuple[int, ...]
    dtype: DType  # numpy.dtype
    kind: Kind  # that is wanted here: "numpy" or "cupy"
    boxes: Sequence[Box]
    fast_axis: int | None = None  # of the block: along which items follow each other in the output

    def __str__(self) -> str:
        return f"block {self.key!r} of {self.holder}"

    def runs(self, box: Box) -> Runs | None:
        """Of what of a box is put into place at a time: a GPU's kernel writes them."""
        if self.kind != "cupy" or self.fast_axis is None:
            return None
        partial = (a for a, shape in enumerate(self.shape) if box[a][1] - box[a][0] < shape)
        least = RUN_BYTES // max(1, self.dtype.itemsize)
        return Runs(self.fast_axis, least, max(partial, default=0))


@dataclass(slots=True)
class Region:
    """A part of what is requested, small enough to be asked for at once."""

    request: int  # number among the requests
    piece: int  # number of the box, among those of the request
    box: Box
    bring: Bring | None = None  # once it is asked for
    done: Callable[[], bool] | None = None  # whether `bring` ends soon; None: it does
    error: Exception | None = None  # why it will not come
    prefetched: Any = None  # for the reader: what its queue copies here, if it lies elsewhere

    def on_its_way(self, bring: Bring, done: Callable[[], bool] | None = None) -> Region:
        """Return it, now that it is asked for."""
        self.bring, self.done = bring, done
        return self

    def failed(self, error: Exception) -> Region:
        """Return it as one that will not come."""
        self.error = without_frames(error)
        return self

    def is_here(self) -> bool:
        """Return whether nothing has to be waited for: `result` ends soon."""
        return self.done is None or self.done()

    def result(self, timeout_s: float | None = None, into: Array | None = None) -> Any:
        """Wait until it is here, and return its array: once. It is the caller's own from here on.

        That is `into`, where the region belongs, if the transport can bring it straight there.

        `TransferError` or `BlockMismatchError` if it will not come, `TimeoutError` if it does not
        come in time and nobody has noticed.
        """
        if self.error is not None:
            raise self.error  # `RemoteSource.give_up` drops the frames that it has then
        assert self.bring is not None
        return self.bring(timeout_s, into)


class Reading(ABC):
    """Regions of one holder's blocks on their way here: iterating asks for one after another."""

    def __init__(self, requests: Sequence[Request], footprint: Footprint, options: Options) -> None:
        self.requests = requests
        self.part_bytes = footprint.part_bytes  # of the largest; None if there is no limit
        # A part has one item at least: larger ones go one at a time.
        is_small = self.part_bytes is not None and self.part_bytes < requests[0].dtype.itemsize
        is_alone = is_small or options.mode == "sync"
        #: Regions that may be asked for while the one before them is put into place.
        self.ahead = 0 if is_alone else footprint.parts_in_flight
        self._dropped: set[int] = set()

    @abstractmethod
    def __iter__(self) -> Iterator[Region]:
        """Ask for the next regions."""

    def drop(self, request: int) -> None:
        """Ask for nothing more of this request, which has failed."""
        self._dropped.add(request)

    def confirm(self) -> None:  # noqa: B027  # optional
        """Raise `TransferError` if what was read may be wrong, now that all reading is done.

        That is for transports whose holder can go away under a reader that cannot notice.
        """

    @abstractmethod
    def close(self) -> None:
        """End all leases. Whatever is still under way is given up. Idempotent."""

    def parts(self, *, is_tapered: bool = False) -> Iterator[Region]:
        """Cut what is requested into parts, but for what was dropped.

        They are made as late as may be: a region can have hundreds of parts, and the first should
        soon be here. With `is_tapered` the last parts are smaller and smaller: nothing comes any
        more while the end of the last one is put into place.
        """
        last = len(self.requests) - 1
        for number, request in enumerate(self.requests):
            itemsize = max(1, request.dtype.itemsize)
            for piece, box in enumerate(request.boxes):
                size, runs = box_size(box), request.runs(box)
                limit = size if self.part_bytes is None else self.part_bytes // itemsize
                boxes = split_box(box, max(1, limit), runs) if size else iter([box])
                if is_tapered and number == last and self.part_bytes is not None:
                    boxes = taper_last(boxes, max(1, LAST_PART_BYTES // itemsize), runs)
                for part in boxes:
                    if number in self._dropped:
                        break
                    yield Region(number, piece, part)


class Transport(ABC):
    """How regions get from worker to worker."""

    name: ClassVar[str]

    #: Of the blocks that it moves.
    kinds: ClassVar[tuple[str, ...]] = ("numpy", "cupy")
    #: Whether it moves Python objects: all others move bytes.
    moves_objects: ClassVar[bool] = False
    #: Whether arrays lie in the holder's memory rather than in a copy of the reader's own. Then
    #: none has to be waited for.
    in_place: ClassVar[bool] = False
    #: Whether the reader's own thread, or its GPU, reads memory of this host.
    within_host: ClassVar[bool] = False
    #: Of options that it reads.
    sections: ClassVar[tuple[type[Section], ...]] = ()

    def __init__(self, worker: WorkerContext, options: Options) -> None:
        self.worker = worker  # that it is on
        self.options = options  # the worker's own, for what does not depend on a task
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
        """Begin to read blocks of one holder; `TransferError` if nothing of it will come.

        What fails for one block only is told by its regions.
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
