"""CUDA IPC: allocations of one process mapped into another.

Functions import CuPy; the import of this module does not.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dask_p2p.backends import SLOTS
from dask_p2p.backends.device import (
    allocation,
    buffer_id,
    close_ipc,
    device_work,
    is_shareable,
    uuid,
)
from dask_p2p.backends.host import RepeatingTimer
from dask_p2p.config import Options
from dask_p2p.errors import DeviceLostError, Obstacle, TransferError
from dask_p2p.transports.process_memory import PROCESSES, Peer
from dask_p2p.types import Array, DType

UNUSED_S = 60.0  # lifetime of an unused mapping
_LEAST_SLOT_BYTES = 2**16  # a kernel reads fewer bytes faster than a copy engine starts

#: Settings that make all memory of a worker shareable, and fast to map.
POOL_REMEDY = (
    'Start the cluster with dask_p2p.local_cluster(), or with rmm_pool_size="40 GiB" (a multiple '
    'of 2 MiB) and rmm_allocator_external_lib_list=["cupy"], without rmm_async and '
    "rmm_managed_memory"
)
_NOT_SHAREABLE = Obstacle(
    "not-shareable",
    "its allocator's memory cannot be shared by CUDA IPC (cudaMallocAsync or managed memory)",
    POOL_REMEDY,
)


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """The location of a block, for another process."""

    gpu: str  # UUID in hex
    handle: str  # IPC handle of the whole allocation, in hex
    buffer_id: int  # id of the allocation, unique in its process
    base: int  # address of the allocation in its process
    nbytes: int  # size of the allocation
    offset_bytes: int  # offset of the block in the allocation


_MOST_SHARED = 1024
_shared: dict[int, IpcHandle] = {}  # by buffer id: this process's allocations


def gpu_uuid() -> str:
    """Return the UUID, in hex, of this thread's GPU; empty without one.

    Processes number the same GPUs differently, because dask-cuda sets another
    ``CUDA_VISIBLE_DEVICES`` for each worker.
    """
    try:
        import cupy

        return uuid(cupy.cuda.runtime.getDevice()).hex()
    except Exception:  # no CuPy, no driver, no device: errors without a common class
        return ""


def peer_obstacle(gpu: str) -> Obstacle | None:
    """Return the reason why this process's GPU cannot read another GPU's memory, or None."""
    import cupy

    runtime = cupy.cuda.runtime
    local = runtime.getDevice()
    for device in range(runtime.getDeviceCount()):
        if uuid(device).hex() == gpu:
            if device == local or runtime.deviceCanAccessPeer(local, device):
                return None
            return Obstacle(
                "no-peer-access",
                "their GPUs have no peer access to each other",
                "See nvidia-smi topo -p2p r; GPUs behind different PCIe roots may lack it",
            )
    return Obstacle(
        "gpu-not-visible",
        "the other worker's GPU is not in this worker's CUDA_VISIBLE_DEVICES",
        "Give each worker all GPUs of its host, its own one first",
    )


def memory_obstacle(local: Peer, remote: Peer) -> Obstacle | None:
    """Return the obstacle to reading a peer's GPU memory by this process, or None."""
    if not local.memory_proof or not remote.memory_proof:
        return Obstacle(
            "no-gpu",
            "one of the two has no GPU, or no cuda-bindings to identify it",
            "Run one worker a GPU, and install dask-p2p[cuda13] or [cuda12] for all",
        )
    return peer_obstacle(remote.memory_proof)


