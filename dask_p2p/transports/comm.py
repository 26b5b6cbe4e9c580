"""``comm``: regions over Dask's own connections, between any two workers.

A reader asks a holder by one RPC for several parts at a time, of whatever blocks. The holder cuts
each out of its block, packs it into one piece of memory and sends them as the answer; Dask's
serialisation and protocol (tcp, tls, ucx, inproc) do the rest. GPU regions are sent from device
memory where the protocol can (ucx), else through host memory.

With ``p2p.checksum`` the answer holds checksums too, of the packed bytes.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

from distributed.protocol import to_serialize

from dask_p2p.config import Options
from dask_p2p.errors import BlockMismatchError, TransferError
from dask_p2p.kernels import device_of, kernel_for
from dask_p2p.kernels.checksum import algorithm_for
from dask_p2p.kernels.queue import queue_for
from dask_p2p.layout import Box, box_shape, box_size, box_slices
from dask_p2p.transports.base import Handler, Host, Transport
from dask_p2p.transports.pacing import Pacing, comm_pacing
from dask_p2p.transports.reading import Part, Reading, Region, Request
from dask_p2p.transports.replies import ask, check_reply, find_block, mismatch, refuse
from dask_p2p.transports.requests import (
    checked_blocks,
    checked_parts,
    checked_yes_or_no,
    no_more,
)
from dask_p2p.transports.sums import algorithm_of, check_sum, region_sum

__all__ = ["Answer", "CommReading", "CommTransport"]

_OP = "p2p_comm_read"
_MOST_PARTS = 256  # in one answer: each is a frame of its own
_PAUSE_S = 1e-3  # while others have packed as much as may be


class CommTransport(Transport):
    """Regions as answers to RPCs."""

    name: ClassVar[str] = "comm"

    def __init__(self, host: Host, options: Options) -> None:
        super().__init__(host, options)
        self._closed = False
        self._opened: set[CommReading] = set()  # by task threads
        self._serving = 0  # requests; changed on the event loop only

    def handlers(self) -> Mapping[str, Handler]:
        return {_OP: self._serve}

    def obstacle(self, holder: str, kind: str, dtype: Any) -> str | None:
        return None

    def probe(self, holder: str, kind: str) -> None:
        """Nothing to prove: it is the last resort, and what Dask itself uses all the time."""

    def pacing(self, options: Options, kind: str) -> Pacing:
        return comm_pacing(options, kind)

    def read(self, requests: Sequence[Request], options: Options) -> Reading:
        pacing = self.flow(requests, options)
        reading = CommReading(self.host, requests, pacing, options, self._opened.discard)
        self._opened.add(reading)
        return reading

    def held(self) -> dict[str, int]:
        return {
            "opened": len(self._opened),
            "requested": sum(reading.under_way for reading in list(self._opened)),
            "serving": self._serving,
        }

    async def close(self) -> None:
        self._closed = True

    async def _serve(
        self,
        /,
        blocks: Any = None,
        parts: Any = None,
        checksum: Any = False,
        **unknown: Any,
    ) -> dict[str, Any]:
        """Answer one request. Blocks are referenced, and so leased, until they are sent."""
        if self._closed:
            return {"status": "error", "message": "the worker is closing"}
        self._serving += 1
        try:
            no_more(unknown)
            blocks = checked_blocks(blocks)
            parts = checked_parts(parts, [shape for _, shape in blocks])
            checksum = checked_yes_or_no("checksum", checksum)
            answers = await self._packed(blocks, parts, checksum)
        except Exception as exc:
            return refuse(exc)
        finally:
            self._serving -= 1
        return {"status": "ok", "parts": answers}

    async def _packed(
        self, blocks: Sequence[tuple[Any, Any]], parts: Sequence[tuple[int, Box]], checksum: bool
    ) -> list[dict[str, Any]]:
        """Return answers for the first parts, as many as there is room for, but one at least."""
        deadline_s = time.monotonic() + self.options.request_timeout_s
        while True:
            answers = await self.host.offload(self._pack_some, blocks, parts, checksum)
            if answers or not parts:
                return answers
            if time.monotonic() > deadline_s:
                raise TransferError("it has packed as much for others as p2p.memory allows")
            await asyncio.sleep(_PAUSE_S)

    def _pack_some(
        self, blocks: Sequence[tuple[Any, Any]], parts: Sequence[tuple[int, Box]], checksum: bool
    ) -> list[dict[str, Any]]:
        """Pack parts for which there is room now; say of a block that fails why it does."""
        answers: list[dict[str, Any]] = []
        for number, box in parts:
            key, shape = blocks[number]
            try:
                region = self._pack(key, box, shape)
                if region is None:
                    break
                answer: dict[str, Any] = {"status": "ok", "data": to_serialize(region)}
                if checksum:
                    # By what is sent: the reader gets it in the same kind of memory.
                    algorithm = algorithm_for(region)
                    answer["checksum"] = (algorithm, region_sum(key, box, region, algorithm))
            except Exception as exc:
                answer = refuse(exc)
            answers.append(answer)
        return answers

    def _pack(self, key: Any, box: Box, shape: tuple[int, ...]) -> Any:
        """Pack a region; return None if there is no room for it now."""
        block = find_block(self.host, key, shape)  # the box lies in the shape, and so in the block
        region = block[box_slices(box)]
        kind = kernel_for(block).name
        if kind == "numpy" and region.flags.c_contiguous:
            return region
        # Copying to the host here keeps Dask's serialisation from doing it on the event loop.
        to_host = kind != "numpy" and not self.host.address.startswith("ucx")
        room = self.packed.room()
        if not room.take(region.nbytes * (2 if to_host else 1)):
            return None
        try:
            with device_of(block):
                queue = queue_for(kind)
                queue.wait_until_written([block], any_stream=self.options.any_producer_stream)
                packed = queue.scratch(region.shape, region.dtype)
                queue.pack(packed, region)()
                packed = queue.to_host(packed) if to_host else packed
            if self.host.address.startswith("inproc"):  # it is the reader's own from now on
                room.close()
            else:  # Dask lets go of it when it is sent
                weakref.finalize(packed, room.close).atexit = False
        except BaseException:
            room.close()
            raise
        return packed


class CommReading(Reading):
    """Regions that are asked for, and answered, several at a time."""

    name: ClassVar[str] = CommTransport.name
    op: ClassVar[str] = _OP
    align_bytes: ClassVar[int] = 1  # of each region in an answer

    def __init__(
        self,
        host: Host,
        requests: Sequence[Request],
        pacing: Pacing,
        options: Options,
        closed: Callable[[CommReading], None],
    ) -> None:
        super().__init__(requests, pacing)
        self._host = host
        self._answers_ahead = pacing.parts_in_flight
        self._timeout_s = options.request_timeout_s
        # Objects are pickled: their bytes are others here than there.
        self._with_sum = options.checksum and not requests[0].dtype.hasobject
        self._calls: set[Future[Any]] = set()
        self._tell_closed = closed

    @property
    def under_way(self) -> int:
        """Calls that are not answered yet."""
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
        """Put parts together that weigh as much as one may."""
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

    async def _ask(self, parts: Sequence[Part], **more: Any) -> Sequence[Any]:
        first, named = self.requests[parts[0].request], self.named(parts)
        others = len(named["blocks"]) - 1
        about = f"block {first.key!r}" + (f" and {others} others" if others else "")
        more |= {"checksum": True} if self._with_sum else {}
        asking = ask(self._host, first.holder, self.op, self._timeout_s, about, **named, **more)
        reply = check_reply(await asking, first, self.name)
        answers: Any = reply.get("parts")
        if type(answers) not in (list, tuple) or not 0 < len(answers) <= len(parts):
            said = f"{first.holder} did not answer about any part: {reply}"
            raise TransferError(f"{self.name}: {said}")
        result: Sequence[Any] = answers
        return result

    async def _region(self, part: Part, answer: Any) -> Any:
        request, box = self.requests[part.request], part.box
        try:
            region: Any = check_reply(answer, request, self.name).get("data")
            shape = getattr(region, "shape", type(region).__name__)
            if shape != box_shape(box):
                sent = f"{shape} instead of {box_shape(box)} of {request}"
                raise TransferError(f"{self.name}: {request.holder} sent {sent}")
            if region.dtype != request.dtype:
                raise mismatch(request, request.dtype, region.dtype)
            if self._with_sum:
                said = answer.get("checksum")
                await self._host.offload(_check, self.name, request, region, box, said)
        except (TransferError, BlockMismatchError) as exc:
            return exc
        return region


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the parts that a call is about."""

    call: Future[list[Any]]
    number: int

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


def _check(name: str, request: Request, region: Any, box: Box, said: Any) -> None:
    """Raise `TransferError` unless the region is what the holder sent, by its checksum."""
    try:
        sum_name, there = said
        algorithm = algorithm_of(sum_name)
    except (TypeError, ValueError):
        raise TransferError(
            f"{name}: {request.holder} sent no checksum of {box} of {request}, but {said!r:.100}"
        ) from None
    here = region_sum(request.key, box, region, algorithm)
    check_sum(name, request, box, here, there, algorithm)
