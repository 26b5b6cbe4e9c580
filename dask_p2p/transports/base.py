"""The contract of transports.

A transport moves regions of blocks from another worker to this one. It deals with keys, boxes and
bytes, not with axes, plans or Dask graphs. One object has two sides: as *reader* it reads blocks of
other workers, as *holder* it answers their requests by its `handlers`.

Requests
    A reader requests all regions of one holder in one call (`Transport.read`), and gets a
    `Reading`: an iterator of regions in transfer. The transport divides them into parts, requests
    several ahead, and stays below the staging limit.
Completion
    Each region can be awaited. On completion its array can be read on this worker, by any thread
    or by a kernel on any stream.
Ownership
    An array is read-only. With `Transport.in_place` it lies in the holder's memory, and is valid
    until its `Reading` is closed. Until then the holder's block is *leased*: it stays in place even
    if Dask spills, cancels or releases it. Close only after all reading kernels are synchronised.
    Without `in_place` the reader owns the array, and drops it after use.
Failure
    `BlockMismatchError` if a block differs from its declaration; `TransferError` for all other
    failures. The `scope` of such an error is the set of reads that fail with it. It is "block" if
    the holder lacks the block, "holder" if it is silent, and "region" if another transport suits
    the block better. Messages do not name the transport: callers do. A block's failure does not
    affect other blocks of its holder. Transports do not deliver wrong data knowingly.
Threads
    Several task threads use `read` and `Reading` objects concurrently. Handlers run on the worker's
    event loop and never block it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar, cast

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends import as_array, backend_for, backend_named, checked_block
from dask_p2p.config import Options
from dask_p2p.errors import Obstacle, TransferError, without_frames
from dask_p2p.geometry import Box, ContiguousRuns, box_size, split_box, taper_last
from dask_p2p.transports.buffers import Buffers, ByteBudget, Footprint
from dask_p2p.transports.rpc import Background, Caller, Handler
from dask_p2p.types import Array, DType, Key, Kind

PROBE_TIMEOUT_S = 10.0  # of the first request to a worker
LAST_PART_BYTES = 2**24  # written to the output by a kernel in 10 µs

#: Function that returns a region's array. `Region.result` calls it with the same arguments.
Bring = Callable[[float | None, Array | None], Any]


@dataclass(frozen=True, slots=True)
class Request:
    """A request for regions of one block of another worker.

    Shape and dtype are those that the Dask array declares.
    """

    key: Any  # Dask key
    holder: str  # address of the worker that holds the block
    shape: tuple[int, ...]
    dtype: DType  # numpy.dtype
    kind: Kind  # kind of the arrays on this worker: "numpy" or "cupy"
    boxes: Sequence[Box]
    fast_axis: int | None = None  # axis of the block that becomes the output's last axis

    def __str__(self) -> str:
        return f"block {self.key!r} of {self.holder}"

    def runs(self, box: Box) -> ContiguousRuns | None:
        """Return the runs of a box that a GPU kernel writes at a time; None on a CPU."""
        if self.kind != "cupy" or self.fast_axis is None:
            return None
        partial = (a for a, shape in enumerate(self.shape) if box[a][1] - box[a][0] < shape)
        least = tuning.current.gpu_row_bytes // max(1, self.dtype.itemsize)
        return ContiguousRuns(self.fast_axis, least, max(partial, default=0))


@dataclass(slots=True)
class Region:
    """A part of a requested box, small enough for one transfer."""

    request: int  # index of the request
    piece: int  # index of the box in the request
    box: Box
    bring: Bring | None = None  # function that returns the array; set when requested
    has_arrived: Callable[[], bool] | None = None  # True if `bring` returns soon; None: always
    error: Exception | None = None  # the error, if the transfer failed
    prefetched: Any = None  # the reader's local copy, if the array lies elsewhere

    def mark_requested(self, bring: Bring, has_arrived: Callable[[], bool] | None = None) -> Region:
        self.bring, self.has_arrived = bring, has_arrived
        return self

    def mark_failed(self, error: Exception) -> Region:
        self.error = without_frames(error)
        return self

    def is_ready(self) -> bool:
        """Return whether `result` returns soon, without waiting for the holder."""
        return self.has_arrived is None or self.has_arrived()

    def result(self, timeout_s: float | None = None, into: Array | None = None) -> Any:
        """Wait for the region, and return its array, which the caller then owns. Call it once.

        The array is `into` if the transport can write the region directly into it.

        Raises `TransferError` or `BlockMismatchError` if the transfer failed. Raises `TimeoutError`
        if neither the array nor an error has come in time.
        """
        if self.error is not None:
            raise self.error  # `RemoteSource.give_up` drops the frames that it has then
        assert self.bring is not None
        return self.bring(timeout_s, into)


class Reading(ABC):
    """Regions of one holder's blocks in transfer. Each step of the iteration requests the next."""

    def __init__(self, requests: Sequence[Request], footprint: Footprint) -> None:
        self.requests = requests
        self.part_bytes = footprint.part_bytes  # upper bound of a part's size; None: unlimited
        # A part has at least one item. Items larger than a part are transferred one at a time.
        is_small = self.part_bytes is not None and self.part_bytes < requests[0].dtype.itemsize
        #: Number of regions to request ahead, while the one before them is written to the output.
        self.ahead = 0 if is_small else footprint.parts_in_flight
        self._dropped: set[int] = set()

    @abstractmethod
    def __iter__(self) -> Iterator[Region]:
        """Request and yield one region after another."""

    def drop(self, request: int) -> None:
        self._dropped.add(request)

    def confirm(self) -> None:  # noqa: B027  # optional
        """Raise `TransferError` if the data may be wrong. Called after all reading is done.

        For transports whose holder may exit during a read without the reader's notice.
        """

    @abstractmethod
    def close(self) -> None:
        """End all leases, and cancel unfinished transfers. Idempotent."""

    def parts(self, *, is_tapered: bool = False) -> Iterator[Region]:
        """Divide the requested regions into parts, except those of dropped requests.

        Parts are made lazily: a region can have hundreds, and the first transfer should start
        early. With `is_tapered` the last parts get smaller and smaller, because no transfer
        overlaps the writing of the last one.
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
    """A way to move regions from worker to worker."""

    name: ClassVar[str]

    #: Kinds of the blocks that the transport moves.
    kinds: ClassVar[tuple[str, ...]] = ("numpy", "cupy")
    #: True if the transport moves Python objects. All others move bytes only.
    moves_objects: ClassVar[bool] = False
    #: True if arrays stay in the holder's memory, so that no transfer has to be awaited. False if
    #: the reader gets copies of its own.
    in_place: ClassVar[bool] = False
    #: True if the reader's own thread, or its GPU, reads memory of this host.
    within_host: ClassVar[bool] = False

    def __init__(self, worker: WorkerContext, options: Options) -> None:
        self.worker = worker
        self.options = options  # the worker's, for settings that do not depend on a task
        #: Memory of regions packed for readers, one budget for all transports of a worker.
        self.packed = ByteBudget(options.staging_limit_bytes)
        self.pools: list[Buffers] = []  # the transport's buffers
        self.is_closed = False
        self._background = Background()

    @abstractmethod
    def handlers(self) -> Mapping[str, Handler]:
        """Return the RPC handlers of the holder's side, by the name of their operation."""

    def obstacle(self, holder: str, kind: Kind, dtype: DType) -> Obstacle | None:
        """Return the obstacle to reading blocks of this kind from `holder`; None without one."""
        if kind not in self.kinds:
            titles = " and ".join(backend_named(own_kind).title for own_kind in self.kinds)
            return Obstacle("other-kind", f"{self.name} moves {titles} blocks, not {kind}")
        if dtype.hasobject and not self.moves_objects:
            return Obstacle("objects", f"{self.name} moves bytes, not Python objects")
        try:
            return self.holder_obstacle(holder)
        except TransferError as exc:  # temporary: the next call asks again
            return exc.obstacle or Obstacle("no-answer", str(exc))

    def holder_obstacle(self, holder: str) -> Obstacle | None:
        """Return the obstacle to reading any block from `holder`; None without one.

        Raises `TransferError` if the holder did not answer.
        """
        return None

    def boot_id(self, worker: str) -> str | None:
        """Return an identifier of a worker's host (this worker's or another's); None if unknown."""
        return None

    def probe(self, holder: str, kind: Kind) -> None:
        """Read a small known block from `holder`; raise `TransferError` if the read fails.

        Connections and mappings opened by the probe stay open.
        """
        timeouts = replace(self.options, request_timeout_s=PROBE_TIMEOUT_S)
        limit_s = PROBE_TIMEOUT_S + tuning.current.event_loop_grace_s
        probe_box = ((0, PROBE_BYTES),)
        request = Request(probe_key(kind), holder, (PROBE_BYTES,), PROBE_DTYPE, kind, [probe_box])
        with closing(self.read([request], timeouts)) as reading:
            try:
                for region in reading:
                    start, _ = region.box[0]
                    check_probe(region.result(limit_s), start)
            except TimeoutError:
                raise TransferError("the worker's event loop did not respond") from None

    @abstractmethod
    def read(self, requests: Sequence[Request], options: Options) -> Reading:
        """Start to read blocks of one holder. Raise `TransferError` if all of them fail.

        The failure of a single block is reported by its regions.
        """

    # --- arithmetic, without a worker ---

    @classmethod
    def is_in_auto(cls, kind: Kind) -> bool:
        """Return whether the order ``auto`` includes this transport for blocks of this kind."""
        return kind in cls.kinds

    @classmethod
    @abstractmethod
    def footprint(cls, options: Options, kind: Kind) -> Footprint:
        """Return the sizes and numbers of parts that the transport requests and holds."""

    # --- both sides ---

    @property
    def kept_bytes(self) -> int:
        """Bytes of idle buffers that are kept for reuse."""
        return sum(buffers.idle_bytes for buffers in self.pools)

    def publish(self, blocks: Mapping[Any, Any]) -> None:  # noqa: B027  # optional
        """Prepare these blocks of this worker for reads by other workers."""

    def on_released(self, key: Key) -> None:  # noqa: B027  # optional
        """Handle the release of a block by Dask. Called on the event loop."""

    def on_worker_left(self, holder: str) -> None:  # noqa: B027  # optional
        """Handle the departure of a worker. Called on the event loop."""

    def offload(self, function: Callable[..., Any], *args: Any) -> None:
        """Run a blocking function on a thread, without waiting. Call it on the event loop."""
        self._background.start(self.worker.offload(function, *args))

    @abstractmethod
    async def close(self) -> None:
        """Reject further requests, wait a limited time for readers, and free all memory."""


