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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import tee
from math import prod
from typing import Any, Protocol

from dask_p2p.config import Options
from dask_p2p.errors import BlockUnavailableError, P2PError, TransferError
from dask_p2p.kernels import as_array, device_of, kernel_for
from dask_p2p.kernels.device import device_work
from dask_p2p.kernels.queue import SLOTS, Queue, queue_for
from dask_p2p.layout import Box, box_size, box_slices, split_box, taper_box
from dask_p2p.memory import Need, in_memory_bytes, is_out_of_memory
from dask_p2p.plan import BlockPlan, Piece, stage_order
from dask_p2p.transports.base import (
    GRACE_S,
    BlockSpec,
    Pending,
    RemoteBlock,
    SilentError,
    Transport,
    UnreachableError,
    UnsuitableError,
    check_block,
)
from dask_p2p.transports.links import BlockRef, Links, Way
from dask_p2p.transports.pacing import Pacing, staging_bytes
from dask_p2p.versioned import versioned

__all__ = ["Assembly", "OutputSpec", "Peers", "Stage"]

_LAST_PART_BYTES = 2**24  # which kernels put into place in 10 µs


@versioned()
@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What all blocks of one output have in common."""

    source: str  # name of the input array: its blocks' keys are (source, *index)
    dtype: Any  # numpy.dtype of the input and of the output
    kind: str  # "numpy" or "cupy", by the array's meta
    options: Options


@versioned()
@dataclass(frozen=True, slots=True)
class Stage:
    """What came from one remote block."""

    holder: str
    transport: str
    nbytes: int


class Peers(Protocol):
    """What an assembly needs of the worker that it runs on."""

    address: str
    links: Links

    def serving(self, blocks: Mapping[Any, Any], kind: str, options: Options) -> None:
        """Take note that other workers are about to read these blocks of this kind."""

    def memory_below(self, wanted_bytes: int, kind: str) -> int | None:
        """Return all memory for blocks of this kind if that is less than wanted; else None."""


@dataclass(slots=True)
class _Source:
    """A remote block, its pieces, and the ways to it that are left."""

    slot: int
    ref: BlockRef
    pieces: list[Piece]
    ways: list[Way]
    causes: list[str] = field(default_factory=list)

    @property
    def way(self) -> Way:
        return self.ways[0]


@dataclass(slots=True)
class _Part:
    """A part of a piece on its way."""

    source: _Source
    pending: Pending
    dst: Box
    slot_bytes: int  # of the largest part, of any source, that comes by this transport
    near: Any = None  # of the queue, which has begun to bring it; None if it comes by messages


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
        peers: Peers | None = None,
    ) -> None:
        self.plan = plan
        self.output = output
        self.options = output.options
        self.peers = peers
        self.stages: list[Stage] = []  # what came from where, for the record
        self._remote = {i: b for i, b in enumerate(blocks) if isinstance(b, BlockRef)}
        self._local = {i: as_array(b) for i, b in enumerate(blocks) if i not in self._remote}
        self._opened: dict[int, RemoteBlock] = {}  # by slot
        self._given_up: list[RemoteBlock] = []
        # Holders, by this transport or by all (None), and why: none is waited for twice.
        self._unreachable: dict[tuple[str, str | None], str] = {}
        self._local_queued = False
        self._out: Any = None
        largest = max((box_size(piece.src) for piece in plan.pieces), default=0)
        self._largest_bytes: int = largest * output.dtype.itemsize

    def key(self, slot: int) -> tuple[Any, ...]:
        """Dask key of a source."""
        return (self.output.source, *self.plan.sources[slot])

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
            kind = kernel_for(block).name
            check_block(block, self.key(slot), self.plan.source_shapes[slot], self.output.dtype)
        if self.peers is not None:
            need = self._need(kind)
            if (there_bytes := self.peers.memory_below(need.total_bytes, kind)) is not None:
                raise need.too_large(there_bytes, self._where)
        if self._remote and self.peers is not None:
            # As these need blocks of others, the others need blocks from here.
            local = {self.key(slot): block for slot, block in self._local.items()}
            self.peers.serving(local, kind, self.options)
        queue = queue_for(kind, beside_copies=bool(self._remote))
        try:
            if self._in_sync:
                self._queue_local(queue)
                queue.synchronize()
            todo = self._sources(queue.kind)
            while True:
                self._bring_remote(todo, queue)
                self._queue_local(queue)
                queue.synchronize()
                todo = self._unconfirmed(todo)
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
            for remote in [*self._opened.values(), *self._given_up]:
                leases.callback(remote.close)
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
                queue.permute(out[box_slices(piece.dst)], region, self.plan.axes, aside=True)

    def _bring_remote(self, todo: list[_Source], queue: Queue) -> None:
        """Bring remote blocks, each by the best way that works."""
        while todo:
            failed = self._round(todo, queue)
            todo = [source for source in todo if source.slot in failed]
            for source in todo:
                self._next_way(source, failed[source.slot])

    def _unconfirmed(self, sources: list[_Source]) -> list[_Source]:
        """Return those that may have come wrong, each to be brought by its next way."""
        wrong = []
        for source in sources:
            try:
                self._opened[source.slot].confirm()
            except TransferError as exc:
                self._opened.pop(source.slot).close()
                self._next_way(source, exc)
                wrong.append(source)
            else:
                self._record(source)
        return wrong

    def _round(self, todo: list[_Source], queue: Queue) -> dict[int, Exception]:
        """Try one way for each source; return the failures. What failed is brought again whole."""
        failed: dict[int, Exception] = {}
        ahead: deque[_Part] = deque()
        pacings: dict[str, Pacing] = {}  # the same for all that comes by a transport
        for source in todo:
            transport = source.way.transport
            if transport.name not in pacings:
                pacings[transport.name] = self._pacing(transport, queue.kind)
            pacing = pacings[transport.name]
            try:
                parts = self._open(source, pacing, queue.kind, is_last=source is todo[-1])
            except TransferError as exc:
                self._fail(source, exc, failed)
                continue
            while ahead and ahead[-1].source.way.transport is not transport:
                # Each may fill all that there is for staging.
                self._place(ahead.popleft(), failed, queue)
            try:
                for part in parts:
                    if transport.in_place:
                        part.near = queue.bring_near(self._wait_for(part), part.slot_bytes)
                    ahead.append(part)
                    while len(ahead) > pacing.parts_in_flight:
                        self._place(ahead.popleft(), failed, queue)
                    if source.slot in failed:
                        break  # nothing more of it
                    del part  # which may be placed already: the next one takes its room
            except TransferError as exc:
                self._fail(source, exc, failed)
        while ahead:
            self._place(ahead.popleft(), failed, queue)
        return failed

    def _pacing(self, transport: Transport, kind: str) -> Pacing:
        pacing = transport.pacing(self.options, kind).for_regions(self._largest_bytes)
        if pacing.part_bytes is not None and pacing.part_bytes < self.output.dtype.itemsize:
            # A part has one item at least, and so they go one at a time, or not through slots.
            pacing = Pacing(None if transport.in_place else pacing.part_bytes, 0)
        if self._in_sync:
            return replace(pacing, parts_in_flight=0)
        return replace(pacing, parts_in_flight=SLOTS - 1) if transport.in_place else pacing

    @property
    def _in_sync(self) -> bool:
        return self.options.mode == "sync"

    def _open(
        self, source: _Source, pacing: Pacing, kind: str, *, is_last: bool
    ) -> Iterator[_Part]:
        """Open a source, and return its parts."""
        transport = source.way.transport
        tapered = source.pieces[-1] if transport.in_place and is_last else None
        self._check_reachable(source)
        spec = BlockSpec(
            source.ref.key,
            source.way.holder,
            self.plan.source_shapes[source.slot],
            self.output.dtype,
            kind,
        )
        # As late as may be: a region can have hundreds of parts, and the first should soon be here.
        boxes = (
            (src, self._destination(piece, src))
            for piece in source.pieces
            for src in self._parts(piece, pacing.part_bytes, piece is tapered)
        )
        wanted, placed = tee(boxes)
        remote = transport.open(spec, (src for src, _ in wanted), self.options)
        self._opened[source.slot] = remote
        slot_bytes = min(pacing.part_bytes or 0, self._largest_bytes)
        return (_Part(source, remote.request(), dst, slot_bytes) for _, dst in placed)

    def _parts(self, piece: Piece, part_bytes: int | None, is_tapered: bool) -> Iterator[Box]:
        """Cut a piece into parts.

        The last one of a task is tapered: nothing comes any more while its end is put into place.
        """
        itemsize = max(1, self.output.dtype.itemsize)
        elements = max(1, box_size(piece.src) if part_bytes is None else part_bytes // itemsize)
        parts = split_box(piece.src, elements)
        if not is_tapered or part_bytes is None:
            return parts
        return _tapered(parts, max(1, _LAST_PART_BYTES // itemsize))

    def _destination(self, piece: Piece, src: Box) -> Box:
        """Return the part of the piece's destination box that this part of its source box fills."""
        return tuple(
            (
                start + src[axis][0] - piece.src[axis][0],
                start + src[axis][1] - piece.src[axis][0],
            )
            for axis, (start, _) in zip(self.plan.axes, piece.dst, strict=True)
        )

    def _place(self, part: _Part, failed: dict[int, Exception], queue: Queue) -> None:
        """Wait for a part and put it where it belongs."""
        if part.source.slot in failed:
            return
        place = box_slices(part.dst)
        if part.near is not None:
            queue.permute_from_peer(self._target(queue)[place], part.near, self.plan.axes)
            self._queue_local(queue)  # now that the first parts are on their way
        else:
            self._queue_local(queue)  # while the first part is on its way
            try:
                region = self._wait_for(part)
            except TransferError as exc:
                self._fail(part.source, exc, failed)
                return
            queue.permute_and_drop(self._target(queue)[place], region, self.plan.axes)
        if self._in_sync:
            queue.synchronize()

    def _wait_for(self, part: _Part) -> Any:
        """Return a part's region when it is here."""
        self._check_reachable(part.source)
        try:
            return part.pending.result(self.options.request_timeout_s + GRACE_S)
        except TimeoutError:  # the event loop, which keeps the deadlines, is stuck or gone
            raise TransferError(
                f"no answer of {part.source.way.holder} in time, and the worker's event loop did "
                f"not respond"
            ) from None

    def _fail(self, source: _Source, error: Exception, failed: dict[int, Exception]) -> None:
        """Take note that a source does not come by its current way, and let go of what came."""
        failed[source.slot] = error
        if isinstance(error, UnreachableError):
            self._unreachable[source.way.holder, None] = str(error)
        elif isinstance(error, SilentError):
            self._unreachable[source.way.holder, source.way.transport.name] = str(error)
        remote = self._opened.pop(source.slot, None)
        if remote is None:
            return
        if source.way.transport.in_place:  # kernels that are queued may read there still
            self._given_up.append(remote)
        else:
            remote.close()

    def _check_reachable(self, source: _Source) -> None:
        """Raise if the holder did not answer about another block: the time would add up."""
        holder, transport = source.way.holder, source.way.transport.name
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
        found: dict[tuple[str, ...], tuple[tuple[str, ...], list[Way]]] = {}
        sources = []
        for slot, ref in self._remote.items():
            if ref.holders not in found:
                # Of several replicas readers take different ones first: each those after its place.
                nearest = tuple(stage_order(ref.holders, here))
                ways = self.peers.links.ways(BlockRef(ref.key, nearest), kind, dtype, order)
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
            self.peers.links.report_failure(way, error, last)
        if not source.ways:
            causes = "; ".join(source.causes)
            failure = type(error) if len(source.causes) == 1 else TransferError
            raise failure(f"block {source.ref.key!r} could not be brought here: {causes}")

    def _record(self, source: _Source) -> None:
        elements = sum(box_size(piece.src) for piece in source.pieces)
        nbytes = elements * self.output.dtype.itemsize
        self.stages.append(Stage(source.way.holder, source.way.transport.name, nbytes))


def _tapered(parts: Iterator[Box], least_elements: int) -> Iterator[Box]:
    """Taper the last of some boxes."""
    for last in parts:
        for part in parts:
            yield last
            last = part
        yield from taper_box(last, least_elements)