def export(block: Array) -> IpcHandle:
    """Return the location of a block.

    Raises `TransferError` if its memory cannot be exported: memory of `cudaMallocAsync`, managed
    memory, a refusal of the driver, or missing cuda-bindings.
    """
    import cupy

    runtime = cupy.cuda.runtime
    pointer = block.data.ptr
    with block.device as device:
        try:
            number = buffer_id(pointer)
            if (shared := _shared.get(number)) is None:
                if not is_shareable(pointer):
                    raise TransferError(_NOT_SHAREABLE.full_text, obstacle=_NOT_SHAREABLE)
                base, nbytes = allocation(pointer)
                handle = bytes(runtime.ipcGetMemHandle(base)).hex()
                shared = IpcHandle(uuid(device.id).hex(), handle, number, base, nbytes, 0)
                if len(_shared) >= _MOST_SHARED:
                    _shared.clear()
                _shared[number] = shared
        except (runtime.CUDARuntimeError, ImportError) as exc:
            message = f"CUDA IPC does not share memory here ({type(exc).__name__}: {exc})"
            raise TransferError(message) from exc
    place = shared.gpu, shared.handle, shared.buffer_id, shared.base, shared.nbytes
    return IpcHandle(*place, pointer - shared.base)  # `replace` takes as long as all the rest


def array_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType) -> Any:
    """Return a CuPy array in memory of another owner."""
    import cupy

    low_bytes, size_bytes = extent(shape, strides, dtype.itemsize)
    device = cupy.cuda.runtime.getDevice()
    memory = cupy.cuda.UnownedMemory(address + low_bytes, size_bytes, None, device)
    pointer = cupy.cuda.MemoryPointer(memory, -low_bytes)
    return cupy.ndarray(shape, dtype, pointer, strides)


@lru_cache(maxsize=1024)  # blocks are similar
def extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return the start of an array's memory, relative to its first item, and its size."""
    low_bytes = sum(min(0, s * (n - 1)) for s, n in zip(strides, shape, strict=True) if n)
    high_bytes = sum(max(0, s * (n - 1)) for s, n in zip(strides, shape, strict=True) if n)
    return low_bytes, high_bytes - low_bytes + itemsize


@dataclass(slots=True, eq=False)
class MappedAllocation:
    """An allocation of another process, mapped into this one."""

    process: str  # name of the other process
    ipc_handle: IpcHandle  # location of a block in it
    address: int  # address in this process
    is_kept: bool  # true if it stays open while unused
    users: int = 0
    unused_since_s: float = 0.0  # monotonic

    def overlaps(self, process: str, ipc_handle: IpcHandle) -> bool:
        own_handle = self.ipc_handle
        return self.process == process and (
            own_handle.base < ipc_handle.base + ipc_handle.nbytes
            and ipc_handle.base < own_handle.base + own_handle.nbytes
        )


