"""One worker's work for one output block: what is done in which order, and what overlaps.

::

      stage 0           stage 1           stage 2
      own pieces        holder (r+1)%n    holder (r+2)%n   ...
    --[permute]---------[permute]---------[permute]------->  queue of kernels
         [~~~ region ~~~]  [~~~ region ~~~]                  on the wire, or on the link

While the pieces of one stage are permuted into the output block, the regions of the next are on
their way. On a thread scheduler, or on a worker without the package's plugin, there are no remote
blocks, and stage 0 is all there is.
"""

from __future__ import annotations

import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from dask_p2p.backends import SLOTS, Queue, as_array, backend_for, backend_named, device_of
from dask_p2p.backends.device import device_work
from dask_p2p.config import Options
from dask_p2p.errors import (
    BlockUnavailableError,
    P2PError,
    SilentError,
    TransferError,
    UnreachableError,
    UnsuitableError,
)
from dask_p2p.layout import Box, Index, box_shape, box_size, box_slices
from dask_p2p.memory import Need, in_memory_bytes, is_out_of_memory
from dask_p2p.plans import BlockPlan, Piece, Source, stage_order
from dask_p2p.retry import GRACE_S
from dask_p2p.transports.base import Transport
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.reading import Reading, Region, Request
from dask_p2p.transports.registry import staging_bytes
from dask_p2p.transports.replies import check_block
from dask_p2p.transports.router import BlockRef, Route
from dask_p2p.versioned import versioned

__all__ = ["Assembly", "OutputSpec", "Stage"]


