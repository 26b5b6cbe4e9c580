"""The reader's side: batches of regions, several calls at a time."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from dask_p2p.config import Options
from dask_p2p.errors import BlockMismatchError, TransferError
from dask_p2p.geometry import Box, box_shape, box_size
from dask_p2p.transports.base import Reading, Region, Request
from dask_p2p.transports.packed.checksums import check_sum
from dask_p2p.transports.replies import ask, check_reply, dtype_text, in_dtype, mismatch
from dask_p2p.types import Array, DType

if TYPE_CHECKING:
    from dask_p2p.transports.packed.base import PackedTransport

_T = TypeVar("_T")

_MOST_PARTS = 256  # in one answer: each may be a frame of its own
_ALIGNMENT_BYTES = 128  # what a GPU reads at once
# Of the reader's deadline: the holder gives up before, and says why.
_HOLDERS_SHARE = 3 / 4
# Shares of the deadline, after which an answer is late, and before which it is early.
_LATE, _EARLY = 1 / 4, 1 / 16
_SMALLEST_BYTES = 2**16  # of a late answer: less makes nothing quicker
_UNLIMITED_BYTES = 2**62


class Pace:
    """How much to ask of one holder at once.

    Many readers may share a link that carries little. Nobody knows before, so what was asked and
    came late, or not at all, is asked in smaller parts from then on.
    """

    def __init__(self) -> None:
        self.most_bytes = _UNLIMITED_BYTES  # of one answer

    def note(self, asked_bytes: int, took_s: float, limit_s: float) -> None:
        """Note how long an answer took, or that there was none within the limit."""
        share = took_s / limit_s
        if share > _LATE:
            least_bytes = min(self.most_bytes, max(asked_bytes, _SMALLEST_BYTES))
            self.most_bytes = max(_SMALLEST_BYTES, least_bytes // 4)
        elif share < _EARLY:
            self.most_bytes = min(_UNLIMITED_BYTES, max(self.most_bytes, 2 * asked_bytes))


class Landing:
    """Where the regions of one batch come to: made in the task's thread, which may take a while."""

    def __init__(self, transport: Any, reading: PackedReading, parts: Sequence[Region]) -> None:
        self.transport = transport
        self.about = reading.requests[parts[0].request]
        self.parts = parts

    def where(self, first: int) -> Any:
        """Get ready for the regions from this one on; return what the holder is told.

        It may block: call it from a thread.
        """
        return None

    async def regions(self, answers: Sequence[Any], first: int, deadline_s: float) -> Sequence[Any]:
        """Return the regions that these answers are about, when they are here."""
        return [answer.get("data") if isinstance(answer, dict) else None for answer in answers]

    def abandon(self) -> None:
        """Note that there will be no answer, or no use for it. The holder may be late."""


class MemoryLanding(Landing):
    """Memory in which regions lie one after another."""

    def __init__(self, transport: Any, reading: PackedReading, parts: Sequence[Region]) -> None:
        super().__init__(transport, reading, parts)
        self.places, size_bytes = reading.places(parts)
        self.memory = self.room(reading, size_bytes)

    @abstractmethod
    def room(self, reading: PackedReading, size_bytes: int) -> Array:
        """Return memory for all of them; `TransferError` if there is none."""

    async def arrived(self, answers: Sequence[Any], deadline_s: float) -> Array:
        """Return the memory, when the regions that these answers are about are there."""
        return self.memory

    async def regions(self, answers: Sequence[Any], first: int, deadline_s: float) -> Sequence[Any]:
        memory = await self.arrived(answers, deadline_s)
        return [self.region(memory, first + number) for number in range(len(answers))]

    def region(self, memory: Array, number: int) -> Array:
        """Return one of the regions, which are in this memory."""
        shape = box_shape(self.parts[number].box)
        found: Array = region_at(memory, self.places[number], shape, self.about.dtype)
        return found


