"""The CuPy backend: arrays in the memory of NVIDIA GPUs.

Methods import CuPy; the import of this module does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from dask_p2p.backends.base import Backend, HostLink
from dask_p2p.backends.device import device_work, gpu_obstacle, is_shareable, private_stream
from dask_p2p.backends.device_queue import DeviceQueue, Slot
from dask_p2p.backends.host import computes_on_gpu, link_gbs
from dask_p2p.backends.host_memory import is_pinned
from dask_p2p.backends.pipelines import HostStreams
from dask_p2p.errors import UnsupportedArrayError, install_command
from dask_p2p.types import Array, DTypeLike

LINK_COPY_BYTES = 2**25  # takes less than a millisecond, but much more than its start
LINK_COPIES = 5  # of a measurement of the link of a GPU to its host

# RMM resources that allocate GPU memory only. Managed memory can exceed it.
_WITHIN_THE_GPU = ("CudaMemoryResource", "CudaAsyncMemoryResource")


class CupyBackend(Backend):
    """CuPy arrays of any dtype, on one GPU or in a peer's mapped memory."""

    name = "cupy"
    title = "CuPy"
    on_device = True
    holds_objects = False
    most_probe_bytes = 256 * 2**20
    fft_modules = ("dask_p2p.backends.cufft",)

    @property
    def module(self) -> Any:
        return _import_cupy()

    def check(self, block: Array) -> None:
        if not isinstance(block, _import_cupy().ndarray):
            raise UnsupportedArrayError(
                f"expected a cupy.ndarray, got {type(block).__name__} of CuPy. Convert it first: "
                "map_blocks(cupy.asarray)."
            )

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        return _import_cupy().empty(tuple(shape), dtype)

    def permute_into(self, dst: Array, src: Array, axes: Sequence[int]) -> None:
        _import_kernels().permute_into(dst, src, axes)

    def queue(self, *, leave_bandwidth: bool = False) -> DeviceQueue:
        _import_cupy()  # raises an error with the remedy
        return DeviceQueue(self.name, leave_bandwidth)

    def to_host(self, array: Array) -> Any:
        return array.get()

    def allocate(self, size_bytes: int) -> Any:
        cuda = _import_cupy().cuda
        stream = private_stream()
        with stream:
            memory = cuda.alloc(size_bytes)
        # A pool may have given this stream memory that another stream still writes, and the next
        # writer may use no stream at all. A wait for the whole device, with other regions and their
        # kernels, would cost a fifth of an exchange's speed.
        stream.synchronize()
        if is_shareable(memory.ptr):
            return memory
        # UCX would move unshareable memory through the host, 8 KiB at a time.
        return cuda.MemoryPointer(cuda.Memory(size_bytes), 0)

    def bytes_of(self, memory: Any, size_bytes: int, owner: Any) -> Any:
        cupy = _import_cupy()
        unowned = cupy.cuda.UnownedMemory(memory.ptr, size_bytes, owner, memory.device_id)
        return cupy.ndarray((size_bytes,), np.uint8, cupy.cuda.MemoryPointer(unowned, 0))

    def is_in_use(self) -> bool:
        return computes_on_gpu()

    def memory_below(self, wanted_bytes: int, worker_limit_bytes: int | None) -> int | None:
        if wanted_bytes <= _total_bytes(_import_cupy().cuda.runtime.getDevice()):
            return None
        return self.device_bytes() or None

    def device_bytes(self) -> int:
        resources = _rmm_resources()
        if resources and type(resources[-1]).__name__ not in _WITHIN_THE_GPU:
            return 0
        return _total_bytes(_import_cupy().cuda.runtime.getDevice())

    def device_name(self) -> str:
        runtime = _import_cupy().cuda.runtime
        name = runtime.getDeviceProperties(runtime.getDevice())["name"]
        return name.decode() if isinstance(name, bytes) else str(name)

    def device_status(self) -> dict[str, Any]:
        cupy = _import_cupy()
        runtime = cupy.cuda.runtime
        try:
            properties = runtime.getDeviceProperties(runtime.getDevice())
        except runtime.CUDARuntimeError:
            return {}
        name = self.device_name()
        allocator = cupy.cuda.get_allocator()
        return {
            "kind": self.name,
            "gpu": name,
            "mig": "MIG" in name,
            "cupy_uses_rmm": str(getattr(allocator, "__module__", "")).partition(".")[0] == "rmm",
            "link_gbs": link_gbs(bytes(properties["uuid"])),
            **_rmm_status(),
        }

    def host_link(self, warn: Callable[..., None]) -> HostLink | None:
        if gpu_obstacle() is not None:
            return None
        with device_work():
            return measure_host_link(warn)

    def warm_up(self) -> None:
        _import_kernels().load_all()

    def device_of(self, block: Array) -> Any:
        return block.device

    def checksum(self, array: Array) -> int:
        if not array.nbytes:
            return 0
        # On the null stream it would wait for tasks' work.
        with array.device, private_stream("checksums"):
            data = _import_cupy().ascontiguousarray(array).reshape(-1).view(np.uint8)
            total: int = _import_kernels().checksum_bytes(data)
            return total


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedArrayError(
            f"expected an importable CuPy for CuPy blocks, got: {error}. Run: "
            f"{install_command('cuda13')}, or with a driver of CUDA 12 for [cuda12]."
        ) from error
    return cupy


