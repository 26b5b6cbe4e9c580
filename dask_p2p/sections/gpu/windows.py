"""Windows: GPU memory that ranks of one host read from each other, by CUDA IPC.

A window has `SLOTS` slots for each reader, an event for each slot, and a barrier counter. Local
blocks have no window: they are read in place, ordered by events as well. A stream can wait for an
event of another process only after it has been recorded, so a message reports the recording.

Ranks may also synchronize by a *device barrier*, without their hosts. A kernel with one thread for
each peer increments the rank's counter, and reads the peers' counters until they are as high. So
all work that a stream got before the barrier is done when a peer's stream passes it. A barrier's
arguments do not change from step to step, so a CUDA graph can contain it.

A rank reads its peers' counters, and writes only its own. So a rank that is late can do no harm
when the others have given up, and use their memory for something else.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from dask_p2p.backends.device import device_work
from dask_p2p.errors import DeviceLostError, TransferError
from dask_p2p.geometry import Layout
from dask_p2p.sections.wire.connection import Buffer
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.transports import cuda_ipc
from dask_p2p.transports.process_memory import PROCESSES, Peer, separation
from dask_p2p.types import Array, DType

if TYPE_CHECKING:
    from dask_p2p.sections.gpu.streams import GpuStreams


SLOTS = 2
COUNTERS_BYTES = 16  # at the beginning of a window: the two words of its device barrier
_ALIGNMENT_BYTES = 512
_BARRIER_SOURCE = r"""
extern "C" __global__ void device_barrier(
    volatile unsigned long long* own,  // number of barriers so far, and whether waiting has ended
    const volatile unsigned long long* const* theirs, int peers
) {
    const unsigned long long number = own[0] + 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        own[0] = number;
    }
    for (int peer = threadIdx.x; peer < peers; peer += blockDim.x)
        while (*theirs[peer] < number && !own[1]) __nanosleep(100);
    __threadfence_system();
}
"""
_BARRIER_THREADS = 32
_LOOK_S = 0.001

_T = TypeVar("_T")
_O = TypeVar("_O", bound="OwnEvents")
_P = TypeVar("_P", bound="PeerMemory")


class OwnEvents:
    """Events of this rank. Other ranks wait for them."""

    def __init__(
        self,
        gpu: GpuStreams,  # GPU whose streams record the events
        count: int,  # number of events
    ) -> None:
        make = gpu.module.cuda.Event
        self.events = [make(disable_timing=True, interprocess=True) for _ in range(count)]
        # The events stay until the readers have closed them, even if this object does not.
        gpu.exported.append(self.events)
        handle_of = gpu.module.cuda.runtime.ipcGetEventHandle
        self._descriptor: dict[str, Any] = {
            "peer": asdict(Peer.describe_self(cuda_ipc.gpu_uuid())),
            "events": [bytes(handle_of(event.ptr)).hex() for event in self.events],
        }

    def descriptor(self, rank: int) -> bytes:
        return json.dumps(self._descriptor).encode()


class OwnWindow(OwnEvents):
    """Window of this rank. Other ranks read it."""

    def __init__(
        self,
        gpu: GpuStreams,  # GPU of the memory
        sizes_bytes: Mapping[int, int],  # size of a slot, by the rank of its reader
    ) -> None:
        super().__init__(gpu, SLOTS)
        self._sizes_bytes = sizes_bytes
        slots = [(size_bytes,) for size_bytes in sizes_bytes.values() for _ in range(SLOTS)]
        layout = Layout([(COUNTERS_BYTES,), *slots], alignment=_ALIGNMENT_BYTES)
        _, *starts = layout.starts
        self._starts = {rank: starts[SLOTS * n :][:SLOTS] for n, rank in enumerate(sizes_bytes)}
        memory = gpu.backend.allocate(layout.size_bytes)
        self._memory = gpu.backend.bytes_of(memory, layout.size_bytes, memory)
        gpu.exported.append(self._memory)
        self.counters = self._memory[:COUNTERS_BYTES].view(np.uint64)
        self.counters[...] = 0
        gpu.wait()  # before other ranks read the counters
        self._descriptor["ipc_handle"] = asdict(cuda_ipc.export(self._memory))

    def memory(self, rank: int, slot: int) -> Array:
        start = self._starts[rank][slot]
        return self._memory[start : start + self._sizes_bytes[rank]]

    def descriptor(self, rank: int) -> bytes:
        fields = {"starts": self._starts[rank], "size_bytes": self._sizes_bytes[rank]}
        return json.dumps({**self._descriptor, **fields}).encode()


class PeerMemory:
    """Another rank's GPU memory and events, opened for reading.

    Raises `TransferError` if this process cannot read the memory.
    """

    def __init__(
        self,
        gpu: GpuStreams,  # GPU of this rank
        descriptor: bytes,  # descriptor of the other rank: `OwnEvents.descriptor`
    ) -> None:
        fields = json.loads(descriptor)
        peer = Peer(**fields["peer"])
        own_peer = Peer.describe_self(cuda_ipc.gpu_uuid())
        obstacle = separation(own_peer, peer) or cuda_ipc.memory_obstacle(own_peer, peer)
        if obstacle is not None:
            raise TransferError(str(obstacle), obstacle=obstacle)
        self._runtime, self._events = gpu.module.cuda.runtime, list[int]()
        self._peer, self._mapped = peer, dict[int, cuda_ipc.MappedAllocation]()
        self._gpu, self._device = gpu, self._runtime.getDevice()
        self._lost: LostEvents | None = None  # the events, once their process has ended
        self._lock = threading.Lock()  # held while events may be destroyed
        try:
            for handle in fields["events"]:
                self._events.append(self._runtime.ipcOpenEventHandle(bytes.fromhex(handle)))
        except BaseException:
            self.close()
            raise
        PROCESSES.watch(peer.process, peer.pid, self._on_end)
        PROCESSES.watch(peer.process, peer.pid, self._unmap, last=True)

    def mapped(self, ipc_handle: cuda_ipc.IpcHandle, size_bytes: int) -> int:
        """Return the mapped address of the other rank's memory, valid until `close`.

        Raises `TransferError` if the memory cannot be mapped.
        """
        mapping = self._mapped.get(ipc_handle.buffer_id)
        if mapping is None:
            # Older memory at these addresses is gone, so its reads here are done.
            for old_mapping in [*self._mapped.values()]:
                if old_mapping.overlaps(self._peer.process, ipc_handle):
                    cuda_ipc.MAPPINGS.release(self._mapped.pop(old_mapping.ipc_handle.buffer_id))
            mapping = cuda_ipc.MAPPINGS.acquire(self._peer, ipc_handle, size_bytes)
            self._mapped[ipc_handle.buffer_id] = mapping
        return mapping.address + ipc_handle.offset_bytes

    def wait(self, stream: Any, number: int) -> None:
        self._runtime.streamWaitEvent(stream.ptr, self._events[number])

    @property
    def has_ended(self) -> bool:
        return PROCESSES.has_ended(self._peer.process)

    def _on_end(self, process: str) -> None:
        with self._lock, device_work():
            if self._events:
                self._gpu.has_ended = True  # first: from now on streams do not wait for values
                self._lost = LostEvents(self._gpu.module.cuda, self._device, self._events)

    def _unmap(self, process: str) -> None:
        """Unmap memory of a process that has ended, once the GPU is done with it.

        It does not wait for this rank's function, which may run on for long.
        """
        gpu, query = self._gpu, self._runtime.streamQuery
        with gpu.reading:
            if not self._events:
                return
            gpu.has_ended = True  # from now on no read is enqueued
            if gpu.ending:
                return  # but CUDA graphs may still read, until this rank calls `close`
            streams = [gpu.stream, gpu.copies, *gpu.queue.reading]
        with device_work():
            while any(query(stream.ptr) == NOT_READY for stream in streams):
                time.sleep(_LOOK_S)
            self._release()

    def _release(self) -> None:
        with self._lock:
            while self._mapped:
                cuda_ipc.MAPPINGS.release(self._mapped.popitem()[1])

    def check_waits(self) -> None:
        """Raise `DeviceLostError` if the GPU waits for ever for a process that has ended."""
        if self._lost is not None and self._lost.are_waited_for:
            raise DeviceLostError(
                f"the GPU waits for an event of process {self._peer.pid}, which has ended. Restart "
                f"the worker."
            )

    def close(self) -> None:
        """Close the events and unmap the memory, when this rank does not read it any more."""
        for on_end in (self._on_end, self._unmap):
            PROCESSES.forget(self._peer.process, on_end)
        with self._lock:
            for event in self._events:
                self._runtime.eventDestroy(event)
            self._events.clear()
        self._release()


class PeerWindow(PeerMemory):
    """Another rank's window, opened for reading."""

    def __init__(
        self,
        gpu: GpuStreams,  # GPU of this rank
        descriptor: bytes,  # descriptor of the other rank: `OwnWindow.descriptor`
        size_bytes: int,  # size of a slot
    ) -> None:
        super().__init__(gpu, descriptor)
        fields = json.loads(descriptor)
        try:
            if fields["size_bytes"] != size_bytes:
                raise TransferError(f"expected {size_bytes} bytes, got {fields['size_bytes']}")
            start = self.mapped(cuda_ipc.IpcHandle(**fields["ipc_handle"]), SLOTS * size_bytes)
            self.counters = start
        except BaseException:
            self.close()
            raise
        self._addresses: list[int] = [start + offset for offset in fields["starts"]]

    def address(self, slot: int) -> int:
        return self._addresses[slot]