class PackedReading(Reading):
    """Regions that are asked for, and answered, several at a time."""

    def __init__(
        self,
        transport: PackedTransport,
        requests: Sequence[Request],
        options: Options,
        pace: Pace,
    ) -> None:
        super().__init__(requests, transport.footprint(options, requests[0].kind), options)
        self._transport = transport
        self._pace = pace
        self.worker = transport.worker
        self._answers_ahead = self.ahead
        self._last: deque[int] = deque(maxlen=self.ahead)  # parts of the last answers
        self.timeout_s = options.request_timeout_s
        # Objects are pickled: their bytes are others here than there.
        self._with_sums = options.checksum and not requests[0].dtype.hasobject
        self.calls: set[Future[Any]] = set()  # that have no answer yet
        all_items = sum(box_size(box) for request in requests for box in request.boxes)
        self.part_bytes: int = min(self.part_bytes or 1, pace.most_bytes)
        self.batch_bytes = min(all_items * requests[0].dtype.itemsize, self.part_bytes)

    def places(self, parts: Sequence[Region]) -> tuple[list[int], int]:
        """Return where in one memory these parts lie, and how long it is, in bytes."""
        return places_of([part.box for part in parts], self.requests[0].dtype.itemsize)

    def __iter__(self) -> Iterator[Region]:
        for parts in self._batches():
            yield from self._asked(parts)

    def _asked(self, parts: Sequence[Region]) -> Iterator[Region]:
        """Ask for a batch."""
        try:
            call = self._call(parts)
        except TransferError as exc:
            yield from (part.failed(exc) for part in parts)
            return
        self._last.append(len(parts))
        self.ahead = sum(self._last)
        for number, part in enumerate(parts):
            yield part.on_its_way(partial(answered, call, number), call.done)

    def _batches(self) -> Iterator[list[Region]]:
        """Group small parts, up to the size of one part."""
        batch: list[Region] = []
        batch_bytes = 0
        for part in self.parts():
            _, nbytes = self.places([part])
            is_full = batch_bytes + nbytes > self.part_bytes or len(batch) == _MOST_PARTS
            if batch and is_full:
                yield batch
                batch, batch_bytes = [], 0
            batch.append(part)
            batch_bytes += _aligned(nbytes)
        if batch:
            yield batch

    def _call(self, parts: Sequence[Region]) -> Future[list[Any]]:
        """Ask for a batch, and go on."""
        landing = self._transport.landing(self._transport, self, parts)
        return self._begun(self.bring(parts, landing, landing.where(0)))

    def _begun(self, asking: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Have the event loop run a call, which closing cancels."""
        call = asyncio.run_coroutine_threadsafe(asking, self.worker.loop)
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)
        return call

    def close(self) -> None:
        for call in list(self.calls):
            call.cancel()
        self._transport.opened.discard(self)

    async def bring(self, parts: Sequence[Region], landing: Landing, where: Any) -> list[Any]:
        """Return, for each part, the region or the error that came in its place."""
        regions: list[Any] = []
        try:
            while left := parts[(first := len(regions)) :]:
                if first:  # for the others its holder had no room
                    where = await self.worker.offload(landing.where, first)
                deadline_s = time.monotonic() + self.timeout_s
                answers = await self._ask(left, where)
                came = await landing.regions(answers, first, deadline_s)
                for part, answer, region in zip(left, answers, came, strict=False):
                    regions.append(await self._checked(part, answer, region))
        except BaseException:
            landing.abandon()
            raise
        return regions

    async def _ask(self, parts: Sequence[Region], where: Any, messages: int = 1) -> Sequence[Any]:
        """Ask for parts, which come in so many messages; return the answers about them."""
        first = self.requests[parts[0].request]
        # Each block is named once, and then numbered.
        numbers = {number: i for i, number in enumerate(dict.fromkeys(p.request for p in parts))}
        others = len(numbers) - 1
        about = f"block {first.key!r}" + (f" and {others} others" if others else "")
        limit_s = self.timeout_s * messages  # of which each may take as long
        asking = ask(
            self.worker, first.holder, self._transport.op, limit_s, about,
            blocks=[(self.requests[n].key, self.requests[n].shape) for n in numbers],
            parts=[(numbers[part.request], part.box) for part in parts],
            dtype=dtype_text(first.dtype), item_bytes=first.dtype.itemsize, where=where,
            wait_s=self.timeout_s * _HOLDERS_SHARE, checksum=self._with_sums,
        )  # fmt: skip
        begun_s = time.monotonic()
        try:
            reply = check_reply(await asking, first)
        finally:
            self._pace.note(self.places(parts)[1], time.monotonic() - begun_s, limit_s)
        answers: Any = reply.get("parts")
        if type(answers) not in (list, tuple) or not 0 < len(answers) <= len(parts):
            message = f"{first.holder} did not answer about any part: {reply}"
            raise TransferError(f"{message:.500}")
        result: Sequence[Any] = answers
        return result

    async def _checked(self, part: Region, answer: Any, came: Any) -> Any:
        """Return a region in the dtype that is declared, or the error that came in its place."""
        request, box = self.requests[part.request], part.box
        try:
            check_reply(answer, request)
            shape = getattr(came, "shape", type(came).__name__)
            if shape != box_shape(box):
                sent = f"{shape} instead of {box_shape(box)} of {request}"
                raise TransferError(f"{request.holder} sent {sent}")
            region = came
            if came.dtype != request.dtype:
                region = await self.worker.offload(in_dtype, came, request.dtype)
            if region is None:
                raise mismatch(request, request.dtype, came.dtype)
            if self._with_sums:
                await self.worker.offload(check_sum, request, box, came, answer.get("checksum"))
        except (TransferError, BlockMismatchError) as exc:
            return exc
        return region


def answered(call: Future[list[Any]], number: int, timeout_s: float | None, *_: Any) -> Any:
    """Return one of the parts that a call is about."""
    answers = call.result(timeout_s)
    region, answers[number] = answers[number], None  # it is the caller's own from here on
    if isinstance(region, Exception):
        raise region
    return region


def places_of(boxes: Sequence[Box], item_bytes: int) -> tuple[list[int], int]:
    """Return where regions lie in one memory, and how long it is: the same on both sides.

    >>> places_of([((0, 2), (0, 3)), ((1, 2),)], 8)
    ([0, 128], 136)
    """
    places, end = [], 0
    for box in boxes:
        places.append(_aligned(end))
        end = places[-1] + box_size(box) * item_bytes
    return places, end


def region_at(memory: Any, place: int, shape: Sequence[int], dtype: DType) -> Any:
    """Return a region as a C-ordered array in memory of bytes, from this one on."""
    return memory[place : place + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
