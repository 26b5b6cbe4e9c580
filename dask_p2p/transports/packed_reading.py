"""The reader's side of packed transports: batches of regions, in several concurrent calls."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dask_p2p.backends import dtype_text, in_dtype, mismatch
from dask_p2p.config import Options
from dask_p2p.errors import BlockMismatchError, TransferError
from dask_p2p.geometry import Box, Layout, box_shape, box_size, round_up
from dask_p2p.transports.base import Reading, Region, Request
from dask_p2p.transports.rpc import ask, check_reply
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.transports.packed import PackedTransport


_T = TypeVar("_T")

_MOST_PARTS = 256  # parts in one reply: each may be a frame of its own
_ALIGNMENT_BYTES = 128  # a GPU's unit of memory access
# The holder's share of the reader's deadline. It fails earlier, and so can report the reason.
_HOLDERS_SHARE = 3 / 4
# Replies count as late after the first share of the deadline, as early before the second.
_LATE, _EARLY = 1 / 4, 1 / 16
_SMALLEST_BYTES = 2**16  # smaller replies would not be faster
_UNLIMITED_BYTES = 2**62


class RateController:
    """The size of requests to one holder.

    Many readers may share a slow network, whose speed is not known in advance. Late or missing
    replies shrink the next requests, and early ones grow them.
    """

    def __init__(self) -> None:
        self.most_bytes = _UNLIMITED_BYTES  # upper bound of one reply

    def update(self, asked_bytes: int, took_s: float, limit_s: float) -> None:
        share = took_s / limit_s
        if share > _LATE:
            least_bytes = min(self.most_bytes, max(asked_bytes, _SMALLEST_BYTES))
            self.most_bytes = max(_SMALLEST_BYTES, least_bytes // 4)
        elif share < _EARLY:
            self.most_bytes = min(_UNLIMITED_BYTES, max(self.most_bytes, 2 * asked_bytes))


class RecvBuffer:
    """The memory that receives the regions of one batch. Made in the task's thread: may block."""

    def __init__(self, transport: Any, reading: PackedReading, parts: Sequence[Region]) -> None:
        self.transport = transport
        self.about = reading.requests[parts[0].request]
        self.parts = parts

    def where(self, first: int) -> Any:
        """Prepare for the regions from this one on. Return the description for the holder.

        May block: call it from a thread.
        """
        return None

    async def regions(self, replies: Sequence[Any], first: int, deadline_s: float) -> Sequence[Any]:
        return [reply.get("data") for reply in replies]

    def abandon(self) -> None:
        """Give the memory up after a failed call: the holder may still write to this memory."""


class FlatRecvBuffer(RecvBuffer):
    """A buffer that holds the regions one after another."""

    def __init__(self, transport: Any, reading: PackedReading, parts: Sequence[Region]) -> None:
        super().__init__(transport, reading, parts)
        self.layout = reading.layout(parts)
        self.memory = self.allocate(reading, self.layout.size_bytes)

    @abstractmethod
    def allocate(self, reading: PackedReading, size_bytes: int) -> Array:
        """Return memory for all regions. Raises `TransferError` if there is none."""

    async def wait_for_arrival(self, replies: Sequence[Any], deadline_s: float) -> Array:
        return self.memory

    async def regions(self, replies: Sequence[Any], first: int, deadline_s: float) -> Sequence[Any]:
        memory = await self.wait_for_arrival(replies, deadline_s)
        return [self.region(memory, first + number) for number in range(len(replies))]

    def region(self, memory: Array, number: int) -> Array:
        region: Array = self.layout.view(memory, number, self.about.dtype)
        return region


