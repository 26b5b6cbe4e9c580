"""Windows: memory of GPUs that members of one host read from each other, by CUDA IPC.

A window has `SLOTS` slots for each reader, an event for each slot, and a counter of meetings. What
has no window is read where it lies, behind events as well. An event of another process can be
waited for only when it has been recorded: so a message tells when that is.

Members may also meet on their GPUs, and no host waits for anything. At a meeting a kernel of one
thread for each peer raises the member's counter, and reads the peers' counters until they are as
high. So all that a stream was given before a meeting is done when a peer's stream goes on after it,
as by events and messages. Nothing of it changes from step to step: a graph of a GPU can have it.

Members read each other's counters, and write their own alone. What a member still does when others
have given up, and use that memory for something else, harms nobody.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dask_p2p.backends.device import device_work
from dask_p2p.backends.hardware import kernel_and_namespace
from dask_p2p.errors import DeviceLostError, TransferError
from dask_p2p.interprocess import cuda_ipc
from dask_p2p.interprocess.peer import Peer, separation
from dask_p2p.interprocess.processes import PROCESSES, own_name
from dask_p2p.sections.links import Links
from dask_p2p.sections.lost_events import LostEvents
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.devices import Gpu

SLOTS = 2
COUNTERS_BYTES = 16  # at the beginning of a window: two words of `Meeting`
_ALIGNMENT_BYTES = 512
_MEETING_SOURCE = r"""
extern "C" __global__ void meet(
    volatile unsigned long long* own,  // how many meetings there were, and whether to wait no more
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
_MEETING_THREADS = 32

_T = TypeVar("_T")
_P = TypeVar("_P", bound="PeerMemory")


class OwnEvents:
    """Events that other members wait for."""

    def __init__(
        self,
        gpu: Gpu,  # whose streams record them
        count: int,  # how many
    ) -> None:
        make = gpu.module.cuda.Event
        self.events = [make(disable_timing=True, interprocess=True) for _ in range(count)]
        # They stay until the readers have closed them, whatever becomes of this object.
        gpu.exported.append(self.events)
        handle_of = gpu.module.cuda.runtime.ipcGetEventHandle
        self._told: dict[str, Any] = {
            "peer": asdict(_own_peer()),
            "events": [bytes(handle_of(event.ptr)).hex() for event in self.events],
        }

    def told(self, rank: int) -> bytes:
        """Return what a member needs to be told."""
        return json.dumps(self._told).encode()


class OwnWindow(OwnEvents):
    """What other members read."""

    def __init__(
        self,
        gpu: Gpu,  # whose memory it is
        sizes_bytes: Mapping[int, int],  # of a slot, by the rank of its reader
    ) -> None:
        super().__init__(gpu, SLOTS)
        self._places: dict[int, list[int]] = {}
        self._sizes_bytes, end = sizes_bytes, _ALIGNMENT_BYTES
        for rank, size_bytes in sizes_bytes.items():
            aligned = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self._places[rank] = [end + slot * aligned for slot in range(SLOTS)]
            end += SLOTS * aligned
        memory = gpu.backend.allocate(end)
        self._memory = gpu.backend.bytes_of(memory, end, memory)
        gpu.exported.append(self._memory)
        self.counters = self._memory[:COUNTERS_BYTES].view(np.uint64)
        self.counters[...] = 0
        gpu.wait()  # before others read them
        self._told["place"] = asdict(cuda_ipc.export(self._memory))

    def memory(self, rank: int, slot: int) -> Array:
        """Return the bytes of a slot."""
        start = self._places[rank][slot]
        return self._memory[start : start + self._sizes_bytes[rank]]

    def told(self, rank: int) -> bytes:
        own = {"starts": self._places[rank], "size_bytes": self._sizes_bytes[rank]}
        return json.dumps({**self._told, **own}).encode()


class PeerMemory:
    """The memory of another member, as this one reads it, and its events.

    `TransferError` if it cannot be read here.
    """

    def __init__(
        self,
        gpu: Gpu,  # of this member
        told: bytes,  # what the other one said: `OwnEvents.told`
    ) -> None:
        said = json.loads(told)
        peer = Peer.parse(said["peer"])
        obstacle = separation(_own_peer(), peer) or cuda_ipc.peer_obstacle(peer.memory_proof)
        if obstacle is not None:
            raise TransferError(str(obstacle), obstacle=obstacle)
        self._runtime, self._events = gpu.module.cuda.runtime, list[int]()
        self._peer, self._mapped = peer, dict[int, cuda_ipc.Mapping]()
        self._gpu, self._device = gpu, self._runtime.getDevice()
        self._lost: LostEvents | None = None  # of a process that has ended
        self._lock = threading.Lock()  # held while events may be destroyed
        try:
            for handle in said["events"]:
                self._events.append(self._runtime.ipcOpenEventHandle(bytes.fromhex(handle)))
        except BaseException:
            self.close()
            raise
        PROCESSES.watch(peer.process, peer.pid, self._on_end)

    def mapped(self, place: cuda_ipc.Place, size_bytes: int) -> int:
        """Return where something of the other member is mapped, until this is closed.

        It raises `TransferError` if that cannot be mapped.
        """
        if place.buffer_id not in self._mapped:
            # What was at its addresses is gone, so all that read it here is done.
            for mapping in [*self._mapped.values()]:
                if mapping.overlaps(self._peer.process, place):
                    cuda_ipc.MAPPINGS.release(self._mapped.pop(mapping.place.buffer_id))
            mapping = cuda_ipc.MAPPINGS.acquire(self._peer, place, size_bytes)
            self._mapped[place.buffer_id] = mapping
        return self._mapped[place.buffer_id].address + place.offset_bytes

    def wait(self, stream: Any, number: int) -> None:
        """Have a stream wait for one of the events, as it has been recorded last."""
        self._runtime.streamWaitEvent(stream.ptr, self._events[number])

    @property
    def has_ended(self) -> bool:
        """The other member's process has ended, and reads nothing any more."""
        return PROCESSES.has_ended(self._peer.process)

    def _on_end(self, process: str) -> None:
        """End all waits for events of the other member, whose process has ended."""
        with self._lock, device_work():
            if self._events:
                self._gpu.has_ended = True  # first: from now on streams do not wait for values
                self._lost = LostEvents(self._gpu.module.cuda, self._device, self._events)

    def check_waits(self) -> None:
        """Raise `DeviceLostError` if the GPU waits for ever, for a process that has ended."""
        if self._lost is not None and self._lost.are_waited_for:
            raise DeviceLostError(
                f"the GPU waits for an event of process {self._peer.pid}, which has ended. Only a "
                f"new process helps."
            )

    def close(self) -> None:
        """Close it: nothing of this member reads it any more."""
        PROCESSES.forget(self._peer.process, self._on_end)
        with self._lock:
            for event in self._events:
                self._runtime.eventDestroy(event)
            self._events.clear()
        while self._mapped:
            cuda_ipc.MAPPINGS.release(self._mapped.popitem()[1])


class PeerWindow(PeerMemory):
    """The window of another member, as this one reads it: it waits for the events of slots."""

    def __init__(
        self,
        gpu: Gpu,  # of this member
        told: bytes,  # what the other one said: `OwnWindow.told`
        size_bytes: int,  # of a slot
    ) -> None:
        super().__init__(gpu, told)
        said = json.loads(told)
        try:
            if said["size_bytes"] != size_bytes:
                raise TransferError(f"expected {size_bytes} bytes, got {said['size_bytes']}")
            start = self.mapped(cuda_ipc.Place(**said["place"]), SLOTS * size_bytes)
            self.counters = start
        except BaseException:
            self.close()
            raise
        self._addresses: list[int] = [start + each for each in said["starts"]]

    def address(self, slot: int) -> int:
        """Return where a slot is mapped."""
        return self._addresses[slot]


class Meeting:
    """What members do on their GPUs again and again.

    Parameters
    ----------
    gpu
        Of this member.
    own
        Its window, where its counter is.
    peers
        The windows of those that it meets, which meet it too.
    """

    def __init__(self, gpu: Gpu, own: OwnWindow, peers: Sequence[PeerWindow]) -> None:
        self._gpu, self._counters = gpu, own.counters
        addresses = np.array([peer.counters for peer in peers], np.uint64)
        theirs = gpu.module.asarray(addresses)
        self._kernel = gpu.module.RawKernel(_MEETING_SOURCE, "meet")
        self._kernel.compile()
        self._given = own.counters, theirs, np.int32(len(peers))
        gpu.ending.append(self._end)

    def put(self) -> None:
        """Put a meeting on the member's stream, which is the current one."""
        self._kernel((1,), (_MEETING_THREADS,), self._given)

    def _end(self) -> None:
        """Have the member's GPU wait for nobody any more."""
        ended = self._counters.data.ptr + COUNTERS_BYTES // 2
        runtime, copies = self._gpu.module.cuda.runtime, self._gpu.copies
        runtime.memsetAsync(ended, 1, COUNTERS_BYTES // 2, copies.ptr)


def if_possible(gpu: Gpu, make: Callable[[], _T]) -> _T | None:
    """Return what is made to be shared with other processes; None if that does not work here."""
    with suppress(TransferError, ImportError, gpu.module.cuda.runtime.CUDARuntimeError):
        return make()
    return None


def opened(
    gpu: Gpu,  # of this member: what is opened is closed with its attempt
    links: Links,
    call: str,  # what this is for
    # What others are told, by rank; nothing if this member has nothing for them.
    told: Mapping[int, bytes],
    make: Callable[[int, bytes], _P],  # opens that of a member of this rank, by what it told
) -> dict[int, _P]:
    """Open what other members have, as these open what this one has.

    Return what both could open, by rank.
    """
    heard = links.exchange(f"{call}, windows", told, dict.fromkeys(told))
    found: dict[int, _P] = {}
    for rank, said in heard.items():
        one = if_possible(gpu, partial(make, rank, bytes(said))) if told[rank] and said else None
        if one is not None:
            found[rank] = one
            gpu.peers.append(one)
            gpu.closing.append(one.close)
    seen = {rank: bytes([rank in found]) for rank in told}
    answers = links.exchange(f"{call}, windows seen", seen, dict.fromkeys(told))
    return {rank: one for rank, one in found.items() if any(answers[rank])}


def _own_peer() -> Peer:
    boot_id, namespace = kernel_and_namespace()
    own = own_name()
    return Peer(boot_id, namespace, os.getuid(), os.getpid(), own, "", cuda_ipc.gpu_uuid())
