"""The reader's side of ``comm``: several parts in one call, and several calls at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

from dask_p2p.config import Options
from dask_p2p.errors import BlockMismatchError, TransferError
from dask_p2p.layout import Box, box_shape, box_size
from dask_p2p.transports.checksums import algorithm_of, check_sum, region_sum
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.flow_control import FlowControl, Pace
from dask_p2p.transports.reading import Part, Reading, Region, Request
from dask_p2p.transports.replies import ask, check_reply, mismatch
from dask_p2p.types import Array

__all__ = ["Answer", "CommReading"]

_MOST_PARTS = 256  # in one answer: each is a frame of its own


class CommReading(Reading):
    """Regions that are asked for, and answered, several at a time."""

    name: ClassVar[str] = "comm"
    op: ClassVar[str] = "p2p_comm_read"  # name of the holder's handler
    align_bytes: ClassVar[int] = 1  # of each region in an answer

    def __init__(
        self,
        host: WorkerContext,
        requests: Sequence[Request],
        flow: FlowControl,
        options: Options,
        closed: Callable[[CommReading], None],
        pace: Pace | None = None,
    ) -> None:
        super().__init__(requests, flow)
        self._pace = pace or Pace()
        self._host = host
        self._answers_ahead = flow.parts_in_flight
        self._timeout_s = options.request_timeout_s
        # Objects are pickled: their bytes are others here than there.
        self._with_sum = options.checksum and not requests[0].dtype.hasobject
        self._calls: set[Future[Any]] = set()
        self._tell_closed = closed

    @property
    def under_way(self) -> int:
        """Number of calls that have no answer yet."""
        return len(self._calls)

    def __iter__(self) -> Iterator[Region]:
        last: deque[int] = deque(maxlen=self._answers_ahead)  # parts of the last answers
        for parts in self._batches():
            future = asyncio.run_coroutine_threadsafe(self._pull(parts), self._host.loop)
            self._calls.add(future)
            future.add_done_callback(self._calls.discard)
            last.append(len(parts))
            self.ahead = sum(last)
            for number, part in enumerate(parts):
                yield Region(part, Answer(future, number))

    def _batches(self) -> Iterator[list[Part]]:
        """Group small parts, up to the size of one part."""
        batch: list[Part] = []
        batch_bytes = 0
        for part in self.parts():
            nbytes = self._aligned_bytes(part)
            is_full = self.part_bytes is not None and batch_bytes + nbytes > self.part_bytes
            if batch and (is_full or len(batch) == _MOST_PARTS):
                yield batch
                batch, batch_bytes = [], 0
            batch.append(part)
            batch_bytes += nbytes
        if batch:
            yield batch

    def _aligned_bytes(self, part: Part) -> int:
        nbytes: int = box_size(part.box) * self.requests[part.request].dtype.itemsize
        return -(-nbytes // self.align_bytes) * self.align_bytes

    def close(self) -> None:
        for future in list(self._calls):
            future.cancel()
        self._tell_closed(self)

    async def _pull(self, parts: Sequence[Part]) -> list[Any]:
        """Return, for each part, the region or the error that came in its place."""
        regions: list[Any] = []
        while left := parts[len(regions) :]:
            answers = await self._ask(left)  # about the first of them
            regions += [await self._region(*pair) for pair in zip(left, answers, strict=False)]
        return regions

    async def _ask(self, parts: Sequence[Part], **extra: Any) -> Sequence[Any]:
        first, named = self.requests[parts[0].request], self.named(parts)
        others = len(named["blocks"]) - 1
        about = f"block {first.key!r}" + (f" and {others} others" if others else "")
        extra |= {"checksum": True} if self._with_sum else {}
        asking = ask(self._host, first.holder, self.op, self._timeout_s, about, **named, **extra)
        begun_s = time.monotonic()
        try:
            reply = check_reply(await asking, first, self.name)
        finally:
            asked_bytes = sum(map(self._aligned_bytes, parts))
            self._pace.note(asked_bytes, time.monotonic() - begun_s, self._timeout_s)
        answers: Any = reply.get("parts")
        if type(answers) not in (list, tuple) or not 0 < len(answers) <= len(parts):
            message = f"{first.holder} did not answer about any part: {reply}"
            raise TransferError(f"{self.name}: {message}")
        result: Sequence[Any] = answers
        return result

    async def _region(self, part: Part, answer: Any) -> Any:
        request, box = self.requests[part.request], part.box
        try:
            region: Array = check_reply(answer, request, self.name).get("data")
            shape = getattr(region, "shape", type(region).__name__)
            if shape != box_shape(box):
                came = f"{shape} instead of {box_shape(box)} of {request}"
                raise TransferError(f"{self.name}: {request.holder} sent {came}")
            if region.dtype != request.dtype:
                raise mismatch(request, request.dtype, region.dtype)
            if self._with_sum:
                sent = answer.get("checksum")
                await self._host.offload(_check, self.name, request, region, box, sent)
        except (TransferError, BlockMismatchError) as exc:
            return exc
        return region


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the parts that a call is about."""

    call: Future[list[Any]]
    number: int

    def done(self) -> bool:
        """Return whether the call has ended."""
        return self.call.done()

    @property
    def is_here(self) -> bool:
        """Whether it has come, and well."""
        call = self.call
        if not call.done() or call.cancelled() or call.exception() is not None:
            return False
        return not isinstance(call.result()[self.number], Exception)

    def result(self, timeout_s: float | None = None, /) -> Any:
        """Wait for the answer, and return the region."""
        answers = self.call.result(timeout_s)
        # It is the caller's own from here on.
        region, answers[self.number] = answers[self.number], None
        if isinstance(region, Exception):
            raise region
        return region


def _check(name: str, request: Request, region: Array, box: Box, sent: Any) -> None:
    """Raise `TransferError` unless the region is what the holder sent, by its checksum."""
    try:
        sum_name, remote = sent
        algorithm = algorithm_of(sum_name)
    except (TypeError, ValueError):
        raise TransferError(
            f"{name}: {request.holder} sent no checksum of {box} of {request}, but {sent!r:.100}"
        ) from None
    local = region_sum(request.key, box, region, algorithm)
    check_sum(name, request, box, local, remote, algorithm)