class PackedReading(Reading):
    """The reading of packed regions, with several requests at a time."""

    def __init__(
        self,
        transport: PackedTransport,
        requests: Sequence[Request],
        options: Options,
        rate: RateController,
    ) -> None:
        super().__init__(requests, transport.footprint(options, requests[0].kind))
        self._transport = transport
        self._rate = rate
        self.worker = transport.worker
        self._answers_ahead = self.ahead
        self._last: deque[int] = deque(maxlen=self.ahead)  # numbers of parts in the last requests
        self.timeout_s = options.request_timeout_s
        self.calls: set[Future[Any]] = set()  # calls without a reply so far
        all_items = sum(box_size(box) for request in requests for box in request.boxes)
        self.part_bytes: int = min(self.part_bytes or 1, rate.most_bytes)
        self.batch_bytes = min(all_items * requests[0].dtype.itemsize, self.part_bytes)

    def layout(self, parts: Sequence[Region]) -> Layout:
        return lay_out_regions([part.box for part in parts], self.requests[0].dtype.itemsize)

    def __iter__(self) -> Iterator[Region]:
        for parts in self._batches():
            yield from self._request_batch(parts)

    def _request_batch(self, parts: Sequence[Region]) -> Iterator[Region]:
        try:
            call = self._call(parts)
        except TransferError as exc:
            yield from (part.mark_failed(exc) for part in parts)
            return
        self._last.append(len(parts))
        self.ahead = sum(self._last)
        for number, part in enumerate(parts):
            yield part.mark_requested(partial(wait_for_region, call, number), call.done)

    def _batches(self) -> Iterator[list[Region]]:
        batch: list[Region] = []
        batch_bytes = 0
        for part in self.parts():
            nbytes = box_size(part.box) * self.requests[0].dtype.itemsize
            is_full = batch_bytes + nbytes > self.part_bytes or len(batch) == _MOST_PARTS
            if batch and is_full:
                yield batch
                batch, batch_bytes = [], 0
            batch.append(part)
            batch_bytes += round_up(nbytes, _ALIGNMENT_BYTES)
        if batch:
            yield batch

    def _call(self, parts: Sequence[Region]) -> Future[list[Any]]:
        recv_buffer = self._transport.recv_buffer(self._transport, self, parts)
        return self._start_call(self.bring(parts, recv_buffer, recv_buffer.where(0)))

    def _start_call(self, asking: Coroutine[Any, Any, _T]) -> Future[_T]:
        call = asyncio.run_coroutine_threadsafe(asking, self.worker.loop)
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)
        return call

    def close(self) -> None:
        for call in list(self.calls):
            call.cancel()
        self._transport.opened.discard(self)

    async def bring(
        self, parts: Sequence[Region], recv_buffer: RecvBuffer, where: Any
    ) -> list[Any]:
        """Return the region for each part, or the error in its place."""
        regions: list[Any] = []
        try:
            while missing_parts := parts[(first := len(regions)) :]:
                if first:  # the holder had no memory for the remaining parts
                    where = await self.worker.offload(recv_buffer.where, first)
                deadline_s = time.monotonic() + self.timeout_s
                replies = await self._ask(missing_parts, where)
                arrays = await recv_buffer.regions(replies, first, deadline_s)
                for part, reply, region in zip(missing_parts, replies, arrays, strict=False):
                    regions.append(await self._check_region(part, reply, region))
        except BaseException:
            recv_buffer.abandon()
            raise
        return regions

    async def _ask(self, parts: Sequence[Region], where: Any, messages: int = 1) -> Sequence[Any]:
        """Request parts that arrive in this number of messages. Return the replies for them."""
        first = self.requests[parts[0].request]
        # The request names each block once, and refers to it by its number.
        numbers = {number: i for i, number in enumerate(dict.fromkeys(p.request for p in parts))}
        further_blocks = len(numbers) - 1
        about = f"block {first.key!r}" + (f" and {further_blocks} others" if further_blocks else "")
        limit_s = self.timeout_s * messages  # the timeout applies to each message
        asking = ask(
            self.worker, first.holder, self._transport.op, limit_s, about,
            blocks=[(self.requests[n].key, self.requests[n].shape) for n in numbers],
            parts=[(numbers[part.request], part.box) for part in parts],
            dtype=dtype_text(first.dtype), item_bytes=first.dtype.itemsize, where=where,
            wait_s=self.timeout_s * _HOLDERS_SHARE,
        )  # fmt: skip
        begun_s = time.monotonic()
        try:
            reply = check_reply(await asking, first.holder, first)
        finally:
            self._rate.update(self.layout(parts).size_bytes, time.monotonic() - begun_s, limit_s)
        replies: Sequence[Any] = reply["parts"]
        return replies

    async def _check_region(self, part: Region, reply: Any, array: Any) -> Any:
        """Return a region in the declared dtype, or the error in its place."""
        request = self.requests[part.request]
        try:
            check_reply(reply, request.holder, request)
            if array.dtype == request.dtype:
                return array
            region = await self.worker.offload(in_dtype, array, request.dtype)
            if region is None:
                raise mismatch(request, request.dtype, array.dtype)
        except (TransferError, BlockMismatchError) as exc:
            return exc
        return region


def wait_for_region(call: Future[list[Any]], number: int, timeout_s: float | None, *_: Any) -> Any:
    """Return the region of one of a call's parts."""
    regions = call.result(timeout_s)
    region, regions[number] = regions[number], None  # the caller owns the array from now on
    if isinstance(region, Exception):
        raise region
    return region


def lay_out_regions(boxes: Sequence[Box], item_bytes: int) -> Layout:
    """Return the layout of regions in one buffer. Both sides compute the same."""
    return Layout(map(box_shape, boxes), item_bytes, _ALIGNMENT_BYTES)
