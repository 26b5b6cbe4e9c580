"""The reader's side of ``pinned``: memory that is lent to calls, and copies from there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, ClassVar

from dask_p2p.backends import backend_named
from dask_p2p.config import Options
from dask_p2p.errors import TransferError
from dask_p2p.layout import box_size
from dask_p2p.transports.buffers import Buffers, buffer_bytes
from dask_p2p.transports.comm_reading import Answer, CommReading
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.flow_control import FlowControl
from dask_p2p.transports.reading import Part, Region, Request
from dask_p2p.transports.replies import dtype_text
from dask_p2p.transports.segments import DeviceCopy, Segment, Segments, region_at

__all__ = ["READ_OP", "PinnedReading"]

READ_OP = "p2p_pinned_read"
_ALIGNMENT_BYTES = 128  # what a GPU reads at once


class PinnedReading(CommReading):
    """Regions that come to memory of this process.

    Parameters
    ----------
    host, requests, flow, options, closed
        See `CommReading`.
    segments
        Where regions come to.
    buffers
        Where they are copied to, if they are wanted on a device.
    named
        Tells a holder, in arguments of a call, where in a segment regions are to be.
    """

    name: ClassVar[str] = "pinned"
    op: ClassVar[str] = READ_OP
    align_bytes: ClassVar[int] = _ALIGNMENT_BYTES

    def __init__(
        self,
        host: WorkerContext,
        requests: Sequence[Request],
        flow: FlowControl,
        options: Options,
        closed: Callable[[CommReading], None],
        segments: Segments,
        buffers: Buffers,
        named: Callable[[Segment, Sequence[int]], dict[str, Any]],
    ) -> None:
        super().__init__(host, requests, flow, options, closed)
        self.buffers = buffers
        self._segments = segments
        self._named = named
        all_items = sum(box_size(box) for request in requests for box in request.boxes)
        all_bytes = all_items * requests[0].dtype.itemsize
        # Of one size, so that they fit the next batch and the next array too.
        self.segment_bytes = buffer_bytes(min(all_bytes, flow.part_bytes or all_bytes))
        self._on_device = backend_named(requests[0].kind).on_device
        self._asked: deque[_OnDevice] = deque()

    def __iter__(self) -> Iterator[Region]:
        for region in super().__iter__():
            if self._on_device and isinstance(region.pending, Answer):
                self._asked.append(_OnDevice(self, region.pending))
                yield Region(region.part, self._asked[-1])
            else:
                yield region
            del region

    def following(self, this: _OnDevice) -> _OnDevice | None:
        """Return what was asked for after this one; what came before it is not waited for."""
        while self._asked and (passed := self._asked.popleft()) is not this:
            passed.settle()
        return self._asked[0] if self._asked else None

    def close(self) -> None:
        super().close()
        while self._asked:
            self._asked.pop().settle()  # a copy may be under way all the same

    def _pull(self, parts: Sequence[Part]) -> Coroutine[Any, Any, list[Any]]:
        """Lend memory to a call: at once, in the task's thread, since it may have to be made."""
        places, end = [], 0
        for part in parts:
            places.append(end)
            end += self._aligned_bytes(part)
        try:
            segment, memory = self._segments.lend(max(self.segment_bytes, end))
        except Exception as exc:
            return _fail(TransferError(f"pinned: there is no memory to share: {exc}"))
        dtype = self.requests[0].dtype
        regions = [
            region_at(memory, place, part.box, dtype)
            for part, place in zip(parts, places, strict=True)
        ]
        return self._pull_into(segment, regions, parts, places)

    async def _pull_into(
        self,
        segment: Segment,
        regions: Sequence[Any],
        parts: Sequence[Part],
        places: Sequence[int],
    ) -> list[Any]:
        dtype = dtype_text(self.requests[0].dtype)
        try:
            answers = await self._ask(parts, dtype=dtype, **self._named(segment, places))
        except BaseException:
            segment.is_lost = True
            raise
        if len(answers) != len(parts):
            count = f"{len(answers)} of {len(parts)} regions"
            raise TransferError(f"pinned: {self.requests[0].holder} answered about {count}")
        return [
            await self._region(
                part, {**answer, "data": region} if isinstance(answer, dict) else answer
            )
            for part, answer, region in zip(parts, answers, regions, strict=True)
        ]


class _OnDevice:
    """A region that is copied to the device, as soon as it is in memory of the host."""

    def __init__(self, reading: PinnedReading, answer: Answer) -> None:
        self._reading = reading
        self._answer = answer
        self._copy: DeviceCopy | None = None

    def done(self) -> bool:
        """Return whether the region is in memory of the host."""
        return self._answer.done()

    def result(self, timeout_s: float | None = None, /) -> Any:
        """Wait for the region; meanwhile the next one is copied too, if it has come."""
        copy = self._begun(timeout_s)
        following = self._reading.following(self)
        if following is not None and following._answer.is_here:
            following._begun(timeout_s)
        self._copy = None
        return copy.wait()

    def _begun(self, timeout_s: float | None) -> DeviceCopy:
        if self._copy is None:
            self._copy = DeviceCopy(self._answer.result(timeout_s), self._reading.buffers)
        return self._copy

    def settle(self) -> None:
        """Wait for the copy, if it was begun: memory is used again then."""
        if self._copy is not None:
            self._copy.wait()


async def _fail(error: Exception) -> list[Any]:
    raise error