@versioned()
@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What all blocks of one output have in common."""

    arrays: tuple[str, ...]  # names of the inputs: their blocks' keys are (name, *index)
    dtype: Any  # numpy.dtype of the inputs, and of what is assembled
    kind: str  # "numpy" or "cupy", by the array's meta
    options: Options
    #: Makes the output block of the assembled one and its index; by default that is it.
    post: Callable[[Any, Index], Any] | None = None

    def key(self, source: Source) -> tuple[Any, ...]:
        """Return the Dask key of an input block."""
        return (self.arrays[source.array], *source.block)


@versioned()
@dataclass(frozen=True, slots=True)
class Stage:
    """What came from one remote block."""

    holder: str
    transport: str
    nbytes: int


@dataclass(slots=True)
class _Source:
    """A remote block, its pieces, and the ways to it that are left."""

    slot: int
    ref: BlockRef
    pieces: list[Piece]
    ways: list[Route]
    causes: list[str] = field(default_factory=list)
    brought_by: Reading | None = None  # that has not failed
    left: int = 0  # elements that have not been put into place

    @property
    def way(self) -> Route:
        return self.ways[0]


@dataclass(slots=True)
class _Read:
    """What is read of one holder at a time."""

    transport: Transport
    sources: list[_Source]
    reading: Reading
    slot_bytes: int  # of the largest part, if it is to come through local memory


@dataclass(slots=True)
class _Coming:
    """A region on its way."""

    read: _Read
    region: Region
    near: Any = None  # of the queue, which has begun to bring it; None if it comes by messages

    @property
    def source(self) -> _Source:
        return self.read.sources[self.region.part.request]


class Assembly:
    """The assembly of one output block.

    Parameters
    ----------
    plan
        Its pieces.
    output
        What all blocks of the output have in common.
    blocks
        For each of the plan's sources an array of this worker, or a reference to a remote one.
    peers
        The worker's links; needed where there are references.
    """

    def __init__(
        self,
        plan: BlockPlan,
        output: OutputSpec,
        blocks: Sequence[Any],
        peers: WorkerContext | None = None,
    ) -> None:
        self.plan = plan
        self.output = output
        self.options = output.options
        self.peers = peers
        self.stages: list[Stage] = []  # what came from where, for the record
        self._remote = {i: b for i, b in enumerate(blocks) if isinstance(b, BlockRef)}
        self._local = {i: as_array(b) for i, b in enumerate(blocks) if i not in self._remote}
        self._reads: list[_Read] = []  # all that is open
        # Holders, by this transport or by all (None), and why: none is waited for twice.
        self._unreachable: dict[tuple[str, str | None], str] = {}
        self._local_queued = False
        self._out: Any = None

    def key(self, slot: int) -> tuple[Any, ...]:
        """Dask key of a source."""
        return self.output.key(self.plan.sources[slot])

    def run(self) -> Any:
        """Return the output block.

        Raises
        ------
        BlockMismatchError, UnsupportedArrayError
            If an input block is not what its Dask array declares.
        TransferError
            If a remote block cannot be had by any way. It may be had later, or elsewhere.
        MemoryLimitError
            If it can never fit into the worker's memory, or an allocation fails.
        DeviceLostError
            If the worker's GPU works no more.
        """
        try:
            with device_work(), device_of(*self._local.values()):
                return self._run()
        except Exception as exc:
            if not is_out_of_memory(exc) or isinstance(exc, P2PError):
                raise
            said = f"{type(exc).__name__}: {exc}"
            # What the frames below hold, half an output perhaps, goes with them, not with `exc`.
            traceback.clear_frames(exc.__traceback__)
            self._out = None
        raise self._need(self.output.kind).error(said, self._where)

    def _run(self) -> Any:
        kind = self.output.kind
        for slot, block in self._local.items():
            kind = backend_for(block).name
            check_block(block, self.key(slot), self.plan.source_shapes[slot], self.output.dtype)
        if self.peers is not None:
            need = self._need(kind)
            if (there_bytes := self.peers.memory_below(need.total_bytes, kind)) is not None:
                raise need.too_large(there_bytes, self._where)
        if self.plan.is_copy and self._local:
            return self._local[0]
        if self._remote and self.peers is not None:
            # As these need blocks of others, the others need blocks from here.
            local = {self.key(slot): block for slot, block in self._local.items()}
            self.peers.publish(local, kind, self.options)
        queue = backend_named(kind).queue(beside_copies=bool(self._remote))
        try:
            if self._in_sync:
                self._queue_local(queue)
                queue.synchronize()
            todo = self._sources(queue.kind)
            while True:
                self._bring_remote(todo, queue)
                self._queue_local(queue)
                queue.synchronize()
                todo = self._unconfirmed()
                if not todo:
                    break
        finally:
            self._finish(queue)
        return self._out

    def _target(self, queue: Queue) -> Any:
        """Return the output. It is allocated late, while the first parts are on their way."""
        if self._out is None:
            self._out = queue.empty(self.plan.shape, self.output.dtype)
        return self._out

    def _need(self, kind: str) -> Need:
        itemsize = self.output.dtype.itemsize
        sizes = [box_size(p.src) * itemsize for p in self.plan.pieces if p.source in self._remote]
        return Need(
            output_bytes=prod(self.plan.shape) * itemsize,
            staging_bytes=staging_bytes(
                self.options, kind, max(sizes, default=0), sum(sizes), itemsize
            ),
            input_bytes=sum(map(in_memory_bytes, self._local.values())),
            staging_limit_bytes=self.options.staging_limit_bytes,
        )

    @property
    def _where(self) -> str:
        return "this process" if self.peers is None else f"worker {self.peers.address}"

    def _finish(self, queue: Queue) -> None:
        """Wait for all kernels, and only then end the leases: also where something failed."""
        with ExitStack() as leases:
            for read in self._reads:
                leases.callback(read.reading.close)
            queue.synchronize()

    def _queue_local(self, queue: Queue) -> None:
        """Queue stage 0, once: in async mode when the first regions are on their way."""
        if self._local_queued:
            return
        self._local_queued = True
        out = self._target(queue)
        queue.wait_until_written(self._local.values(), any_stream=self.options.any_producer_stream)
        for piece in self.plan.pieces:
            if piece.source in self._local:
                region = self._local[piece.source][box_slices(piece.src)]
                queue.permute(out[box_slices(piece.dst)], region, self.plan.axes, concurrent=True)
        for fill in self.plan.fills:
            values = np.full(box_shape(fill.dst), fill.value, self.output.dtype)
            queue.permute_and_drop(out[box_slices(fill.dst)], values, range(values.ndim))

    def _bring_remote(self, todo: list[_Source], queue: Queue) -> None:
        """Bring remote blocks, each by the best way that works."""
        while todo:
            failed = self._round(todo, queue)
            todo = [source for source in todo if source.slot in failed]
            for source in todo:
                self._next_way(source, failed[source.slot])

    def _unconfirmed(self) -> list[_Source]:
        """Return those that may have come wrong, each to be brought by its next way."""
        wrong: list[_Source] = []
        while self._reads:
            read = self._reads.pop(0)
            sources = [source for source in read.sources if source.brought_by is read.reading]
            try:
                if sources:
                    read.reading.confirm()
                for source in sources:
                    if source.left:
                        name = source.way.transport.name
                        raise TransferError(f"{name}: {source.ref.key!r} came only in part")
            except TransferError as exc:
                for source in sources:
                    self._next_way(source, exc)
                wrong += sources
            else:
                for source in sources:
                    self._record(source)
            finally:
                read.reading.close()
        return wrong

    def _round(self, todo: list[_Source], queue: Queue) -> dict[int, Exception]:
        """Try one way for each source; return the failures. What failed is brought again whole."""
        failed: dict[int, Exception] = {}
        ahead: deque[_Coming] = deque()
        for _, group in groupby(todo, key=lambda source: source.way):
            sources = list(group)
            try:
                read = self._begin(sources, queue.kind)
            except TransferError as exc:
                for source in sources:
                    self._note_failure(source, exc, failed)
                continue
            while ahead and ahead[-1].read.transport is not read.transport:
                # Each may fill all that there is for staging.
                self._place(ahead.popleft(), failed, queue)
            for region in read.reading:
                coming = _Coming(read, region)
                if read.transport.in_place:
                    try:
                        coming.near = queue.bring_near(self._wait_for(coming), read.slot_bytes)
                    except TransferError as exc:
                        self._fail(coming, exc, failed)
                        continue
                ahead.append(coming)
                del region, coming  # which may be placed already: the next one takes its room
                while len(ahead) > self._ahead(read):
                    self._place(ahead.popleft(), failed, queue)
        while ahead:
            self._place(ahead.popleft(), failed, queue)
        return failed

    def _begin(self, sources: list[_Source], kind: str) -> _Read:
        """Begin to read these sources, which have one way in common."""
        way = sources[0].way
        self._check_reachable(way)
        dtype = self.output.dtype
        requests = [
            Request(
                source.ref.key,
                way.holder,
                self.plan.source_shapes[source.slot],
                dtype,
                kind,
                [piece.src for piece in source.pieces],
            )
            for source in sources
        ]
        reading = way.transport.read(requests, self.options)
        largest = max(box_size(box) for request in requests for box in request.boxes)
        slot_bytes = min(reading.part_bytes or 0, largest * dtype.itemsize)
        read = _Read(way.transport, sources, reading, slot_bytes)
        for source in sources:
            source.brought_by = reading
            source.left = sum(box_size(piece.src) for piece in source.pieces)
        self._reads.append(read)
        return read

    def _ahead(self, read: _Read) -> int:
        if read.transport.in_place:  # copies that are queued, each into a slot
            return 0 if self._in_sync else SLOTS - 1
        return read.reading.ahead

    @property
    def _in_sync(self) -> bool:
        return self.options.mode == "sync"

    def _destination(self, piece: Piece, src: Box) -> Box:
        """Return the part of the piece's destination box that this part of its source box fills."""
        return tuple(
            (
                start + src[axis][0] - piece.src[axis][0],
                start + src[axis][1] - piece.src[axis][0],
            )
            for axis, (start, _) in zip(self.plan.axes, piece.dst, strict=True)
        )

    def _place(self, coming: _Coming, failed: dict[int, Exception], queue: Queue) -> None:
        """Wait for a region and put it where it belongs."""
        source, part = coming.source, coming.region.part
        if source.slot in failed:
            return
        place = box_slices(self._destination(source.pieces[part.piece], part.box))
        source.left -= box_size(part.box)
        if coming.near is not None:
            queue.permute_from_peer(self._target(queue)[place], coming.near, self.plan.axes)
            self._queue_local(queue)  # now that the first parts are on their way
        else:
            self._queue_local(queue)  # while the first part is on its way
            try:
                region = self._wait_for(coming)
            except TransferError as exc:
                self._fail(coming, exc, failed)
                return
            queue.permute_and_drop(self._target(queue)[place], region, self.plan.axes)
        if self._in_sync:
            queue.synchronize()

    def _wait_for(self, coming: _Coming) -> Any:
        """Return a region's array when it is here."""
        way = coming.source.way
        self._check_reachable(way)
        try:
            return coming.region.pending.result(self.options.request_timeout_s + GRACE_S)
        except TimeoutError:  # the event loop, which keeps the deadlines, is stuck or gone
            raise TransferError(
                f"no answer of {way.holder} in time, and the worker's event loop did not respond"
            ) from None

    def _fail(self, coming: _Coming, error: Exception, failed: dict[int, Exception]) -> None:
        """Take note that a source does not come by its current way, and let go of what came."""
        read = coming.read
        read.reading.drop(coming.region.part.request)
        self._note_failure(coming.source, error, failed)
        if isinstance(error, (UnreachableError, SilentError)):
            for number, source in enumerate(read.sources):  # nothing more comes from there
                read.reading.drop(number)
                if source.left:
                    self._note_failure(source, error, failed)
        if read.transport.in_place:
            return  # kernels that are queued may read there still
        if all(source.slot in failed for source in read.sources):
            read.reading.close()

    def _note_failure(
        self, source: _Source, error: Exception, failed: dict[int, Exception]
    ) -> None:
        failed[source.slot] = error
        source.brought_by = None
        if isinstance(error, UnreachableError):
            self._unreachable[source.way.holder, None] = str(error)
        elif isinstance(error, SilentError):
            self._unreachable[source.way.holder, source.way.transport.name] = str(error)

    def _check_reachable(self, way: Route) -> None:
        """Raise if the holder did not answer about another block: the time would add up."""
        holder, transport = way.holder, way.transport.name
        if (why := self._unreachable.get((holder, None))) is not None:
            raise UnreachableError(why)
        if (why := self._unreachable.get((holder, transport))) is not None:
            raise SilentError(why)

    def _sources(self, kind: str) -> list[_Source]:
        """Return the remote sources in stage order."""
        if not self._remote:
            return []
        assert self.peers is not None, "references are only made on workers with the plugin"
        here = self.peers.address
        pieces: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in self.plan.pieces:
            pieces[piece.source].append(piece)
        order, dtype = self.options.order(kind), self.output.dtype
        # The same for all blocks of a worker.
        found: dict[tuple[str, ...], tuple[tuple[str, ...], list[Route]]] = {}
        sources = []
        for slot, ref in self._remote.items():
            if ref.holders not in found:
                # Of several replicas readers take different ones first: each those after its place.
                nearest = tuple(stage_order(ref.holders, here))
                ways = self.peers.router.routes(BlockRef(ref.key, nearest), kind, dtype, order)
                found[ref.holders] = nearest, ways
            nearest, ways = found[ref.holders]
            sources.append(_Source(slot, BlockRef(ref.key, nearest), pieces[slot], [*ways]))
        # A worker that has blocks of its own is one of the holders, and its place among them
        # is what makes the workers read from each other in step.
        holders = [source.ref.holders[0] for source in sources]
        stages = stage_order([*holders, *([here] if self._local else [])], here)
        place = {holder: stage for stage, holder in enumerate(stages)}
        return sorted(sources, key=lambda source: place[source.ref.holders[0]])

    def _next_way(self, source: _Source, error: Exception) -> None:
        """Give up the way that failed; raise if none is left."""
        assert self.peers is not None
        way = source.ways.pop(0)
        said, name = str(error), way.transport.name
        source.causes.append(said if said.startswith(f"{name}: ") else f"{name}: {said}")
        if isinstance(error, BlockUnavailableError):
            # The holder answers, it just lacks the block: no other transport would find it.
            source.ways = [other for other in source.ways if other.holder != way.holder]
        elif not isinstance(error, UnsuitableError):
            last = not any(other.holder == way.holder for other in source.ways)
            self.peers.router.report_failure(way, error, last)
        if not source.ways:
            causes = "; ".join(source.causes)
            failure = type(error) if len(source.causes) == 1 else TransferError
            raise failure(f"block {source.ref.key!r} could not be brought here: {causes}")

    def _record(self, source: _Source) -> None:
        elements = sum(box_size(piece.src) for piece in source.pieces)
        nbytes = elements * self.output.dtype.itemsize
        self.stages.append(Stage(source.way.holder, source.way.transport.name, nbytes))
