"""Windows: memory of GPUs that members of one host read from each other, by CUDA IPC.

A window has `SLOTS` slots for each reader, and an event for each slot. An event of another process
can be waited for only when it has been recorded: so a message tells when that is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dask_p2p.backends.hardware import kernel_and_namespace
from dask_p2p.errors import TransferError
from dask_p2p.transports.in_place import cuda_ipc
from dask_p2p.transports.in_place.descriptor import Peer, separation
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.devices import Gpu

__all__ = ["SLOTS", "OwnWindow", "PeerWindow", "opened"]

SLOTS = 2
_ALIGNMENT_BYTES = 512

_mappings = cuda_ipc.Mappings()  # of all members of this process: a pool is mapped once


class OwnWindow:
    """What other members read.

    Parameters
    ----------
    gpu
        Whose memory it is.
    sizes_bytes
        Of a slot, by the rank of its reader.
    """

    def __init__(self, gpu: Gpu, sizes_bytes: Mapping[int, int]) -> None:
        make = gpu.module.cuda.Event
        self.events = [make(disable_timing=True, interprocess=True) for _ in range(SLOTS)]
        self._places: dict[int, list[int]] = {}
        self._sizes_bytes, end = sizes_bytes, 0
        for rank, size_bytes in sizes_bytes.items():
            aligned = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self._places[rank] = [end + slot * aligned for slot in range(SLOTS)]
            end += SLOTS * aligned
        memory = gpu.backend.allocate(end)
        self._memory = gpu.backend.bytes_of(memory, end, memory)
        # They stay until the readers have closed them, whatever becomes of this object.
        gpu.exported.append((self._memory, self.events))
        handle_of = gpu.module.cuda.runtime.ipcGetEventHandle
        self._told: dict[str, Any] = {
            "peer": asdict(_own_peer()),
            "place": asdict(cuda_ipc.export(self._memory)),
            "events": [bytes(handle_of(event.ptr)).hex() for event in self.events],
        }

    def memory(self, rank: int, slot: int) -> Array:
        """Return the bytes of a slot."""
        start = self._places[rank][slot]
        return self._memory[start : start + self._sizes_bytes[rank]]

    def told(self, rank: int) -> bytes:
        """Return what a reader needs to be told."""
        own = {"starts": self._places[rank], "size_bytes": self._sizes_bytes[rank]}
        return json.dumps({**self._told, **own}).encode()


class PeerWindow:
    """The window of another member, as this one reads it.

    Parameters
    ----------
    gpu
        Of this member.
    told
        What the other one said: `OwnWindow.told`.
    size_bytes
        Of a slot.

    Raises
    ------
    TransferError
        If it cannot be read here.
    """

    def __init__(self, gpu: Gpu, told: bytes, size_bytes: int) -> None:
        runtime = gpu.module.cuda.runtime
        said = json.loads(told)
        peer, place = Peer.parse(said["peer"]), cuda_ipc.Place(**said["place"])
        obstacle = separation(_own_peer(), peer) or cuda_ipc.peer_obstacle(place.gpu)
        if obstacle is not None:
            raise TransferError(str(obstacle), obstacle=obstacle)
        if said["size_bytes"] != size_bytes:
            raise TransferError(f"expected {size_bytes} bytes, got {said['size_bytes']}")
        self._runtime, self._events = runtime, list[int]()
        self._mapping = _mappings.acquire(peer.folder, place, SLOTS * size_bytes)
        start = self._mapping.address + place.offset_bytes
        self._addresses: list[int] = [start + each for each in said["starts"]]
        try:
            for handle in said["events"]:
                self._events.append(runtime.ipcOpenEventHandle(bytes.fromhex(handle)))
        except BaseException:
            self.close()
            raise

    def address(self, slot: int) -> int:
        """Return where a slot is mapped."""
        return self._addresses[slot]

    def wait(self, stream: Any, slot: int) -> None:
        """Have a stream wait until a slot is filled, by what has been recorded so far."""
        self._runtime.streamWaitEvent(stream.ptr, self._events[slot])

    def close(self) -> None:
        """Close it: nothing of this member reads it any more."""
        for event in self._events:
            self._runtime.eventDestroy(event)
        self._events.clear()
        _mappings.release(self._mapping)


def opened(gpu: Gpu, told: bytes, size_bytes: int) -> PeerWindow | None:
    """Open another member's window; None if that cannot be read here, or there is none."""
    if told:
        with suppress(TransferError, ImportError, gpu.module.cuda.runtime.CUDARuntimeError):
            return PeerWindow(gpu, told, size_bytes)
    return None


def _own_peer() -> Peer:
    boot_id, namespace = kernel_and_namespace()
    return Peer(boot_id, namespace, os.getuid(), os.getpid(), _process(), cuda_ipc.gpu_uuid())


@cache
def _process() -> str:
    """Return a name of this process that no other has."""
    return f"{os.getpid()}-{uuid4().hex}"