class DeviceBarrier:
    """Reusable device barrier: neighbouring GPUs synchronize by counters in their windows."""

    def __init__(self, gpu: GpuStreams, window: OwnWindow, peers: Sequence[PeerWindow]) -> None:
        self._gpu, self._counters = gpu, window.counters
        addresses = np.array([peer.counters for peer in peers], np.uint64)
        peer_addresses = gpu.module.asarray(addresses)
        self._kernel = gpu.module.RawKernel(_BARRIER_SOURCE, "device_barrier")
        self._kernel.compile()
        self._arguments = window.counters, peer_addresses, np.int32(len(peers))
        with gpu.reading:
            gpu.check_goes_on()
            gpu.ending.append(self._end)

    def enqueue(self) -> None:
        self._kernel((1,), (_BARRIER_THREADS,), self._arguments)

    def _end(self) -> None:
        ended = self._counters.data.ptr + COUNTERS_BYTES // 2
        runtime, copies = self._gpu.module.cuda.runtime, self._gpu.copies
        runtime.memsetAsync(ended, 1, COUNTERS_BYTES // 2, copies.ptr)


def try_share(gpu: GpuStreams, make: Callable[[], _T]) -> _T | None:
    """Return an object to share with other processes; None if CUDA IPC does not work here."""
    with suppress(TransferError, ImportError, gpu.module.cuda.runtime.CUDARuntimeError):
        return make()
    return None


def opened_by_all(
    gpu: GpuStreams, connections: Connections, call: str, events: int
) -> tuple[OwnEvents | None, dict[int, PeerMemory]]:
    """Open the memory of all other ranks of this host: `opened`, with events for all of them."""
    rank, size = connections.rank_and_size
    return opened(
        gpu,
        connections,
        call,
        {*range(size)} - {rank},
        lambda _: OwnEvents(gpu, events),
        lambda _, descriptor: PeerMemory(gpu, descriptor),
    )


def opened(
    gpu: GpuStreams,  # GPU of this rank, which closes opened memory with its attempt
    connections: Connections,
    call: str,  # text of the call, the same on all ranks
    ranks: Iterable[int],  # ranks that this one exchanges data with
    share: Callable[[Sequence[int]], _O],  # returns own memory for ranks of this host
    make: Callable[[int, bytes], _P],  # opens another rank's memory, by rank and descriptor
) -> tuple[_O | None, dict[int, _P]]:
    """Open the memory of other ranks of this host, while these open this rank's memory.

    Returns own memory, or None if it cannot be shared. Also returns opened memory by rank, if both
    sides could open the other's.
    """
    near = [r for r in sorted(ranks) if gpu.has_windows and not connections.is_on_other_host(r)]
    shared = try_share(gpu, partial(share, near)) if near else None
    descriptor = {rank: b"" if shared is None else shared.descriptor(rank) for rank in near}
    received = connections.exchange(f"{call}, windows", descriptor, dict.fromkeys(descriptor))
    mapped: dict[int, _P] = {}
    for rank, fields in received.items():
        one = (
            try_share(gpu, partial(make, rank, bytes(fields)))
            if descriptor[rank] and fields
            else None
        )
        if one is not None:
            mapped[rank] = one
            gpu.peers.append(one)
            gpu.closing.append(one.close)
    has_mapped = {rank: bytes([rank in mapped]) for rank in descriptor}
    replies = connections.exchange(f"{call}, windows seen", has_mapped, dict.fromkeys(descriptor))
    return shared, {rank: one for rank, one in mapped.items() if any(replies[rank])}


#: Number, shape, strides, and CUDA IPC handle.
RegionPiece: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], cuda_ipc.IpcHandle]


