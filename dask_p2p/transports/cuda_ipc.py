"""CUDA IPC: allocations of one process mapped into another. The only user of CUDA's driver API.

CuPy and cuda-bindings are imported when a function is called, never with this module.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from dask_p2p.errors import TransferError

__all__ = [
    "Mapping",
    "Mappings",
    "Place",
    "array_at",
    "current_device",
    "export",
    "gpu_uuid",
    "peer_obstacle",
    "synchronize_producers",
]


_MOST_OPEN = 256  # mappings that are kept though nobody uses them


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block lies, in words that another process understands."""

    handle: str  # of the whole allocation, in hex
    buffer_id: int  # unique in the process that made the allocation
    offset_bytes: int  # of the block in the allocation


def gpu_uuid() -> str:
    """UUID, in hex, of the GPU that this process uses; empty if there is none.

    Processes number the same GPUs differently: dask-cuda gives each worker another
    ``CUDA_VISIBLE_DEVICES``.
    """
    try:
        import cupy

        return _uuid(cupy.cuda.runtime.getDevice())
    except Exception:  # no CuPy, no driver, no device: CuPy has no common class for them
        return ""


def current_device() -> int | None:
    """Return the number of this process' GPU; None without one, or if CuPy is not loaded."""
    if "cupy" not in sys.modules:
        return None
    import cupy

    try:
        return int(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


def _uuid(device: int) -> str:
    import cupy

    return bytes(cupy.cuda.runtime.getDeviceProperties(device)["uuid"]).hex()


def peer_obstacle(uuid: str) -> str | None:
    """Say why this process' GPU cannot read the memory of the GPU with this UUID."""
    import cupy

    runtime = cupy.cuda.runtime
    here = runtime.getDevice()
    for device in range(runtime.getDeviceCount()):
        if _uuid(device) == uuid:
            if device == here or runtime.deviceCanAccessPeer(here, device):
                return None
            return "their GPUs have no peer access to each other"
    return "the other's GPU is not among this worker's CUDA_VISIBLE_DEVICES"


def synchronize_producers(block: Any) -> None:
    """Wait until what writes to a block is done: Dask's tasks return before their kernels do."""
    import cupy

    with block.device:
        if cupy.cuda.get_current_stream().ptr == cupy.cuda.Stream.ptds.ptr:
            # With per-thread default streams nobody can tell on which one it was made.
            cupy.cuda.runtime.deviceSynchronize()
        else:
            cupy.cuda.Stream.null.synchronize()


def export(block: Any) -> Place:
    """Return where a block lies.

    Raises
    ------
    TransferError
        If its memory cannot be exported: of `cudaMallocAsync`, or managed.
    """
    import cupy
    from cuda.bindings import driver

    pointer = block.data.ptr
    attribute = driver.CUpointer_attribute
    with block.device:
        if not _query(driver, attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pointer):
            raise TransferError(
                "its allocator's memory cannot be shared by CUDA IPC (cudaMallocAsync or managed "
                "memory). Start the cluster with an RMM pool: rmm_pool_size=..., "
                'rmm_allocator_external_lib_list=["cupy"], without rmm_async and '
                "rmm_managed_memory."
            )
        base = int(_query(driver, attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, pointer))
        buffer_id = int(_query(driver, attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer))
        handle = bytes(cupy.cuda.runtime.ipcGetMemHandle(base))
    return Place(handle.hex(), buffer_id, pointer - base)


def _query(driver: Any, attribute: Any, pointer: int) -> Any:
    error, value = driver.cuPointerGetAttribute(attribute, pointer)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise TransferError(f"the CUDA driver does not tell {attribute.name}: {error.name}")
    return value


def array_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
    """Return a CuPy array of memory that somebody else owns."""
    import cupy

    low_bytes, size_bytes = _extent(shape, strides, dtype.itemsize)
    device = cupy.cuda.runtime.getDevice()
    memory = cupy.cuda.UnownedMemory(address + low_bytes, size_bytes, None, device)
    pointer = cupy.cuda.MemoryPointer(memory, -low_bytes)
    return cupy.ndarray(shape, dtype, pointer, strides)


@lru_cache(maxsize=1024)  # blocks look alike
def _extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return where the memory of an array starts, counted from its first item, and its size."""
    low_bytes = sum(min(0, s * (n - 1)) for s, n in zip(strides, shape, strict=True) if n)
    high_bytes = sum(max(0, s * (n - 1)) for s, n in zip(strides, shape, strict=True) if n)
    return low_bytes, high_bytes - low_bytes + itemsize


@dataclass(slots=True)
class Mapping:
    """An allocation of another process, mapped into this one."""

    address: int
    owner: Mappings = field(repr=False)
    users: int = 0

    def release(self) -> None:
        """Say that one user is done, its kernels included."""
        self.owner._release(self)


class Mappings:
    """Mapped allocations: opened once each, closed when their process has left.

    Where each block is an allocation of its own (CuPy's pool; not RMM's) there can be many: those
    that were used least recently are closed.

    They are told apart by their process and buffer id. A process is known by a name that no other
    has: addresses of workers are used again, and so are ids of buffers by a new process. Handles
    will not do: two allocations of one pool have handles that hardly differ, and a new allocation
    may get the handle of an old one.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], Mapping] = {}
        self._retired: list[Mapping] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Count the mappings that are open."""
        return len(self._open) + len(self._retired)

    def acquire(self, process: str, buffer_id: int, handle: str) -> Mapping:
        """Map an allocation, unless it is mapped already, and count one more user."""
        with self._lock:
            mapping = self._open.pop((process, buffer_id), None)
            if mapping is None:
                mapping = Mapping(self._map(process, handle), self)
            self._open[process, buffer_id] = mapping  # now the last to be closed
            mapping.users += 1
            return mapping

    def _map(self, process: str, handle: str) -> int:
        import cupy

        runtime = cupy.cuda.runtime
        raw = bytes.fromhex(handle)
        try:
            return int(runtime.ipcOpenMemHandle(raw))
        except runtime.CUDARuntimeError:
            # An allocation that its owner has freed may be in the way of one in its place.
            for pair in [p for p, m in self._open.items() if p[0] == process and not m.users]:
                runtime.ipcCloseMemHandle(self._open.pop(pair).address)
        try:
            return int(runtime.ipcOpenMemHandle(raw))
        except runtime.CUDARuntimeError as exc:
            raise TransferError(f"ipc: the memory cannot be mapped: {exc}") from exc

    def retire(self, process: str | None) -> None:
        """Take note that a process has left (None: all), so that its mappings can be closed."""
        with self._lock:
            for pair in [pair for pair in self._open if process in (None, pair[0])]:
                self._retire(pair)

    def close_retired(self) -> None:
        """Close what is retired and has no user. Blocks: not for an event loop."""
        if not self._retired:
            return
        import cupy

        with self._lock:
            unused = [mapping for mapping in self._retired if not mapping.users]
            self._retired = [mapping for mapping in self._retired if mapping.users]
        for mapping in unused:
            cupy.cuda.runtime.ipcCloseMemHandle(mapping.address)

    def _release(self, mapping: Mapping) -> None:
        with self._lock:
            mapping.users -= 1
            if len(self._open) > _MOST_OPEN:
                for pair in [p for p, m in self._open.items() if not m.users][:-_MOST_OPEN]:
                    self._retire(pair)
        self.close_retired()

    def _retire(self, pair: tuple[str, int]) -> None:
        mapping = self._open.pop(pair)
        self._retired.append(mapping)