@cache
def _import_kernels() -> Any:
    _import_cupy()
    return import_module("dask_p2p.backends.kernels.cuda")


def region_batch() -> Any:
    """Return an object that enqueues copies of many small regions together: a `RegionBatch`."""
    return _import_kernels().RegionBatch()


@cache  # a driver call that each task would repeat
def _total_bytes(device_id: int) -> int:
    cuda = _import_cupy().cuda
    with cuda.Device(device_id):
        return int(cuda.runtime.memGetInfo()[1])


def free_bytes() -> int:
    """Return the memory of the current GPU that new arrays may use, or all memory of its pool."""
    free, _ = _import_cupy().cuda.runtime.memGetInfo()
    return max(int(free), _rmm_status().get("pool_bytes") or 0)


def _rmm_resources() -> list[Any]:
    """Return RMM's memory resources, from the current one to the one that calls CUDA.

    Empty if RMM is not in use. Statistics, logs and pools wrap their upstream resource.
    """
    if "rmm" not in sys.modules:
        return []
    import rmm

    resources = [rmm.mr.get_current_device_resource()]
    while hasattr(resources[-1], "get_upstream"):
        resources.append(resources[-1].get_upstream())
    return resources


def _rmm_status() -> dict[str, Any]:
    resources = _rmm_resources()
    if not resources:
        return {}
    pools = (resource for resource in resources if hasattr(resource, "pool_size"))
    pool = next(pools, None)
    return {
        "memory_resource": type(resources[-1] if pool is None else pool).__name__,
        "pool_bytes": None if pool is None else pool.pool_size(),
    }


CUPY = CupyBackend()


# A short measurement of the speed of copies between pinned host memory and a GPU.
#
# Functions import CuPy; the import of this module does not.


def measure_host_link(warn: Callable[..., None]) -> HostLink | None:
    """Measure the link of the current GPU.

    If no memory can be pinned, call `warn` with the reason and return None. The call blocks: make
    it from a thread, in `device_work`.
    """
    half, copies = LINK_COPY_BYTES, LINK_COPIES
    slot_bytes = 2 * half
    streams = HostStreams(warn)
    slots = streams.device_slots(1, slot_bytes)
    host_slots = streams.host_slots(1, slot_bytes)
    memory, host = slots[0], host_slots[0]
    try:
        if not is_pinned(host.memory):
            return None
        streams.copy_up(memory.memory[:slot_bytes], host.memory[:slot_bytes])
        streams.synchronize()
        up_s, down_s, both_s = (
            min(_time_copies(streams, memory, host, directions) for _ in range(copies))
            for directions in (("up",), ("down",), ("up", "down"))
        )
        return HostLink(*(n * half / s / 1e9 for n, s in ((1, up_s), (1, down_s), (2, both_s))))
    finally:
        streams.synchronize()
        streams.keep(slots, host_slots)


def _time_copies(link: HostStreams, memory: Slot, host: Slot, directions: tuple[str, ...]) -> float:
    """Return the seconds of copies that start together, until the end of the last one."""
    half = LINK_COPY_BYTES
    cuda = link.cupy.cuda
    first, *later_streams = (link.streams[direction] for direction in directions)
    start, stop = cuda.Event(), cuda.Event()
    start.record(first)
    for stream in later_streams:
        stream.wait_event(start)
    if "up" in directions:
        link.copy_up(memory.memory[:half], host.memory[:half])
    if "down" in directions:
        link.copy_down(host.memory[half : 2 * half], memory.memory[half : 2 * half])
    for stream in later_streams:
        first.wait_event(stream.record())
    stop.record(first)
    stop.synchronize()
    return float(cuda.get_elapsed_time(start, stop)) / 1e3
