"""``pinned``: packed regions through host memory that reader and holder share.

For GPUs without peer access to each other, and for allocators whose memory CUDA IPC cannot share
(``cudaMallocAsync``, managed memory). It works like ``comm``, except for the data: a reader also
names memory of its own, and the holder packs the regions there instead of into its answer::

    reader                                      holder
      --- RPC: keys, boxes, memory, places --->  maps the memory, once
                                                 copies the regions there (copy engine, or kernel)
      <-- answer: done -----------------------
    copies them to its device (copy engine)

Both have pinned it, so copies run at the speed of PCIe, in both directions at the same time (H200:
48 GB/s each way, and 28 where kernels read it directly). For NumPy blocks it is not pinned, and is
read in place.

Memory whose call got no answer is not reused: the holder may still write there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dask_p2p.backends import BACKENDS, backend_for, backend_named, device_of
from dask_p2p.config import NOT_IN_AUTO, Options, Section, option, positive_bytes, section
from dask_p2p.errors import Obstacle, TransferError
from dask_p2p.layout import Box, box_size, box_slices
from dask_p2p.retry import MEET_S
from dask_p2p.transports.base import Handler, Transport, answers
from dask_p2p.transports.buffers import Buffers, buffer_bytes
from dask_p2p.transports.checksums import region_sum
from dask_p2p.transports.comm import CommTransport
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.flow_control import FlowControl, PackingLimits, buffered_flow, parts_held
from dask_p2p.transports.pinned_reading import READ_OP, PinnedReading
from dask_p2p.transports.reading import Reading, Request
from dask_p2p.transports.registry import left_bytes
from dask_p2p.transports.replies import ask_and_wait, dtype_text, find_block, mismatch, refuse
from dask_p2p.transports.requests import (
    checked_blocks,
    checked_integers,
    checked_parts,
    checked_text,
    checked_yes_or_no,
)
from dask_p2p.transports.segments import Segment, SegmentName, Segments, region_at
from dask_p2p.types import DType, Key, Kind

__all__ = ["PinnedOptions", "PinnedTransport"]

# Parts that are asked for ahead. An answer takes 5 ms, of which the copies take one (two H200: 17
# GB/s a reader with 3 of them).
_IN_FLIGHT = 6


@section("transports.pinned")
@dataclass(frozen=True, slots=True)
class PinnedOptions(Section):
    """See p2p-schema.yaml."""

    part_bytes: int = option("part-bytes", positive_bytes)


class PinnedTransport(CommTransport):
    """Regions as answers to RPCs, through memory that both sides have in common."""

    name: ClassVar[str] = "pinned"
    idle_parts: ClassVar[int] = _IN_FLIGHT + 2  # in host memory, and in device memory
    probe = Transport.probe  # as it is no last resort

    # --- flow control ---

    @classmethod
    def rank(cls, kind: Kind, options: Options) -> float:
        return 60 if backend_named(kind).on_device else NOT_IN_AUTO

    @classmethod
    def flow_control(cls, options: Options, kind: Kind) -> FlowControl:
        """Return parts of the configured size, or the largest for which there is room."""
        part_bytes, left = PinnedOptions.of(options).part_bytes, left_bytes(options, kind)
        return buffered_flow(part_bytes, _IN_FLIGHT, left, lambda n: cls._held(n, kind))

    @staticmethod
    def _held(in_flight: int, kind: Kind) -> int:
        """Count parts at a time: on the device those being placed, the one before, and the next."""
        return parts_held(in_flight, kind) + 2 * backend_named(kind).on_device

    @classmethod
    def staging_bytes(
        cls, options: Options, kind: Kind, largest_bytes: int, remote_bytes: int, item_bytes: int
    ) -> int:
        flow = cls.flow_control(options, kind)  # small parts come together
        part_bytes = buffer_bytes(min(max(item_bytes, flow.part_bytes or 0), remote_bytes))
        copies = 4 if backend_named(kind).on_device else 2  # in buffers of powers of two
        return min(cls._held(flow.parts_in_flight, kind) * part_bytes, copies * remote_bytes)

    @classmethod
    def packing(cls, options: Options, kind: Kind) -> PackingLimits:
        return PackingLimits(0, 0)  # into memory of the reader's

    # --- both sides ---

    def __init__(self, host: WorkerContext, options: Options) -> None:
        super().__init__(host, options)
        idle_bytes = {kind: self.idle_bytes(options, kind) for kind in BACKENDS}
        self.segments = {kind: Segments(kind, nbytes) for kind, nbytes in idle_bytes.items()}
        self._buffers = {kind: Buffers(kind, nbytes) for kind, nbytes in idle_bytes.items()}
        self.pools += [*self.segments.values(), *self._buffers.values()]
        self._obstacles: dict[str, Obstacle | None] = {}  # by holder
        self._mapped: dict[tuple[str, SegmentName], Segment] = {}  # of readers, by address and name

    def handlers(self) -> Mapping[str, Handler]:
        return {READ_OP: self._answer}

    # --- the reader's side, in task threads ---

    def obstacle(self, holder: str, kind: Kind, dtype: DType) -> Obstacle | None:
        if dtype.hasobject:
            return Obstacle("objects", "pinned moves bytes, not Python objects")
        if holder not in self._obstacles:
            try:
                self._obstacles[holder] = self._meet(holder)
            except TransferError as exc:  # it may answer the next time
                return Obstacle("no-answer", str(exc))
        return self._obstacles[holder]

    def _meet(self, holder: str) -> Obstacle | None:
        """Have a holder open memory of here; return what keeps it from that."""
        try:
            segment, _ = self.segments["numpy"].lend(1)
        except (OSError, AttributeError, MemoryError) as exc:
            return Obstacle("no-shared-memory", f"this worker has no memory to share: {exc}")
        named = {"blocks": [], "parts": [], "dtype": "", **self._named(segment, [])}
        about = "shared memory"
        reply = ask_and_wait("pinned", self.host, holder, READ_OP, MEET_S, about, **named)
        if isinstance(reply, dict) and reply.get("status") == "ok":
            return None
        message = reply.get("message", reply) if isinstance(reply, dict) else reply
        return Obstacle("no-shared-memory", str(message))

    def _named(self, segment: Segment, places: Sequence[int]) -> dict[str, Any]:
        """Return how a holder is told where regions are to be."""
        inodes = [inode for segments in self.segments.values() for inode in segments.inodes()]
        memory = {"memory": tuple(segment.name), "places": places, "inodes": inodes}
        return {"reader": self.host.address, **memory}

    def read(self, requests: Sequence[Request], options: Options) -> Reading:
        flow = self.flow_for(requests, options)
        kind, closed = requests[0].kind, self._opened.discard
        pools = self.segments[kind], self._buffers[kind]
        reading = PinnedReading(self.host, requests, flow, options, closed, *pools, self._named)
        # Memory is dear to make and to pin: what this task needs is kept for the next one.
        needed_bytes = min(
            self.idle_parts * reading.segment_bytes, self.options.staging_limit_bytes
        )
        for pool in pools:
            pool.idle_limit_bytes = max(needed_bytes, self.idle_bytes(self.options, kind))
        self._opened.add(reading)
        return reading

    def on_worker_left(self, holder: str) -> None:
        self._obstacles.pop(holder, None)
        if any(reader == holder for reader, _ in list(self._mapped)):
            self.offload(self._unmap, holder, ())

    def usage(self) -> dict[str, int]:
        return {**super().usage(), "mapped": len(self._mapped)}

    async def close(self) -> None:
        await super().close()
        await self.host.offload(self._let_go)

    def _let_go(self) -> None:
        self._mapped.clear()
        for buffers in self.pools:
            buffers.clear()

    # --- the holder's side ---

    @answers
    async def _answer(
        self,
        *,
        blocks: Any,
        parts: Any,
        dtype: Any,
        memory: Any,
        places: Any,
        inodes: Any,
        reader: Any,
        checksum: Any = False,
    ) -> dict[str, Any]:
        """Pack parts of blocks into a reader's memory. Blocks are leased until that is done."""
        blocks = checked_blocks(blocks)
        parts = checked_parts(parts, [shape for _, shape in blocks])
        name, reader = SegmentName.parse(memory), checked_text("reader", reader)
        inodes = checked_integers("inodes", inodes, 2**64)
        places = checked_integers("places", places, name.size_bytes)
        checksum = checked_yes_or_no("checksum", checksum)
        dtype = checked_text("dtype", dtype)
        # With places in another number than parts, `zip` raises a `ValueError`.
        wanted = [(*blocks[n], box, at) for (n, box), at in zip(parts, places, strict=True)]
        packing = self._pack_all, reader, name, inodes, wanted, dtype, checksum
        return {"parts": await self.host.offload(*packing)}

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
                    algorithm = backend_for(region).checksum_algorithm
                    answer["checksum"] = (algorithm, region_sum(key, box, region, algorithm))
            except Exception as exc:
                answer = refuse(exc)
            answers.append(answer)
        return answers

    def _pack_region(
        self, segment: Segment, key: Key, shape: tuple[int, ...], box: Box, place: int, dtype: str
    ) -> Any:
        block = find_block(self.host, key, shape)
        if dtype != dtype_text(block.dtype):
            raise mismatch(f"block {key!r}", dtype, dtype_text(block.dtype))
        if place + box_size(box) * block.dtype.itemsize > segment.name.size_bytes:
            raise ValueError(f"places: {box} does not fit behind byte {place}")
        backend = backend_for(block)
        with device_of(block):
            queue = backend.queue(beside_copies=True)
            queue.wait_until_written([block], any_stream=self.options.any_producer_stream)
            region = region_at(segment.array(backend), place, box, block.dtype)
            try:
                queue.pack(region, block[box_slices(box)])()
            finally:
                queue.synchronize()  # once it is answered, the memory is the reader's again
        return region