class Mappings:
    """Mapped allocations: each is opened once, and closed when it is no longer used.

    Mapped memory stays allocated on its GPU even if its owner has freed it. A mapping is therefore
    closed

    - after its last user, if the allocation is little more than the block: its owner frees it with
      the block (in CuPy's own pool; allocations of RMM's pool hold many blocks),
    - after `Tuning.unused_mapping_s` without users,
    - when its process has ended, or its worker has left,
    - when the process has another allocation at its addresses, and must have freed this one.

    Keys are the process and the buffer id. A process has a unique name, because new processes
    reuse workers' addresses and buffer ids. Handles are unsuitable: two allocations of one pool
    have nearly equal handles, and a new allocation may get the handle of an old one.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], MappedAllocation] = {}
        self._lock = threading.Lock()  # not held during driver calls
        self._opening: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by process
        self._timer = RepeatingTimer(UNUSED_S, self.close_unused)

    def __len__(self) -> int:
        return len(self._open)

    def acquire(self, peer: Peer, ipc_handle: IpcHandle, block_bytes: int) -> MappedAllocation:
        """Return a mapping of the allocation of a peer's block, open or new, and count a user.

        Raises `TransferError` if the allocation cannot be mapped.
        """
        process = peer.process
        with self._lock:
            if (mapping := self._find_open(process, ipc_handle)) is not None:
                return mapping
            opening = self._opening[process]
        with opening:  # takes 0.1 ms, or seconds for a pool that is no multiple of 2 MiB
            with self._lock:
                if (mapping := self._find_open(process, ipc_handle)) is not None:
                    return mapping
                mappings = self._open.values()
                freed = [mapping for mapping in mappings if mapping.overlaps(process, ipc_handle)]
                if any(mapping.users for mapping in freed):
                    message = "the holder freed an allocation that is still being read here"
                    raise TransferError(message)
                self._forget(freed)
            _close(freed)
            PROCESSES.watch(process, peer.pid, self._on_end, last=True)
            if PROCESSES.has_ended(process):
                raise TransferError(f"the memory cannot be mapped: process {peer.pid} has ended")
            address = self._map(process, bytes.fromhex(ipc_handle.handle))
            mapping = MappedAllocation(
                process, ipc_handle, address, ipc_handle.nbytes >= 2 * block_bytes, users=1
            )
            with self._lock:
                mapping.is_kept &= not PROCESSES.has_ended(process)
                self._open[process, ipc_handle.buffer_id] = mapping
            return mapping

    def release(self, mapping: MappedAllocation) -> None:
        """Release a mapping after one user's work, kernels included."""
        with self._lock:
            mapping.users -= 1
            mapping.unused_since_s = time.monotonic()
            if mapping.users:
                return
            unneeded = [] if mapping.is_kept else [mapping]
            self._forget(unneeded)
        _close(unneeded)
        if self._open:
            self._timer.start()

    def _find_open(self, process: str, ipc_handle: IpcHandle) -> MappedAllocation | None:
        mapping = self._open.get((process, ipc_handle.buffer_id))
        if mapping is not None:
            mapping.users += 1
        return mapping

    def _map(self, process: str, handle: bytes) -> int:
        import cupy

        runtime = cupy.cuda.runtime
        try:
            return int(runtime.ipcOpenMemHandle(handle))
        except runtime.CUDARuntimeError:
            # A mapping of a freed allocation may block one at the same addresses.
            self.close_unused(process)
        try:
            return int(runtime.ipcOpenMemHandle(handle))
        except runtime.CUDARuntimeError as exc:
            raise TransferError(f"the memory cannot be mapped: {exc}") from exc

    def retire(self, process: str | None) -> None:
        """Record that a process (None: all) is gone, so that its mappings can be closed."""
        with self._lock:
            for mapping in self._open.values():
                mapping.is_kept &= process not in (None, mapping.process)
            if process is not None:
                self._opening.pop(process, None)

    def _on_end(self, process: str) -> None:
        self.retire(process)
        with suppress(DeviceLostError), device_work():  # a lost device has lost its memory too
            self.close_unused(process)

    def close(self) -> None:
        """Close all unused mappings, and each other one at its release."""
        self._timer.cancel()
        self.retire(None)
        self.close_unused()

    def close_unused(self, process: str | None = None) -> bool:
        """Close mappings that were unused for long, and all unused mappings of this process.

        Return true if any mapping is left. The call may block: make it from a thread.
        """
        oldest_s = time.monotonic() - UNUSED_S

        def is_due(mapping: MappedAllocation) -> bool:
            is_unwanted = mapping.process == process or not mapping.is_kept
            return not mapping.users and (is_unwanted or mapping.unused_since_s <= oldest_s)

        with self._lock:
            unneeded = [*filter(is_due, self._open.values())]
            self._forget(unneeded)
        _close(unneeded)
        return len(self) > 0

    def _forget(self, mappings: Iterable[MappedAllocation]) -> None:
        for mapping in mappings:
            del self._open[mapping.process, mapping.ipc_handle.buffer_id]


def _close(mappings: Iterable[MappedAllocation]) -> None:
    for mapping in mappings:
        close_ipc(mapping.address)


#: All mappings of this process, for its workers' tasks and its ranks of sections.
MAPPINGS = Mappings()


def ipc_part_bytes(options: Options) -> int | None:
    """Return the limit of a part that a copy engine brings at a time; None: kernels read."""
    # At most half of the limit: the rest is for parts from other hosts.
    slots_bytes = min(options.ipc_staging_bytes, options.staging_limit_bytes // 2)
    slot_bytes = slots_bytes // SLOTS
    return slot_bytes if slot_bytes >= _LEAST_SLOT_BYTES else None