_T = TypeVar("_T")


class WorkerContext(Caller, Protocol):
    """The worker of a transport, as the transport uses it.

    Coroutines run on the worker's event loop, all other methods in any thread.
    """

    address: str
    folder: str  # the worker's own directory, removed when it closes
    encrypted_only: bool  # True if no unencrypted data may leave this process

    def block(self, key: Key) -> Any:
        """Return the block with this key, or the probe block. Raises `KeyError` if it is not here.

        May read from disk: call it from a thread. A CuPy block that is spilled to host memory is
        returned as a NumPy array.
        """

    def is_on_disk(self, key: Key) -> bool:
        """Return whether a block is spilled, so that `block` would read it from disk."""

    async def offload(
        self, function: Callable[..., _T], *args: Any, threads: Executor | None = None
    ) -> _T:
        """Run a blocking function on one of `threads`; by default on those for requests."""


def find_block(worker: WorkerContext, key: Key, shape: tuple[int, ...]) -> Any:
    """Return the block of a reader's request. Raises `KeyError` if it is not here."""
    return checked_block(as_array(worker.block(key)), key, shape)


# Probe blocks: known bytes that every worker can provide, to prove that a transport works.
#
# A probe block has a key of its own form, and is made at its first request. Its content follows
# from its size, so that the reader can check the bytes that arrive.

