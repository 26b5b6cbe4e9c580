"""The assembly of one output block on its worker: the order of the steps, and their overlap.

::

      stage 0           stage 1           stage 2
      own pieces        holder (r+1)%n    holder (r+2)%n   ...
    --[permute]---------[permute]---------[permute]------->  queue of kernels
         [~~~ region ~~~]  [~~~ region ~~~]                  on the network, or on NVLink

While the pieces of one stage are permuted into the output block, the regions of the next one are
transferred. On a thread scheduler, or on a worker without the package's plugin, all blocks are
local, and stage 0 is the only stage.
"""

from __future__ import annotations

import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, groupby
from math import prod
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
from dask.utils import format_bytes

from dask_p2p.backends import (
    MOST_UNREAD,
    Queue,
    Timer,
    as_array,
    backend_for,
    backend_named,
    checked_block,
    device_of,
)
from dask_p2p.backends.allocator import keep_temporaries
from dask_p2p.backends.device import device_work
from dask_p2p.config import Options
from dask_p2p.engine.context import (
    SMALLER_CHUNKS,
    MemoryNeed,
    TaskContext,
    in_memory_bytes,
    is_out_of_memory,
    where_is,
)
from dask_p2p.engine.remote import BlockRef, Fetch, RemoteSource, RemoteSources
from dask_p2p.errors import BlockMismatchError, P2PError, TransferError
from dask_p2p.geometry import Chunks, Index, box_size, box_slices, split_box
from dask_p2p.plans import BlockPlan, Piece
from dask_p2p.transports.base import Region
from dask_p2p.transports.buffers import staging_bytes
from dask_p2p.types import Array, DType, Kind

_KEEP_FROM_BYTES = 2**20  # block whose epilogue makes temporaries that are worth keeping
_PART_BYTES = 2**24  # size of a spilled block's parts on their way to a GPU
_SHARE = 8  # a part takes at most 1/8 of the staging limit
_PARTS = MOST_UNREAD + 1  # parts in memory of the GPU at a time

