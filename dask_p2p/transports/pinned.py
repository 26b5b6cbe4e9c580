"""``pinned``: packed regions through memory of the host that reader and holder have in common.

For GPUs without peer access to each other, and for allocators whose memory CUDA IPC cannot share
(``cudaMallocAsync``, managed memory). It is ``comm``, but for the data: a reader names, beside the
regions that it asks for, memory of its own, and the holder packs them there instead of into its
answer::

    reader                                      holder
      --- RPC: keys, boxes, memory, places --->  maps the memory, once
                                                 copies the regions there (copy engine, or kernel)
      <-- answer: done -----------------------
    copies them to its device (copy engine)

Both have it pinned, so that copies go at the speed of PCIe, and in both directions at the same time
(H200: 48 GB/s each way; 28 where kernels read there themselves). NumPy blocks go through it
unpinned, and are read there.

Memory whose call got no answer is not used again: the holder may still write there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

from dask_p2p.config import Options
from dask_p2p.errors import TransferError
from dask_p2p.kernels import device_of, kernel_for
from dask_p2p.kernels.checksum import algorithm_for
from dask_p2p.kernels.queue import queue_for
from dask_p2p.layout import Box, box_shape, box_size, box_slices
from dask_p2p.transports.base import GRACE_S, MEET_S, Handler, Host, Transport
from dask_p2p.transports.buffers import Buffers, buffer_bytes
from dask_p2p.transports.comm import Answer, CommReading, CommTransport
from dask_p2p.transports.pacing import Pacing, idle_bytes, pinned_pacing
from dask_p2p.transports.reading import Part, Reading, Region, Request
from dask_p2p.transports.replies import ask, dtype_text, find_block, mismatch, refuse
from dask_p2p.transports.requests import (
    checked_blocks,
    checked_integers,
    checked_parts,
    checked_text,
    checked_yes_or_no,
    no_more,
)
from dask_p2p.transports.segments import DeviceCopy, Segment, SegmentName, Segments
from dask_p2p.transports.sums import region_sum

__all__ = ["PinnedTransport"]

_OP = "p2p_pinned_read"
_ALIGNMENT_BYTES = 128  # what a GPU reads at once


class PinnedTransport(CommTransport):
    """Regions as answers to RPCs, through memory that both sides have in common."""

    name: ClassVar[str] = "pinned"
    probe = Transport.probe  # as it is no last resort

    def __init__(self, host: Host, options: Options) -> None:
        super().__init__(host, options)
        self._segments = {
            kind: Segments(kind, idle_bytes("pinned", options, kind)) for kind in ("numpy", "cupy")
        }
        self._near = Buffers("cupy", idle_bytes("pinned", options, "cupy"))
        self._obstacles: dict[str, str | None] = {}  # by holder
        self._mapped: dict[tuple[str, SegmentName], Segment] = {}  # of readers, by address and name

    def handlers(self) -> Mapping[str, Handler]:
        return {_OP: self._answer}

    # --- the reader's side, in task threads ---

    def obstacle(self, holder: str, kind: str, dtype: Any) -> str | None:
        if dtype.hasobject:
            return "pinned moves bytes, not Python objects"
        if holder not in self._obstacles:
            try:
                self._obstacles[holder] = self._meet(holder)
            except TransferError as exc:  # it may answer the next time
                return str(exc)
        return self._obstacles[holder]

    def _meet(self, holder: str) -> str | None:
        """Have a holder open memory of here; return what keeps it from that."""
        try:
            segment, _ = self._segments["numpy"].lend(1)
        except (OSError, AttributeError, MemoryError) as exc:
            return f"this worker has no memory to share: {exc}"
        named = {"blocks": [], "parts": [], "dtype": "", **self._named(segment, [])}
        asking = ask(self.host, holder, _OP, MEET_S, "shared memory", **named)
        meeting = asyncio.run_coroutine_threadsafe(asking, self.host.loop)
        try:
            reply = meeting.result(MEET_S + GRACE_S)
        except TimeoutError:
            raise TransferError("pinned: the worker's event loop did not respond") from None
        if isinstance(reply, dict) and reply.get("status") == "ok":
            return None
        return str(reply.get("message", reply) if isinstance(reply, dict) else reply)

    def _named(self, segment: Segment, places: Sequence[int]) -> dict[str, Any]:
        """Return how a holder is told where regions are to be."""
        inodes = [inode for segments in self._segments.values() for inode in segments.inodes()]
        memory = {"memory": tuple(segment.name), "places": places, "inodes": inodes}
        return {"reader": self.host.address, **memory}

    def pacing(self, options: Options, kind: str) -> Pacing:
        return pinned_pacing(options, kind)

    def read(self, requests: Sequence[Request], options: Options) -> Reading:
        pacing = self.flow(requests, options)
        reading = _PinnedReading(self, requests, pacing, options)
        self._opened.add(reading)
        return reading

    def forget(self, holder: str) -> None:
        self._obstacles.pop(holder, None)
        if any(reader == holder for reader, _ in list(self._mapped)):
            self.offload(self._unmap, holder, ())

    def held(self) -> dict[str, int]:
        return {**super().held(), "mapped": len(self._mapped)}

    async def close(self) -> None:
        await super().close()
        await self.host.offload(self._let_go)

    def _let_go(self) -> None:
        self._mapped.clear()
        for buffers in (*self._segments.values(), self._near):
            buffers.clear()

    # --- the holder's side ---

    async def _answer(
        self,
        /,
        blocks: Any = None,
        parts: Any = None,
        dtype: Any = None,
        memory: Any = None,
        places: Any = None,
        inodes: Any = None,
        reader: Any = None,
        checksum: Any = False,
        **unknown: Any,
    ) -> dict[str, Any]:
        """Pack parts of blocks into a reader's memory. Blocks are leased until that is done."""
        if self._closed:
            return {"status": "error", "message": "the worker is closing"}
        self._serving += 1
        try:
            no_more(unknown)
            blocks = checked_blocks(blocks)
            parts = checked_parts(parts, [shape for _, shape in blocks])
            name, reader = SegmentName.parse(memory), checked_text("reader", reader)
            inodes = checked_integers("inodes", inodes, 2**64)
            places = checked_integers("places", places, name.size_bytes)
            checksum = checked_yes_or_no("checksum", checksum)
            dtype = checked_text("dtype", dtype)
            # With places in another number than parts, `zip` raises a `ValueError`.
            wanted = [(*blocks[n], box, at) for (n, box), at in zip(parts, places, strict=True)]
            answers = await self.host.offload(
                self._pack_all, reader, name, inodes, wanted, dtype, checksum
            )
        except Exception as exc:
            return refuse(exc)
        finally:
            self._serving -= 1
        return {"status": "ok", "parts": answers}

    def _unmap(self, reader: str, inodes: Sequence[int]) -> None:
        for pair in list(self._mapped):
            if pair[0] == reader and pair[1].inode not in inodes:
                self._mapped.pop(pair, None)

    def _pack_all(
        self,
        reader: str,
        name: SegmentName,
        inodes: Sequence[int],
        wanted: Sequence[tuple[Any, tuple[int, ...], Box, int]],
        dtype: str,
        with_sum: bool,
    ) -> list[dict[str, Any]]:
        """Pack regions; say of a block that fails why it does."""
        self._unmap(reader, inodes)  # what it has no more
        segment = self._mapped.get((reader, name)) or Segment.open(name)
        if wanted:  # else it only wants to know whether that can be done
            self._mapped[reader, name] = segment
        answers = []
        for key, shape, box, place in wanted:
            answer: dict[str, Any] = {"status": "ok"}
            try:
                region = self._pack_region(segment, key, shape, box, place, dtype)
                if with_sum:
                    algorithm = algorithm_for(region)
                    answer["checksum"] = (algorithm, region_sum(key, box, region, algorithm))
            except Exception as exc:
                answer = refuse(exc)
            answers.append(answer)
        return answers

    def _pack_region(
        self, segment: Segment, key: Any, shape: tuple[int, ...], box: Box, place: int, dtype: str
    ) -> Any:
        block = find_block(self.host, key, shape)
        if dtype != dtype_text(block.dtype):
            raise mismatch(f"block {key!r}", dtype, dtype_text(block.dtype))
        if place + box_size(box) * block.dtype.itemsize > segment.name.size_bytes:
            raise ValueError(f"places: {box} does not fit behind byte {place}")
        kind = kernel_for(block).name
        with device_of(block):
            queue = queue_for(kind, beside_copies=True)
            queue.wait_until_written([block], any_stream=self.options.any_producer_stream)
            region = _region_at(segment.array(kind), place, box, block.dtype)
            try:
                queue.pack(region, block[box_slices(box)])()
            finally:
                queue.synchronize()  # once it is answered, the memory is the reader's again
        return region