PROBE_BYTES = 2**16  # large enough for a rendezvous of UCX
PROBE_DTYPE = np.dtype("u1")
_MOST_OF_MEMORY = 1 / 32  # upper bound of a probe block, as a fraction of the memory
_NAME = "dask-p2p-probe"
_KEPT = 3  # one block for probing routes, two for measuring links


#: Key of a probe block: a name, the kind "numpy" or "cupy", and the size in bytes.
_Key = tuple[str, str, int]


def probe_key(kind: Kind, nbytes: int = PROBE_BYTES) -> _Key:
    """Return the key of a probe block: a 1-D array of this many bytes."""
    return (_NAME, kind, nbytes)


def most_probe_bytes(kind: Kind, memory_bytes: int | None) -> int:
    """Return the size of the largest probe block of a worker with this memory limit, if any.

    Sizes are powers of two. All probe blocks together take at most twice the largest size.
    """
    most_bytes = backend_named(kind).most_probe_bytes
    if memory_bytes is not None:
        most_bytes = max(PROBE_BYTES, min(most_bytes, int(memory_bytes * _MOST_OF_MEMORY)))
    return int(2 ** (most_bytes.bit_length() - 1))


def is_probe(key: Key) -> bool:
    """Return whether this is the key of a probe block."""
    return isinstance(key, (tuple, list)) and len(key) == 3 and key[0] == _NAME


