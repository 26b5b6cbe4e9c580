"""One worker's work for one output block: in which order it is done, and what overlaps.

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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import prod
from time import perf_counter
from typing import Any

import numpy as np

from dask_p2p.backends import SLOTS, Queue, Timer, as_array, backend_for, backend_named, device_of
from dask_p2p.backends.device import device_work
from dask_p2p.config import Options
from dask_p2p.errors import P2PError, TransferError
from dask_p2p.layout import Box, Index, box_size, box_slices
from dask_p2p.memory import Need, in_memory_bytes, is_out_of_memory
from dask_p2p.monitoring.ranges import Ranges
from dask_p2p.plans import BlockPlan, Piece, Source
from dask_p2p.reads import Incoming, OpenRead, RemoteSource
from dask_p2p.sources import RemoteSources
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.registry import staging_bytes
from dask_p2p.transports.replies import check_block
from dask_p2p.transports.router import BlockRef
from dask_p2p.types import DType, Kind
from dask_p2p.versioned import versioned

__all__ = ["Assembly", "OutputSpec"]


@versioned()
@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What all blocks of one output have in common."""

    arrays: tuple[str, ...]  # names of the inputs: their blocks' keys are (name, *index)
    dtype: DType  # numpy.dtype of the inputs, and of what is assembled
    kind: Kind  # "numpy" or "cupy", by the array's meta
    options: Options
    #: Makes the output block of the assembled one and its index; by default that is it.
    post: Callable[[Any, Index], Any] | None = None

    def key(self, source: Source) -> tuple[Any, ...]:
        """Return the Dask key of an input block."""
        return (self.arrays[source.array], *source.block)


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
    context
        The worker's; needed where there are references.
    start_s
        When the task started, by the performance counter; by default now.

    Attributes
    ----------
    sources : RemoteSources
        What is read from others, and how that goes.
    """

    def __init__(
        self,
        plan: BlockPlan,
        output: OutputSpec,
        blocks: Sequence[Any],
        context: WorkerContext | None = None,
        start_s: float | None = None,
    ) -> None:
        self.plan = plan
        self.output = output
        self.options = output.options
        self.context = context
        self.ranges = Ranges(output.options.nvtx)
        self._remote = {i: b for i, b in enumerate(blocks) if isinstance(b, BlockRef)}
        self._local = {i: as_array(b) for i, b in enumerate(blocks) if i not in self._remote}
        start_s = perf_counter() if start_s is None else start_s
        self.sources = RemoteSources(plan, output.dtype, output.options, context, start_s)
        self._kernels = Timer()  # of stage 0
        self._local_queued = False
        self._out: Any = None

    @property
    def kernel_s(self) -> float:
        """Seconds of kernels for what this worker holds itself."""
        return self._kernels.seconds

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
            If a remote block cannot be had by any route. It may be had later, or elsewhere.
        MemoryLimitError
            If it can never fit into the worker's memory, or an allocation fails.
        DeviceLostError
            If the worker's GPU no longer works.
        """
        try:
            with device_work(), device_of(*self._local.values()):
                return self._run()
        except Exception as exc:
            if not is_out_of_memory(exc) or isinstance(exc, P2PError):
                raise
            message = f"{type(exc).__name__}: {exc}"
            # What the frames below hold, half an output perhaps, goes with them, not with `exc`.
            traceback.clear_frames(exc.__traceback__)
            self._out = None
        raise self._need(self.output.kind).error(message, self._where)

    def _run(self) -> Any:
        kind = self.output.kind
        for slot, block in self._local.items():
            kind = backend_for(block).name
            check_block(block, self.key(slot), self.plan.source_shapes[slot], self.output.dtype)
        if self.context is not None:
            need = self._need(kind)
            if (limit_bytes := self.context.memory_below(need.total_bytes, kind)) is not None:
                raise need.too_large(limit_bytes, self._where)
        if self.plan.is_copy and self._local:
            return self._local[0]
        if self._remote and self.context is not None:
            # As these need blocks of others, the others need blocks from here.
            local = {self.key(slot): block for slot, block in self._local.items()}
            self.context.publish(local, kind, self.options)
        queue = backend_named(kind).queue(beside_copies=bool(self._remote))
        try:
            if self._in_sync:
                self._queue_local(queue)
                queue.synchronize()
            pending = self.sources.in_stage_order(
                self._remote, queue.kind, has_local=bool(self._local)
            )
            while True:
                while pending:  # each by the best route that works
                    self._read_once(pending, queue)
                    pending = self.sources.failed(pending)
                self._queue_local(queue)
                queue.synchronize()
                if not (pending := self.sources.unconfirmed()):
                    break
        finally:
            self._finish(queue)
        return self._out

    def _target(self, queue: Queue) -> Any:
        """Return the output. It is allocated late, while the first parts are on their way."""
        if self._out is None:
            shape, dtype = self.plan.shape, self.output.dtype
            if self.context is None:
                self._out = queue.empty(shape, dtype)
            else:
                self._out = self.context.empty_output(shape, dtype, queue)
        return self._out

    def _need(self, kind: Kind) -> Need:
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
        return "this process" if self.context is None else f"worker {self.context.address}"

    def _finish(self, queue: Queue) -> None:
        """Wait for all kernels, and only then end the leases: also where something failed."""
        try:
            queue.synchronize()
        finally:
            self.sources.close()

    def _queue_local(self, queue: Queue) -> None:
        """Queue stage 0, once: in async mode when the first regions are on their way."""
        if self._local_queued:
            return
        self._local_queued = True
        out = self._target(queue)
        queue.wait_until_written(self._local.values(), any_stream=self.options.any_producer_stream)
        axes = self.plan.axes
        with self.ranges("own blocks"), queue.timing(self._kernels):
            for piece in self.plan.pieces:
                if piece.source in self._local:
                    region = self._local[piece.source][box_slices(piece.src)]
                    queue.permute(out[box_slices(piece.dst)], region, axes, concurrent=True)
            for fill in self.plan.fills:
                queue.fill(out[box_slices(fill.dst)], np.full((), fill.value, self.output.dtype))

    def _read_once(self, pending: list[RemoteSource], queue: Queue) -> None:
        """Try one route for each source. What fails is read again whole.

        Memory of this host is read while regions from other hosts are on their way.
        """
        near = [source for source in pending if source.route.transport.within_host]
        far = [source for source in pending if not source.route.transport.within_host]
        if self._in_sync:
            near, far = pending, []
        beside = self._read_in_turn(near, queue, iter(()))
        for _ in chain(self._read_in_turn(far, queue, beside), beside):
            pass

    def _read_in_turn(
        self, pending: list[RemoteSource], queue: Queue, beside: Iterator[bool]
    ) -> Iterator[bool]:
        """Read sources one after another; rather than wait, take steps beside it.

        Yields True when a region is in place.
        """
        sources = self.sources
        ahead: deque[Incoming] = deque()
        for _, group in groupby(pending, key=lambda source: source.route):
            together = list(group)
            try:
                with self.ranges("ask", together[0].route):
                    read = sources.begin(together, queue.kind)
            except TransferError as exc:
                sources.note_failure(together, exc)
                continue
            while ahead and ahead[-1].read.transport is not read.transport:
                # Each may fill all that there is for staging.
                self._place_first(ahead, queue, beside)
                yield True
            for incoming in read.regions():
                if read.transport.in_place:
                    try:
                        region = sources.wait_for(incoming)
                        with self.ranges("copy", together[0].route), queue.timing(read.copies):
                            incoming.prefetched = queue.prefetch(region, read.slot_bytes)
                        del region
                    except TransferError as exc:
                        sources.fail(incoming, exc)
                        continue
                ahead.append(incoming)
                del incoming  # which may be placed already: the next one takes its room
                while len(ahead) > self._ahead(read):
                    self._place_first(ahead, queue, beside)
                    yield True
        while ahead:
            self._place_first(ahead, queue, beside)
            yield True

    def _place_first(self, ahead: deque[Incoming], queue: Queue, beside: Iterator[bool]) -> None:
        while not ahead[0].region.pending.done() and next(beside, False):
            pass
        self._place(ahead.popleft(), queue)

    def _ahead(self, read: OpenRead) -> int:
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

    def _place(self, incoming: Incoming, queue: Queue) -> None:
        """Wait for a region and put it where it belongs."""
        source, part = incoming.source, incoming.region.part
        if source.error is not None:
            return
        place = box_slices(self._destination(source.pieces[part.piece], part.box))
        if incoming.prefetched is not None:
            out = self._target(queue)[place]
            with self.ranges("place", source.route), queue.timing(incoming.read.kernels):
                queue.permute_prefetched(out, incoming.prefetched, self.plan.axes)
            self._queue_local(queue)  # now that the first parts are on their way
        else:
            self._queue_local(queue)  # while the first part is on its way
            try:
                with self.ranges("wait", source.route):
                    region = self.sources.wait_for(incoming)
            except TransferError as exc:
                self.sources.fail(incoming, exc)
                return
            out = self._target(queue)[place]
            with self.ranges("place", source.route), queue.timing(incoming.read.kernels):
                queue.permute_and_drop(out, region, self.plan.axes)
        source.missing -= box_size(part.box)
        if self._in_sync:
            queue.synchronize()