class _PinnedReading(CommReading):
    name: ClassVar[str] = PinnedTransport.name
    op: ClassVar[str] = _OP
    align_bytes: ClassVar[int] = _ALIGNMENT_BYTES

    def __init__(
        self,
        transport: PinnedTransport,
        requests: Sequence[Request],
        pacing: Pacing,
        options: Options,
    ) -> None:
        super().__init__(transport.host, requests, pacing, options, transport._opened.discard)
        self._transport = transport
        self._segments = transport._segments[requests[0].kind]
        self.buffers = transport._near
        all_items = sum(box_size(box) for request in requests for box in request.boxes)
        all_bytes = all_items * requests[0].dtype.itemsize
        # Of one size, so that they fit the next batch and the next array too.
        self._segment_bytes = buffer_bytes(min(all_bytes, pacing.part_bytes or all_bytes))
        self._asked: deque[_OnDevice] = deque()

    def __iter__(self) -> Iterator[Region]:
        for region in super().__iter__():
            if self.requests[0].kind == "cupy" and isinstance(region.pending, Answer):
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
            segment, memory = self._segments.lend(max(self._segment_bytes, end))
        except Exception as exc:
            return _fail(TransferError(f"pinned: there is no memory to share: {exc}"))
        dtype = self.requests[0].dtype
        regions = [
            _region_at(memory, place, part.box, dtype)
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
        named = self._transport._named(segment, places)
        try:
            answers = await self._ask(parts, dtype=dtype, **named)
        except BaseException:
            segment.is_lost = True
            raise
        if len(answers) != len(parts):
            said = f"{len(answers)} of {len(parts)} regions"
            raise TransferError(f"pinned: {self.requests[0].holder} answered about {said}")
        return [
            await self._region(
                part, {**answer, "data": region} if isinstance(answer, dict) else answer
            )
            for part, answer, region in zip(parts, answers, regions, strict=True)
        ]


class _OnDevice:
    """A region that is copied to the device, as soon as it is in memory of the host."""

    def __init__(self, reading: _PinnedReading, answer: Answer) -> None:
        self._reading = reading
        self._answer = answer
        self._copy: DeviceCopy | None = None

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


def _region_at(memory: Any, place: int, box: Box, dtype: Any) -> Any:
    """Return a region as a C-ordered array in memory, from this byte on."""
    shape = box_shape(box)
    return memory[place : place + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