_Ahead: TypeAlias = deque[tuple[Fetch, Region]]  # regions in transfer, in the order of requests


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The properties that all blocks of one output share."""

    array: tuple[str]  # name of the input, as the start of its blocks' keys: (name, *index)
    dtype: DType  # numpy.dtype of the input and of the assembled block
    kind: Kind  # "numpy" or "cupy", from the array's meta
    options: Options
    #: Function of the assembled block, which it may overwrite, and the block's index. It returns
    #: the output block. None: the assembled block is the output block. The optional method
    #: `extra_bytes(shape, dtype)` of the function returns the bytes of its additional memory.
    epilogue: Callable[[Any, Index], Any] | None = None
    chunks: Chunks | None = None  # chunks of the array after `epilogue`, for records

    def key(self, source: Index) -> tuple[Any, ...]:
        return self.array + source

    def need(
        self,
        kind: Kind,
        shape: tuple[int, ...],
        largest_bytes: int,
        remote_bytes: int,
        input_bytes: int = 0,
    ) -> MemoryNeed:
        """Return the peak memory of the task that assembles a block of this kind and shape.

        The sizes are those of the largest region from one remote block, of all regions from other
        workers, and of this worker's input blocks in memory.
        """
        item_bytes = self.dtype.itemsize
        staged_bytes = staging_bytes(self.options, kind, largest_bytes, remote_bytes, item_bytes)
        extra_bytes = getattr(self.epilogue, "extra_bytes", lambda *_: 0)(shape, self.dtype)
        return MemoryNeed(
            {"for itself": prod(shape) * item_bytes, "for this worker's input blocks": input_bytes},
            ({"for regions in transfer": staged_bytes}, {"to transform it": extra_bytes}),
            kind,
        )


class Assembly:
    """The assembly of one output block.

    With the plugin a task gets references to its worker's own blocks, as to remote ones. Dask
    therefore neither unspills them for the task nor keeps them in memory. The task reads them one
    after another. Blocks that GPU kernels read stay referenced until all kernels have ended. All
    others are referenced only during the read, so that Dask can spill them at any time.
    """

    def __init__(
        self,
        plan: BlockPlan,  # pieces of the block
        output: OutputSpec,  # properties that all blocks of the output share
        blocks: Sequence[Any],  # by source: an array of this worker, or a reference
        context: TaskContext,  # the worker's
        start_s: float | None = None,  # task's start by the performance counter; None: now
    ) -> None:
        self.plan = plan
        self.output = output
        self.options = output.options
        self.context = context
        self._where = where_is(context)
        self._part_bytes = max(1, min(_PART_BYTES, self.options.staging_limit_bytes // _SHARE))
        # By their number among the plan's sources: blocks of other workers, and this worker's own,
        # as arrays or references.
        self._remote: dict[int, BlockRef] = {}
        self.local: dict[int, Any] = {}
        self.being_read: dict[int, Array] = {}  # own blocks that queued kernels read
        for number, block in enumerate(blocks):
            is_remote = isinstance(block, BlockRef) and context.address not in block.holders
            (self._remote if is_remote else self.local)[number] = block
        start_s = perf_counter() if start_s is None else start_s
        self.sources = RemoteSources(plan, output.dtype, output.options, context, start_s)
        self.kernels = Timer()  # kernels of stage 0
        self._local_queued = False
        self._input_bytes = 0  # memory of this worker's own blocks
        self._out: Any = None

    def key(self, source_number: int) -> Any:
        """Return the key of a source, which Dask renames in arguments of `dask.delayed`."""
        block = self.local.get(source_number, self._remote.get(source_number))
        if isinstance(block, BlockRef):
            return block.key
        return self.output.key(self.plan.sources[source_number])

    def run(self) -> Any:
        """Return the output block. After a `TransferError`, a later attempt may succeed."""
        try:
            with device_work(), device_of(*(local := self.in_memory()).values()):
                kind = self._kind(local)
                self._input_bytes = self.local_bytes(local, kind)
                need = self._need(kind)
                limit_bytes = self.context.memory_below(need.peak_bytes, kind)
                need.check(limit_bytes, "a block", self._where, self._remedy)
                if self.plan.is_copy and local and self.output.epilogue is None:
                    return local[0]
                if self._remote:
                    # Other workers will read this worker's blocks in the same exchange.
                    published = {self.key(number): block for number, block in local.items()}
                    self.context.publish(published, kind, self.options)
                    del published
                del local  # Dask may spill them
                return self._read(kind)
        except Exception as exc:
            if not is_out_of_memory(exc) or isinstance(exc, P2PError):
                raise
            message = f"{type(exc).__name__}: {exc}"
            # `exc` keeps the frames below alive, and they may hold half an output.
            traceback.clear_frames(exc.__traceback__)
            self._out = None
        need = self._need(self.output.kind)
        raise need.error(message, "a block", self._where, self._remedy)

    def finish(self, block: Any, index: Index) -> Any:
        if self.output.epilogue is None:
            return block
        is_large = block.nbytes >= _KEEP_FROM_BYTES
        keeping = keep_temporaries() if is_large else nullcontext()
        with device_work(), device_of(block), keeping:
            # A view: the block itself is marked as written. A function may overwrite its argument
            # on a stream and return it, and then the mark would be false.
            return self.output.epilogue(block[...], index)

    def _read(self, kind: Kind) -> Any:
        """Return the output, with all regions in it. A failed block is read again as a whole.

        There are two lanes. The same-host lane reads memory that this thread or its GPU can access.
        It proceeds step by step while the remote lane waits for a region of another host::

            remote lane       ask ~~~~~~~~~~~~~~~~~~ place  ask ~~~~~~~~~~~ place
            same-host lane        read place  read place        read place        read place ...
        """
        queue = backend_named(kind).queue(leave_bandwidth=bool(self._remote))
        try:
            sources = self.sources.in_stage_order(self._remote, kind, has_local=bool(self.local))
            while True:
                while sources:  # each source by the best route that works
                    local, remote = list[RemoteSource](), list[RemoteSource]()
                    for source in sources:
                        is_local = source.route.transport.within_host
                        (local if is_local else remote).append(source)
                    same_host_lane = self._lane(local, queue, iter(()))
                    for _ in chain(self._lane(remote, queue, same_host_lane), same_host_lane):
                        pass
                    sources = self.sources.switch_routes(sources)
                self._queue_local(queue)
                queue.synchronize()
                if not (sources := self.sources.confirm_reads()):
                    return self._out
        finally:
            try:
                queue.synchronize()
            finally:  # after all kernels
                self.being_read = {}
                self.sources.close()

    def _kind(self, local: Mapping[int, Array]) -> Kind:
        """Return the kind of the local blocks, which may differ from their array's meta."""
        of_kind = {backend_for(block).name: number for number, block in local.items()}
        for number in self.local.keys() - local.keys():
            if (kind := self.context.kind_of(self.key(number))) is not None:
                of_kind.setdefault(kind, number)
        if len(of_kind) > 1:
            kinds = " and ".join(f"block {self.key(n)!r} of {kind}" for kind, n in of_kind.items())
            raise BlockMismatchError(
                f"expected blocks of one array library, got {kinds}. Convert the array's blocks "
                f"where it is made, such as by map_blocks(cupy.asarray)."
            )
        return next(iter(of_kind), self.output.kind)

    def _target(self, queue: Queue) -> Any:
        """Return the output, which is allocated late, while the first parts are in transfer."""
        if self._out is None:
            self._out = self.context.empty_output(self.plan.shape, self.output.dtype, queue)
        return self._out

    def _need(self, kind: Kind) -> MemoryNeed:
        item_bytes = self.output.dtype.itemsize
        sizes = [box_size(p.src) * item_bytes for p in self.plan.pieces if p.source in self._remote]
        largest_bytes = max(sizes, default=0)
        return self.output.need(kind, self.plan.shape, largest_bytes, sum(sizes), self._input_bytes)

    @property
    def _remedy(self) -> str:
        limit = format_bytes(self.options.staging_limit_bytes)
        return f"{SMALLER_CHUNKS} It may also help to lower p2p.memory.staging-limit (now {limit})."

    def _queue_local(self, queue: Queue) -> None:
        """Queue stage 0 once, while the first regions are in transfer."""
        if self._local_queued:
            return
        self._local_queued = True
        out = self._target(queue)
        self.hold(queue)
        with queue.timing(self.kernels):
            self.put_local_into(out, queue)
            for fill in self.plan.fills:
                queue.fill(out[box_slices(fill.dst)], np.full((), fill.value, self.output.dtype))

    def _lane(
        self, sources: list[RemoteSource], queue: Queue, same_host_lane: Iterator[bool]
    ) -> Iterator[bool]:
        """Read sources one after another. Where this lane would wait, step through the other lane.

        Yields True each time a region is in the output.
        """
        ahead: _Ahead = deque()
        for route, group in groupby(sources, key=lambda source: source.route):
            fetch = self.sources.begin(list(group), queue.kind)
            if fetch is None:  # failed: each source is read by its next route
                continue
            while ahead and ahead[-1][0].route.transport is not route.transport:
                # Each transport may fill the whole staging budget.
                yield self._place_first(ahead, queue, same_host_lane)
            for region in fetch.regions():
                try:
                    if fetch.in_place:  # a copy engine transfers it
                        with queue.timing(fetch.copies):
                            region.prefetched = queue.prefetch(region.result(), fetch.slot_bytes)
                except TransferError as exc:
                    fetch.give_up(region, exc)
                    continue
                ahead.append((fetch, region))
                del region  # perhaps placed already: the next one takes its memory
                while len(ahead) > fetch.reading.ahead:
                    yield self._place_first(ahead, queue, same_host_lane)
        while ahead:
            yield self._place_first(ahead, queue, same_host_lane)

    def _place_first(self, ahead: _Ahead, queue: Queue, same_host_lane: Iterator[bool]) -> bool:
        """Put the first region into the output on arrival; until then step through the lane."""
        while not ahead[0][1].is_ready() and next(same_host_lane, False):
            pass
        fetch, region = ahead.popleft()
        source = fetch.sources[region.request]
        if source.error is not None:
            return True
        target = box_slices(self.plan.destination(source.pieces[region.piece], region.box))
        if region.prefetched is not None:
            out = self._target(queue)[target]
            with queue.timing(fetch.kernels):
                queue.permute_prefetched(out, region.prefetched, self.plan.axes)
            self._queue_local(queue)  # now that the first parts are in transfer
        else:
            self._queue_local(queue)  # while the first part is in transfer
            out = self._target(queue)[target]
            is_straight = self.plan.axes == tuple(range(out.ndim))
            try:
                array = fetch.wait_for(region, out if is_straight else None)
            except TransferError as exc:
                fetch.give_up(region, exc)
                return True
            with queue.timing(fetch.kernels):
                if array is not out:
                    queue.permute_and_drop(out, array, self.plan.axes)
        source.missing -= box_size(region.box)
        return True

    def in_memory(self) -> dict[int, Array]:
        """Return own blocks that are in memory now, checked, by number.

        Raises `BlockMismatchError` or `UnsupportedArrayError` if a block differs from its array's
        declaration.
        """
        blocks = {}
        for number, block in self.local.items():
            if not isinstance(block, BlockRef):
                blocks[number] = self.local[number] = self._check_block(number, block)
                continue
            try:
                blocks[number] = self._check_block(number, self.context.in_memory(block.key))
            except KeyError:  # spilled or released
                continue
        return blocks

    def local_bytes(self, in_memory: Mapping[int, Array], kind: Kind) -> int:
        """Return the bytes of own blocks in memory, and of reading the largest spilled one."""
        spilled = (self.plan.source_shapes[n] for n in self.local.keys() - in_memory.keys())
        spilled_bytes = max(map(prod, spilled), default=0) * self.output.dtype.itemsize
        if backend_named(kind).on_device:
            spilled_bytes = _PARTS * min(self._part_bytes, spilled_bytes)
        return sum(map(in_memory_bytes, in_memory.values())) + spilled_bytes

    def hold(self, queue: Queue) -> None:
        """Keep references to the blocks in GPU memory, and make the queue wait for their values."""
        if backend_named(queue.kind).on_device:
            blocks, any_stream = self.in_memory(), self.options.any_producer_stream
            self.being_read = {n: blocks[n] for n in blocks if backend_for(blocks[n]).on_device}
            queue.wait_until_written(self.being_read.values(), any_stream=any_stream)

    def put_local_into(self, out: Array, queue: Queue) -> None:
        """Queue all pieces of own blocks, block after block.

        Raises `TransferError` if a block was released (its task was cancelled, for example) or
        cannot be read.
        """
        pieces: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in self.plan.pieces:
            if piece.source in self.local:
                pieces[piece.source].append(piece)
        on_device = backend_named(queue.kind).on_device
        part_size = max(1, self._part_bytes // max(1, self.output.dtype.itemsize))
        for number, block_pieces in pieces.items():
            if number in self.being_read:
                block = self.being_read[number]
                for piece in block_pieces:
                    region = block[box_slices(piece.src)]
                    target = out[box_slices(piece.dst)]
                    queue.permute(target, region, self.plan.axes, concurrent=True)
                continue
            block = self._load_block(number)
            if backend_for(block).on_device:  # unspilled as a whole
                queue.wait_until_written([block], any_stream=self.options.any_producer_stream)
            for piece in block_pieces:
                for box in split_box(piece.src, part_size) if on_device else [piece.src]:
                    target = box_slices(self.plan.destination(piece, box))
                    queue.permute_and_drop(out[target], block[box_slices(box)], self.plan.axes)
            del block  # Dask may spill it while the next one is read

    def _load_block(self, number: int) -> Any:
        block, key = self.local[number], self.key(number)
        if isinstance(block, BlockRef):
            try:
                block = self.context.block(key)
            except KeyError:
                address = self.context.address
                raise TransferError(
                    f"block {key!r} is no longer on {address}", scope="block"
                ) from None
            except OSError as exc:
                raise TransferError(f"block {key!r} cannot be read from disk: {exc}") from exc
        return self._check_block(number, block)

    def _check_block(self, number: int, block: Any) -> Any:
        shape = self.plan.source_shapes[number]
        return checked_block(as_array(block), self.key(number), shape, self.output.dtype)
