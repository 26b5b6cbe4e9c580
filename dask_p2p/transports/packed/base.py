"""What transports have in common whose holders pack: all but where the bytes land.

A reader asks a holder by one RPC for a batch of regions, of any of its blocks. The holder packs
each into contiguous memory::

    reader                                        holder
      makes room for the regions (`Landing`)
      --- RPC: keys, boxes, dtype, where ------>  packs the regions there (`Target`)
      <-- answer: done, or why not, for each ---

Several calls are under way at a time, so the next batch is packed while the one before is sent. So
control and errors go over Dask's connections, encrypted where those are; the bytes go where the
transport says. With ``p2p.checksum`` an answer holds checksums too, of the packed bytes.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

from dask_p2p.backends import Backend, Queue, backend_for, device_of
from dask_p2p.config import Options
from dask_p2p.errors import TransferError, UnsuitableError
from dask_p2p.geometry import Box, box_slices
from dask_p2p.interprocess.requests import (
    checked_blocks,
    checked_bool,
    checked_integer,
    checked_parts,
    checked_seconds,
    checked_text,
)
from dask_p2p.transports.base import Request, Transport, answers
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.footprint import Release
from dask_p2p.transports.packed.checksums import region_sum
from dask_p2p.transports.packed.reading import Landing, Pace, PackedReading, places_of, region_at
from dask_p2p.transports.replies import (
    Handler,
    check_dtype_text,
    dtype_text,
    find_block,
    mismatch,
    refuse,
)
from dask_p2p.types import Array, Key

NO_ROOM = "its outgoing staging limit (p2p.memory.staging-limit) is reached"
PAUSE_S = 1e-3  # while the limit is reached
_LARGEST_ITEM_BYTES = 2**31


class Asked(NamedTuple):
    """A request, as a holder understood it."""

    blocks: Sequence[tuple[Any, tuple[int, ...]]]  # keys and shapes
    parts: Sequence[tuple[int, Box]]  # numbers of blocks, and boxes in them
    dtype: str
    item_bytes: int
    with_sums: bool
    deadline_s: float  # of `time.monotonic`: from then on the reader waits no longer

    @property
    def left_s(self) -> float:
        """The time that is left."""
        return max(0.0, self.deadline_s - time.monotonic())

    def places(self) -> tuple[list[int], int]:
        """Return where in one memory the regions lie, and how long it is, in bytes."""
        return places_of([box for _, box in self.parts], self.item_bytes)


class Target:
    """Where a holder packs the regions of one request."""

    def begin(self, asked: Asked, reserved: list[Release]) -> None:
        """Get ready for what is asked for, or the first regions of it, with this much memory."""
        self.asked = asked
        self.reserved = dict(enumerate(reserved))

    def takes(self, block: Array) -> bool:
        """Return whether regions of this block can be packed beside those that are."""
        return True

    @abstractmethod
    def pack(self, number: int, queue: Queue, region: Array) -> Array:
        """Queue a copy of a region, the n-th of the request; return what the reader will get."""

    def payload(self, packed: Array) -> dict[str, Any]:
        """Return what the answer holds of a region."""
        return {}

    def send(self) -> None:
        """Send what is packed, and wait until it has arrived."""

    def close(self) -> None:
        """Give back what was reserved. It is called whatever fails."""
        for release in self.reserved.values():
            release()


class MemoryTarget(Target):
    """Memory in which regions lie one after another."""

    def begin(self, asked: Asked, reserved: list[Release]) -> None:
        super().begin(asked, reserved)
        self._places, self.size_bytes = asked.places()

    @abstractmethod
    def memory(self, backend: Backend) -> Array:
        """Return the memory as a 1-D array of bytes, for regions of this backend."""

    def pack(self, number: int, queue: Queue, region: Array) -> Array:
        memory, place = self.memory(backend_for(region)), self._places[number]
        packed = region_at(memory, place, region.shape, region.dtype)
        self.wait_until_packed = queue.pack(packed, region)
        return packed


class PackedTransport(Transport):
    """Regions that their holder packs."""

    reading: ClassVar[type[PackedReading]] = PackedReading
    #: What makes room for a batch of regions.
    landing: ClassVar[type[Landing]] = Landing
    #: Whether readers convert what comes in another byte order.
    converts: ClassVar[bool] = False
    #: That pack for readers; None for the worker's own.
    threads: Executor | None = None

    def __init__(self, worker: WorkerContext, options: Options) -> None:
        super().__init__(worker, options)
        self.opened: set[PackedReading] = set()  # by task threads
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)  # by holder

    @property
    def op(self) -> str:
        """Name of the holder's handler."""
        return f"p2p_{self.name}_read"

    def handlers(self) -> Mapping[str, Handler]:
        return {self.op: self._serve}

    @abstractmethod
    async def target(self, asked: Asked, where: Any) -> Target:
        """Return where the regions of a request are packed; check what the reader says of it."""

    def own_bytes(self, asked: Asked) -> list[int]:
        """Return the sizes of the memory that the holder needs for packing what is asked for."""
        return []

    def read(self, requests: Sequence[Request], options: Options) -> PackedReading:
        reading = self.reading(self, requests, options, self._paces[requests[0].holder])
        self.opened.add(reading)
        return reading

    def on_worker_left(self, holder: str) -> None:
        self._paces.pop(holder, None)

    async def close(self) -> None:
        self.is_closed = True
        await self.worker.offload(self.let_go)
        if self.threads is not None:
            self.threads.shutdown(wait=False, cancel_futures=True)

    def let_go(self) -> None:
        """Give up what is kept for readers and holders. It may block: call it from a thread."""
        for buffers in self.pools:
            buffers.clear()

    # --- the holder's side ---

    @answers
    async def _serve(
        self,
        *,
        blocks: Any,
        parts: Any,
        dtype: Any,
        item_bytes: Any,
        wait_s: Any,
        where: Any = None,
        checksum: Any = False,
    ) -> dict[str, Any]:
        """Answer one request. Blocks are referenced, and so leased, until they are packed."""
        blocks = checked_blocks(blocks)
        asked = Asked(
            blocks,
            checked_parts(parts, [shape for _, shape in blocks]),
            checked_text("dtype", dtype),
            checked_integer("item_bytes", item_bytes, 0, _LARGEST_ITEM_BYTES),
            checked_bool("checksum", checksum),
            time.monotonic() + checked_seconds("wait_s", wait_s),
        )
        return {"parts": await self.packed_for(asked, where)}

    async def packed_for(self, asked: Asked, where: Any) -> Sequence[dict[str, Any]]:
        """Pack what is asked for; return the answer about each region."""
        target = await self.target(asked, where)
        target.begin(*await self.reserve(asked))
        return await self.worker.offload(self.pack_all, target, threads=self.threads)

    async def reserve(self, asked: Asked) -> tuple[Asked, list[Release]]:
        """Reserve memory for the first regions: as many as there is room for, but at least one."""
        count = len(asked.parts)
        while True:
            for shift in range(max(1, count.bit_length())):
                first = asked._replace(parts=asked.parts[: count >> shift])
                sizes = self.own_bytes(first)
                if sum(sizes) <= self.packed.limit_bytes or len(first.parts) == 1:
                    reserved = self.packed.reserve(*sizes)
                    if reserved is not None:
                        return first, reserved
            if not asked.left_s:
                raise TransferError(NO_ROOM)
            await asyncio.sleep(PAUSE_S)

    def pack_all(self, target: Target) -> list[dict[str, Any]]:
        """Pack the regions block by block, and send them; say of a block that fails why it does."""
        asked, answers = target.asked, list[dict[str, Any]]()
        with closing(target):
            for number, group in groupby(enumerate(asked.parts), key=lambda part: part[1][0]):
                boxes = [(place, box) for place, (_, box) in group]
                try:
                    block = self._find(asked, *asked.blocks[number])
                except Exception as exc:
                    answers += [refuse(exc) for _ in boxes]
                    continue
                if not target.takes(block):
                    break  # the reader asks again for what has no answer
                with device_of(block):
                    answers += self._pack(target, asked.blocks[number][0], block, boxes)
                del block
            if any(answer["status"] == "ok" for answer in answers):
                target.send()
        return answers

    def _find(self, asked: Asked, key: Key, shape: tuple[int, ...]) -> Any:
        block = find_block(self.worker, key, shape)
        about, found = f"block {key!r}", dtype_text(block.dtype)
        try:
            check_dtype_text(about, asked.dtype, found)
        except UnsuitableError:
            if not self.converts:
                raise
        if block.dtype.itemsize != asked.item_bytes:
            raise mismatch(about, asked.dtype, found)
        return block

    def _queue_for(self, block: Array) -> Queue:
        """Return what packs regions of a block, once that is written."""
        queue = backend_for(block).queue(leave_bandwidth=True)
        queue.wait_until_written([block], any_stream=self.options.any_producer_stream)
        return queue

    def _pack(
        self, target: Target, key: Key, block: Array, boxes: Sequence[tuple[int, Box]]
    ) -> list[dict[str, Any]]:
        """Pack regions of one block; return the answers about them."""
        queue = self._queue_for(block)
        try:
            packed = [target.pack(number, queue, block[box_slices(box)]) for number, box in boxes]
        finally:
            queue.synchronize()  # once it is answered, or has failed, memory is used again
        answers = [{"status": "ok", **target.payload(region)} for region in packed]
        if target.asked.with_sums:
            for answer, region, (_, box) in zip(answers, packed, boxes, strict=True):
                # By what is sent: the reader gets it in the same kind of memory.
                algorithm = backend_for(region).checksum_algorithm
                answer["checksum"] = (algorithm, region_sum(key, box, region, algorithm))
        return answers