@lru_cache(maxsize=64)  # repeated calls use the same memory
def pack_descriptor(axis: int, pieces: tuple[RegionPiece, ...]) -> bytes:
    """Return the descriptor of a region: its axis, and the handles of its pieces."""
    return json.dumps(
        (axis, [(*piece, asdict(ipc_handle)) for *piece, ipc_handle in pieces])
    ).encode()


@lru_cache(maxsize=64)
def _parse_descriptor(text: bytes) -> tuple[int, list[RegionPiece]]:
    axis, pieces = json.loads(text)
    return axis, [
        (number, tuple(length), tuple(strides), cuda_ipc.IpcHandle(**ipc_handle))
        for number, length, strides, ipc_handle in pieces
    ]


def map_descriptor(
    memory: PeerMemory, descriptor: Buffer, dtype: DType
) -> tuple[int, list[tuple[int, Any]]]:
    """Return another rank's region, mapped here: its axis, and its pieces with their numbers."""
    axis, pieces = _parse_descriptor(bytes(descriptor))
    arrays = []
    for number, shape, strides, ipc_handle in pieces:
        _, size_bytes = cuda_ipc.extent(shape, strides, dtype.itemsize)
        address = memory.mapped(ipc_handle, size_bytes)
        arrays.append((number, cuda_ipc.array_at(address, shape, strides, dtype)))
    return axis, arrays


