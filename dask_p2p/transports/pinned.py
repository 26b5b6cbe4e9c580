"""``pinned``: packed regions through host memory that reader and holder share.

For GPUs without peer access to each other, and for allocators whose memory CUDA IPC cannot share
(``cudaMallocAsync``, managed memory). The holder packs regions into shared memory of the reader::

    reader                                      holder
      --- RPC: keys, boxes, segment's name --->  maps the segment, once
                                                 copies the regions (copy engine or kernel)
      <-- reply: ok ---------------------------
    copies them to its device (copy engine)

Both sides pin the memory, so that copies run at the speed of PCIe in both directions. On an H200
this is 48 GB/s each way, and 28 if kernels read the memory directly. For NumPy blocks the memory
is not pinned, and the reader reads regions in place.

A segment whose call got no reply is not reused, since the holder may still write to this memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

from dask_p2p.backends import BACKENDS, Backend, backend_named
from dask_p2p.config import Options
from dask_p2p.errors import Obstacle, TransferError
from dask_p2p.transports.base import PROBE_TIMEOUT_S, Request, WorkerContext
from dask_p2p.transports.buffers import (
    Buffers,
    Footprint,
    Segment,
    SegmentName,
    Segments,
    buffer_bytes,
    fit_parts,
    left_bytes,
    parts_held,
    to_device,
)
from dask_p2p.transports.packed import FlatSendBuffer, PackedTransport, ReadRequest
from dask_p2p.transports.packed_reading import FlatRecvBuffer, PackedReading, RecvBuffer
from dask_p2p.transports.rpc import ask_and_wait
from dask_p2p.types import Array, Kind

_PART_BYTES = 2**25
# Parts requested ahead. A reply takes 5 ms, including 1 ms of copies (two H200: 17 GB/s per reader
# with 3 parts ahead).
_IN_FLIGHT = 6
_IDLE_PARTS = _IN_FLIGHT + 2
_THREADS = 4  # each waits for a copy from or to a GPU


class _SegmentRecvBuffer(FlatRecvBuffer):
    """A shared segment, lent to one call. Regions for a GPU are copied from it to the device."""

    def allocate(self, reading: PackedReading, size_bytes: int) -> Array:
        segments = self.transport.segments[self.about.kind]
        try:
            # All of one size, so that a segment also fits the next batch and the next array.
            self._segment, memory = segments.lend(max(reading.batch_bytes, size_bytes))
        except Exception as exc:
            raise TransferError(f"there is no memory to share: {exc}") from exc
        return memory

    def where(self, first: int) -> Any:
        return tuple(self._segment.name)

    async def wait_for_arrival(self, replies: Sequence[Any], deadline_s: float) -> Array:
        if not backend_named(self.about.kind).on_device:
            return self.memory
        transport: PinnedTransport = self.transport
        return await transport.worker.offload(self._copy_to_device, threads=transport.threads)

    def _copy_to_device(self) -> Array:
        memory, self.memory = self.memory, None  # the loan ends with the copy
        return to_device(memory, self.transport.buffers[self.about.kind])

    def abandon(self) -> None:
        self._segment.is_lost = True


class PinnedTransport(PackedTransport):
    """Transport of regions through host memory that reader and holder share."""

    name: ClassVar[str] = "pinned"
    recv_buffer: ClassVar[type[RecvBuffer]] = _SegmentRecvBuffer

    @classmethod
    def is_in_auto(cls, kind: Kind) -> bool:
        return kind == "cupy"

    @classmethod
    def footprint(cls, options: Options, kind: Kind) -> Footprint:
        part_bytes = options.part_bytes or _PART_BYTES
        on_device = backend_named(kind).on_device

        def count_held(in_flight: int) -> int:  # parts that have arrived are in device memory too
            return parts_held(in_flight, kind) + (in_flight + 1) * on_device

        footprint = fit_parts(part_bytes, _IN_FLIGHT, left_bytes(options, kind), count_held)
        # Idle parts are counted in host memory and in device memory. Holders have no own memory.
        return replace(footprint, parts_idle=_IDLE_PARTS, copies=4 if on_device else 2)

    # --- the reader's side, in task threads ---

    def __init__(self, worker: WorkerContext, options: Options) -> None:
        super().__init__(worker, options)
        idle_bytes = {kind: self.footprint(options, kind).idle_bytes(options) for kind in BACKENDS}
        self.segments = {kind: Segments(kind, nbytes) for kind, nbytes in idle_bytes.items()}
        self.buffers = {kind: Buffers(kind, nbytes) for kind, nbytes in idle_bytes.items()}
        self.pools += [*self.segments.values(), *self.buffers.values()]
        self._obstacles: dict[str, Obstacle | None] = {}  # by holder
        self.mapped: dict[SegmentName, Segment] = {}  # of readers
        self._mapping = threading.Lock()
        self.threads: ThreadPoolExecutor = ThreadPoolExecutor(_THREADS, "p2p-pinned")

    def holder_obstacle(self, holder: str) -> Obstacle | None:
        if holder not in self._obstacles:
            self._obstacles[holder] = self._ask_to_open(holder)
        return self._obstacles[holder]

    def _ask_to_open(self, holder: str) -> Obstacle | None:
        try:
            segment, _ = self.segments["numpy"].lend(1)
        except (OSError, AttributeError, MemoryError) as exc:
            return Obstacle("no-shared-memory", f"this worker has no memory to share: {exc}")
        reply = ask_and_wait(
            self.worker, holder, self.op, PROBE_TIMEOUT_S, "shared memory",
            blocks=[], parts=[], dtype="", item_bytes=0, wait_s=PROBE_TIMEOUT_S,
            where=tuple(segment.name),
        )  # fmt: skip
        if isinstance(reply, dict) and reply.get("status") == "ok":
            return None
        message = reply.get("message", reply) if isinstance(reply, dict) else reply
        return Obstacle("no-shared-memory", str(message))

    def read(self, requests: Sequence[Request], options: Options) -> PackedReading:
        reading = super().read(requests, options)
        # Allocating and pinning memory is slow: the memory of this task is kept for the next.
        most_bytes = _IDLE_PARTS * buffer_bytes(reading.batch_bytes)
        needed_bytes = min(most_bytes, self.options.staging_limit_bytes)
        kind = requests[0].kind
        idle_bytes = self.footprint(self.options, kind).idle_bytes(self.options)
        for pool in (self.segments[kind], self.buffers[kind]):
            pool.idle_limit_bytes = max(needed_bytes, idle_bytes)
        return reading

    # --- the holder's side ---

    async def make_send_buffer(self, request: ReadRequest, where: Any) -> FlatSendBuffer:
        name = SegmentName(*where)
        if not request.parts:  # the reader only tests whether its memory can be opened
            await self.worker.offload(Segment.open, name)
        return _SegmentSendBuffer(self, name)

    def segment(self, name: SegmentName) -> Segment:
        """Return a reader's segment, mapped once. Unmap segments that readers have closed."""
        with self._mapping:
            if name not in self.mapped:
                for closed_name in [
                    mapped_name for mapped_name in self.mapped if not mapped_name.is_open()
                ]:
                    del self.mapped[closed_name]
                self.mapped[name] = Segment.open(name)
            return self.mapped[name]

    # --- both sides ---

    def on_worker_left(self, holder: str) -> None:
        super().on_worker_left(holder)
        self._obstacles.pop(holder, None)
        if self.mapped:  # perhaps its segments, whose memory is freed when unmapped here
            self.offload(self._unmap)

    def _unmap(self) -> None:
        with self._mapping:
            self.mapped.clear()

    def free_memory(self) -> None:
        super().free_memory()
        self._unmap()


class _SegmentSendBuffer(FlatSendBuffer):
    """A segment of a reader, mapped for the first region that is packed into it."""

    def __init__(self, transport: PinnedTransport, name: SegmentName) -> None:
        self._transport, self._name = transport, name

    def memory(self, backend: Backend) -> Array:
        return self._transport.segment(self._name).array(backend)
