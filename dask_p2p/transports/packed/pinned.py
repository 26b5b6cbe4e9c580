"""``pinned``: packed regions through host memory that reader and holder share.

For GPUs without peer access to each other, and for allocators whose memory CUDA IPC cannot share
(``cudaMallocAsync``, managed memory). Regions land in memory of the reader, which it names::

    reader                                      holder
      --- RPC: keys, boxes, name of it ------->  maps the memory, once
                                                 copies the regions there (copy engine, or kernel)
      <-- answer: done -----------------------
    copies them to its device (copy engine)

Both have pinned it, so copies run at the speed of PCIe, in both directions at the same time (H200:
48 GB/s each way, and 28 where kernels read it directly). For NumPy blocks it is not pinned, and is
read in place.

Memory whose call got no answer is not reused: the holder may still write there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

from dask_p2p.backends import BACKENDS, Backend, backend_named
from dask_p2p.config import Options, Section, option, positive_bytes, section
from dask_p2p.errors import Obstacle, TransferError
from dask_p2p.interprocess.buffers import Buffers, buffer_bytes
from dask_p2p.interprocess.requests import MalformedRequestError
from dask_p2p.interprocess.segments import Segment, SegmentName, Segments, to_device
from dask_p2p.transports.base import Request
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.footprint import Footprint, Release, buffered, left_bytes, parts_held
from dask_p2p.transports.packed.base import Asked, MemoryTarget, PackedTransport
from dask_p2p.transports.packed.reading import Landing, MemoryLanding, PackedReading
from dask_p2p.transports.replies import ask_and_wait
from dask_p2p.transports.silence import PROBE_TIMEOUT_S
from dask_p2p.types import Array, Kind

# Parts that are asked for ahead. An answer takes 5 ms, of which the copies take one (two H200: 17
# GB/s a reader with 3 of them).
_IN_FLIGHT = 6
_IDLE_PARTS = _IN_FLIGHT + 2
# Segments of readers that are kept mapped, each with a file descriptor. A task has 7 of them.
_MOST_MAPPED = 256
_THREADS = 4  # of which each waits for a copy, out of a GPU or into it


@section("transports.pinned")
class PinnedOptions(Section):
    """See p2p-schema.yaml."""

    part_bytes: int = option("part-bytes", positive_bytes)


class _SegmentLanding(MemoryLanding):
    """Memory that is lent to one call, and copied to the device where regions are wanted there."""

    def room(self, reading: PackedReading, size_bytes: int) -> Array:
        segments = self.transport.segments[self.about.kind]
        try:
            # Of one size, so that memory fits the next batch and the next array too.
            self._segment, memory = segments.lend(max(reading.batch_bytes, size_bytes))
        except Exception as exc:
            raise TransferError(f"there is no memory to share: {exc}") from exc
        return memory

    def where(self, first: int) -> Any:
        return tuple(self._segment.name)

    async def arrived(self, answers: Sequence[Any], deadline_s: float) -> Array:
        if len(answers) < len(self.places):  # holders need no memory of their own
            count = f"{len(answers)} of {len(self.places)} regions"
            raise TransferError(f"{self.about.holder} answered about {count}")
        if not backend_named(self.about.kind).on_device:
            return self.memory
        transport: PinnedTransport = self.transport
        return await transport.worker.offload(self._copied, threads=transport.threads)

    def _copied(self) -> Array:
        memory, self.memory = self.memory, None  # it is lent no longer once the copy is there
        return to_device(memory, self.transport.buffers[self.about.kind])

    def abandon(self) -> None:
        self._segment.is_lost = True


class PinnedTransport(PackedTransport):
    """Regions through memory that both sides have in common."""

    name: ClassVar[str] = "pinned"
    landing: ClassVar[type[Landing]] = _SegmentLanding
    sections: ClassVar[tuple[type[Section], ...]] = (PinnedOptions,)

    @classmethod
    def is_in_auto(cls, options: Options, kind: Kind) -> bool:
        return kind == "cupy"

    @classmethod
    def footprint(cls, options: Options, kind: Kind) -> Footprint:
        """Return parts of the configured size, or the largest for which there is room."""
        part_bytes, on_device = PinnedOptions.of(options).part_bytes, backend_named(kind).on_device

        def held(in_flight: int) -> int:  # what has come is in memory of the device too
            return parts_held(in_flight, kind) + (in_flight + 1) * on_device

        found = buffered(part_bytes, _IN_FLIGHT, left_bytes(options, kind), held)
        # As many are kept in host memory as in device memory; holders pack into the readers' own.
        return replace(found, parts_idle=_IDLE_PARTS, copies=4 if on_device else 2)

    # --- the reader's side, in task threads ---

    def __init__(self, worker: WorkerContext, options: Options) -> None:
        super().__init__(worker, options)
        idle_bytes = {kind: self.footprint(options, kind).idle_bytes(options) for kind in BACKENDS}
        self.segments = {kind: Segments(kind, nbytes) for kind, nbytes in idle_bytes.items()}
        self.buffers = {kind: Buffers(kind, nbytes) for kind, nbytes in idle_bytes.items()}
        self.pools += [*self.segments.values(), *self.buffers.values()]
        self._obstacles: dict[str, Obstacle | None] = {}  # by holder
        self.mapped: OrderedDict[SegmentName, Segment] = OrderedDict()  # of readers, by last use
        self._mapping = threading.Lock()
        self.threads: ThreadPoolExecutor = ThreadPoolExecutor(_THREADS, "p2p-pinned")

    def holder_obstacle(self, holder: str) -> Obstacle | None:
        if holder not in self._obstacles:
            self._obstacles[holder] = self._ask_to_open(holder)
        return self._obstacles[holder]

    def _ask_to_open(self, holder: str) -> Obstacle | None:
        """Have a holder open memory of here; return what keeps it from that."""
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
        # Memory is dear to make and to pin: what this task needs is kept for the next one.
        most_bytes = _IDLE_PARTS * buffer_bytes(reading.batch_bytes)
        needed_bytes = min(most_bytes, self.options.staging_limit_bytes)
        kind = requests[0].kind
        idle_bytes = self.footprint(self.options, kind).idle_bytes(self.options)
        for pool in (self.segments[kind], self.buffers[kind]):
            pool.idle_limit_bytes = max(needed_bytes, idle_bytes)
        return reading

    # --- the holder's side ---

    async def target(self, asked: Asked, where: Any) -> MemoryTarget:
        name = SegmentName.parse(where)
        if not asked.parts:  # the reader only wants to know whether its memory can be opened
            await self.worker.offload(Segment.open, name)
        return _SegmentTarget(self, name)

    def segment(self, name: SegmentName) -> Segment:
        """Return a reader's memory, mapped once; what its readers gave up is not kept."""
        with self._mapping:
            if name not in self.mapped:
                for other in [other for other in self.mapped if not other.is_open()]:
                    del self.mapped[other]
                self.mapped[name] = Segment.open(name)
            self.mapped.move_to_end(name)
            while len(self.mapped) > _MOST_MAPPED:
                self.mapped.popitem(last=False)
            return self.mapped[name]

    # --- both sides ---

    def on_worker_left(self, holder: str) -> None:
        super().on_worker_left(holder)
        self._obstacles.pop(holder, None)
        if self.mapped:  # perhaps its memory, which exists as long as it is mapped here
            self.offload(self._unmap)

    def _unmap(self) -> None:
        with self._mapping:
            self.mapped.clear()

    def let_go(self) -> None:
        super().let_go()
        self._unmap()


class _SegmentTarget(MemoryTarget):
    """Memory of a reader, mapped when there is something to be packed there."""

    def __init__(self, transport: PinnedTransport, name: SegmentName) -> None:
        self._transport, self._name = transport, name

    def begin(self, asked: Asked, reserved: list[Release]) -> None:
        super().begin(asked, reserved)
        if self.size_bytes > self._name.size_bytes:
            room_bytes = self._name.size_bytes
            raise MalformedRequestError(
                f"where: {self.size_bytes} bytes need more than {room_bytes}"
            )

    def memory(self, backend: Backend) -> Array:
        return self._transport.segment(self._name).array(backend)