# Events of a process that has ended: ends the waits of this process's streams for them.
#
# A process records an event on its GPU behind its work. If it ends before that work is done, the
# event never completes, and a stream of another process that waits for it would wait for ever. CUDA
# lets each process that has opened an event record it. So this process records such events itself,
# on an idle stream, and all waits end.
#
# The stream then continues with memory that may not have been written. Its results are dropped: the
# attempt has lost a rank.

NOT_READY = 600  # of CUDA: cudaErrorNotReady
# Priorities of the two streams, unlike those of other streams. Streams of one priority may share a
# hardware queue, where one waiting stream blocks all others.
_OF_WAITING, _OF_RECORDING = -2, -3
_LONGEST_S = 0.5  # time within which waits end


class LostEvents:
    """Records the events of a process that has ended, in its place."""

    def __init__(self, cuda: Any, device: int, events: Sequence[int]) -> None:
        self._runtime = cuda.runtime
        with cuda.Device(device):
            self._waiting = cuda.Stream(non_blocking=True, priority=_OF_WAITING)
            self._recording = cuda.Stream(non_blocking=True, priority=_OF_RECORDING)
            for event in events:  # before they are recorded, like the streams that already wait
                self._runtime.streamWaitEvent(self._waiting.ptr, event)
            for event in events:
                self._runtime.eventRecord(event, self._recording.ptr)
        self._recorded_s = time.monotonic()

    @property
    def are_waited_for(self) -> bool:
        """True if streams still wait for the events long after they were recorded."""
        is_late = time.monotonic() - self._recorded_s > _LONGEST_S
        return is_late and self._runtime.streamQuery(self._waiting.ptr) == NOT_READY