class Probes:
    """The probe blocks of one worker."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[_Key, Any] = OrderedDict()
        self._lock = threading.Lock()

    def block(self, key: Key, memory_bytes: int | None = None) -> Any:
        """Return a probe block of a worker with this memory limit, if any.

        Raises `ValueError` if the block would be too large.
        """
        _, kind, nbytes = cast(tuple[Any, ...], key)
        most_bytes = most_probe_bytes(kind, memory_bytes)
        if nbytes > most_bytes:
            raise ValueError(f"expected a probe block of at most {most_bytes} bytes, got {key!r}")
        key = probe_key(kind, nbytes)
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = _content(kind, nbytes)
                while len(self._blocks) > _KEPT:
                    self._blocks.popitem(last=False)
            return self._blocks[key]

    def clear(self) -> list[_Key]:
        with self._lock:
            keys = list(self._blocks)
            self._blocks.clear()
        return keys


# This code does not compute with CuPy, which would compile a kernel for each operation. The first
# transpose on a machine would wait for the compiler.


def _content(kind: Kind, nbytes: int) -> Any:
    pattern = _pattern(nbytes)
    backend = backend_named(kind)
    if not backend.on_device:
        return pattern
    queue = backend.queue()
    block = queue.scratch(pattern.shape, pattern.dtype)
    queue.permute_and_drop(block, pattern, (0,))
    queue.synchronize()
    return block


def _pattern(nbytes: int) -> np.ndarray[Any, Any]:
    """Return bytes whose period is no power of two, so that a shifted copy is detected."""
    return np.resize(np.arange(251, dtype=PROBE_DTYPE), nbytes)


def check_probe(region: Array, start: int = 0) -> None:
    """Raise `TransferError` unless a region has the bytes of a probe block from `start` on.

    The region may lie in the holder's memory. A kernel then reads it, as kernels read blocks: a
    copy engine's success would prove too little.
    """
    if not isinstance(region, np.ndarray):
        queue = backend_for(region).queue()
        reversed_copy = queue.scratch(region.shape, region.dtype)
        queue.permute(reversed_copy, region[::-1], (0,))  # unreversed, a copy engine would do it
        region = queue.to_host(reversed_copy)[::-1]
    wrong_bytes = int((region != _pattern(start + region.shape[0])[start:]).sum())
    if wrong_bytes:
        raise TransferError(f"{wrong_bytes} of {region.shape[0]} bytes of a probe arrived changed")
