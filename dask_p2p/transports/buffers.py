"""Reused buffers for regions in transit, in host or device memory.

New memory is expensive if another library writes it. Host pages fault at their first touch. On a
GPU, kernels that were queued by its previous owner may still write a pool's memory, and a library
without streams would have to wait for the whole device.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dask_p2p.backends import MOST_UNREAD, Backend, backend_named
from dask_p2p.backends.device import MEMCPY_DEFAULT, current_device
from dask_p2p.backends.host import kernel_and_namespace
from dask_p2p.backends.host_memory import pin_while
from dask_p2p.config import Options, transport_classes
from dask_p2p.errors import TransferError
from dask_p2p.types import Array, DTypeLike, Kind

_GRANULE_BYTES = 2**9  # least size; sizes are powers of two, so that few differ


def buffer_bytes(nbytes: int) -> int:
    """Return the size of the buffer for an array of `nbytes`.

    >>> buffer_bytes(70_000), buffer_bytes(1)
    (131072, 512)
    """
    return max(_GRANULE_BYTES, 1 << max(0, nbytes - 1).bit_length())


class Buffers:
    """A pool of buffers, of the kind "numpy" or "cupy", with a limit of idle bytes.

    A buffer is taken as an array, and returns to the pool when the array and all its views are
    freed. Drop the last view only after all work with it, kernels included.
    """

    def __init__(self, kind: Kind, idle_bytes: int) -> None:
        self.kind = kind
        self.idle_limit_bytes = idle_bytes
        self._idle: defaultdict[tuple[int | None, int], deque[Any]]
        self._idle = defaultdict(deque)  # by device and size

    @property
    def idle_bytes(self) -> int:
        return sum(size * len(buffers) for (_, size), buffers in list(self._idle.items()))

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        dtype = np.dtype(dtype)
        _, lent = self.lend(prod(shape) * dtype.itemsize)
        return lent.view(dtype).reshape(shape)

    def lend(self, nbytes: int) -> tuple[Any, Array]:
        """Return a buffer, and its bytes, which are lent until all views of them are freed."""
        size_bytes = self.size_of(nbytes)
        device = current_device() if backend_named(self.kind).on_device else None
        try:
            memory = self._idle[device, size_bytes].pop()
        except IndexError:
            memory = self._allocate(size_bytes)
        owner = _Owner(memory)
        weakref.finalize(owner, self.put_back, size_bytes, memory).atexit = False
        return memory, backend_named(self.kind).bytes_of(memory, size_bytes, owner)[:nbytes]

    def size_of(self, nbytes: int) -> int:
        return buffer_bytes(nbytes)

    def _allocate(self, size_bytes: int) -> Any:
        try:
            return allocate(self.kind, size_bytes)
        except MemoryError:
            if not self.idle_bytes:
                raise
        self.clear()  # free idle buffers before an error
        return allocate(self.kind, size_bytes)

    def clear(self) -> None:
        self._idle.clear()

    def put_back(self, size_bytes: int, memory: Any) -> None:
        # No locks here: the last view may be freed anywhere, also during a garbage collection. Two
        # concurrent calls may keep one buffer too many.
        if self.idle_bytes + size_bytes <= self.idle_limit_bytes:
            device = getattr(memory, "device_id", None)
            self._idle[device, size_bytes].append(memory)


class _Owner:
    """The owner of a lent buffer, which its views keep alive: its end returns the memory.

    It has NumPy's array interface.
    """

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self.memory.__array_interface__
        return interface


def allocate(kind: Kind, size_bytes: int) -> Any:
    """Return new memory of a kind."""
    return backend_named(kind).allocate(size_bytes)


# Shared memory between processes of one host, pinned for their GPUs.
#
# A segment is a file without a name (``memfd_create``), which exists while a process has it open. A
# killed process therefore leaves no files, and the limits of ``/dev/shm`` do not apply. Another
# process opens it as a file of the first one, ``/proc/PID/fd``; the kernel allows this only to the
# same user. The file has all its pages from the start and cannot shrink, so no process gets a
# ``SIGBUS``.

FILE_NAME = "dask-p2p"  # name in `/proc`
_per_thread = threading.local()


class SegmentName(NamedTuple):
    """The name of a process's segment."""

    kernel: str  # boot id of the kernel
    pid_namespace: str
    pid: int
    fd: int
    inode: int
    size_bytes: int

    def is_open(self) -> bool:
        try:
            return os.stat(f"/proc/{self.pid}/fd/{self.fd}").st_ino == self.inode
        except OSError:
            return False


class Segment:
    """Memory that is mapped in this process and in another one."""

    #: True if a holder may still write to it, although the reader no longer waits for its answer.
    is_lost = False

    def __init__(self, fd: int, name: SegmentName) -> None:
        self.name = name
        self.bytes = np.frombuffer(mmap.mmap(fd, name.size_bytes), np.uint8)
        self.ptr = int(self.bytes.ctypes.data)
        self.device_id: int | None = None
        self._is_pinned = False
        self._lock = threading.Lock()

    @classmethod
    def make(cls, size_bytes: int) -> Segment:
        fd = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            inode = os.fstat(fd).st_ino
            name = SegmentName(*kernel_and_namespace(), os.getpid(), fd, inode, size_bytes)
            segment = cls(fd, name)
        except BaseException:
            os.close(fd)
            raise
        weakref.finalize(segment, os.close, fd)
        return segment

    @classmethod
    def open(cls, name: SegmentName) -> Segment:
        """Open another process's segment; `TransferError` on failure or if it is another file."""
        if name[:2] != kernel_and_namespace():
            raise TransferError(
                "they run on different hosts, or in different PID namespaces", scope="region"
            )
        path = f"/proc/{name.pid}/fd/{name.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise TransferError(
                f"the reader's memory cannot be opened: {exc}", scope="region"
            ) from exc
        try:
            status = os.fstat(fd)
            if (status.st_ino, status.st_size) != (name.inode, name.size_bytes):
                raise TransferError(
                    "the reader's memory does not match its name or size", scope="region"
                )
            return cls(fd, name)
        finally:
            os.close(fd)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.bytes.__array_interface__

    def pin(self) -> None:
        """Pin the memory for GPUs until it is freed, for use by the thread's GPU. Idempotent."""
        with self._lock:
            if not self._is_pinned:
                pin_while(self, self.bytes)
                self._is_pinned = True
        self.device_id = current_device()

    def array(self, backend: Backend) -> Any:
        if backend.on_device:
            self.pin()
        return backend.bytes_of(self, self.bytes.nbytes, self)


class Segments(Buffers):
    """Segments of this process. Each is lent to one call, and returns as buffers do."""

    def _allocate(self, size_bytes: int) -> Segment:
        segment = Segment.make(size_bytes)
        if backend_named(self.kind).on_device:
            segment.pin()
        return segment

    def put_back(self, size_bytes: int, memory: Segment) -> None:
        if memory.is_lost:
            return
        # All segments of a read have one size. Other sizes belong to reads with other options or
        # smaller arrays. They are freed for this segment, because a new one takes long to make.
        for other_key in [key for key in list(self._idle) if key[1] != size_bytes]:
            with suppress(IndexError):  # another thread has taken the last one
                while self.idle_bytes + size_bytes > self.idle_limit_bytes:
                    self._idle[other_key].pop()
        super().put_back(size_bytes, memory)


def to_device(source: Any, buffers: Buffers) -> Any:
    """Copy an array from pinned memory to the device, and wait: call it from a thread."""
    import cupy

    runtime, streams = cupy.cuda.runtime, _per_thread.__dict__  # streams by device
    device = runtime.getDevice()
    stream = streams.get(device) or streams.setdefault(device, cupy.cuda.Stream(non_blocking=True))
    copy = buffers.take(source.shape, source.dtype)
    runtime.memcpyAsync(copy.data.ptr, source.data.ptr, source.nbytes, MEMCPY_DEFAULT, stream.ptr)
    stream.synchronize()
    return copy


# Memory of transports in addition to blocks, and the sizes of parts that follow from it.
#
# The regions in transfer to a task stay below `Options.staging_limit_bytes`: the sizes of their
# parts are computed from it. Regions that a holder has packed for all its readers stay below the
# same limit: their memory is reserved in a `ByteBudget`.


@dataclass(frozen=True, slots=True)
class Footprint:
    """The sizes and numbers of parts that a transport holds, for blocks of one kind."""

    part_bytes: int | None  # upper bound of a part; None: no bound, and no memory for parts
    parts_in_flight: int  # parts requested while the one before them is written to the output
    parts_held: int = 1  # parts per task at the reader
    parts_packed: int = 0  # parts per task at the holder
    parts_idle: int = 0  # buffers that a worker keeps for reuse

    copies: int = 2  # upper bound of the copies of a region in transfer
    is_buffered: bool = True  # True if parts are in buffers, whose sizes are powers of two
    comes_in_batches: bool = False  # True if small regions share a part

    def task_bytes(self, largest_bytes: int, remote_bytes: int, item_bytes: int) -> int:
        if self.part_bytes is None:
            return 0
        whole_bytes = remote_bytes if self.comes_in_batches else largest_bytes
        each_bytes = self._size_of(min(max(item_bytes, self.part_bytes), whole_bytes))
        return min(self.parts_held * each_bytes, self.copies * remote_bytes)

    @property
    def each_bytes(self) -> int:
        return self._size_of(self.part_bytes or 0)

    def idle_bytes(self, options: Options) -> int:
        """Return the upper bound of idle buffers of a worker with these options."""
        return min(self.parts_idle * self.each_bytes, options.staging_limit_bytes)

    def _size_of(self, part_bytes: int) -> int:
        return buffer_bytes(part_bytes) if self.is_buffered and part_bytes else part_bytes


def part_that_fits(part_bytes: int, most_bytes: int) -> int:
    """Return a part's size; if its buffer does not fit, the largest power of two that fits.

    >>> part_that_fits(3000, 4096), part_that_fits(5000, 4097)
    (3000, 4096)
    """
    if buffer_bytes(part_bytes) > most_bytes:
        return 1 << (most_bytes.bit_length() - 1)
    return part_bytes


def parts_held(in_flight: int, kind: Kind) -> int:
    """Return the number of parts that a task holds: those in flight, and those being written."""
    return in_flight + 1 + (MOST_UNREAD if backend_named(kind).on_device else 0)


def fit_parts(
    part_bytes: int, in_flight: int, left_bytes: int, count_held: Callable[[int], int]
) -> Footprint:
    """Return a footprint with parts of the configured size, or the largest size that fits.

    All parts together take at most `left_bytes`. `count_held` returns the number of parts held
    for a number of parts in flight. If the smallest parts do not fit, parts come one after another.
    """
    smallest_bytes = buffer_bytes(1)
    if left_bytes // count_held(in_flight) < smallest_bytes:
        in_flight = 0
    most_bytes = max(smallest_bytes, left_bytes // count_held(in_flight))
    part_bytes = part_that_fits(part_bytes, most_bytes)
    return Footprint(part_bytes, in_flight, count_held(in_flight), comes_in_batches=True)


#: Function that releases a reservation. Idempotent; a garbage collection may call it.
Release: TypeAlias = Callable[[], object]


class ByteBudget:
    """A byte budget shared by requests. A request above the limit is admitted alone.

    Each request reserves all its memory in one step, so that no request waits while it holds some.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._reserved: dict[object, int] = {}
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        return sum(list(self._reserved.values()))

    def reserve(self, *sizes: int) -> list[Release] | None:
        """Reserve memory of these sizes. Return a release function for each; None if it is full."""
        with self._lock:
            reserved_bytes = self.reserved_bytes
            if reserved_bytes and reserved_bytes + sum(sizes) > self.limit_bytes:
                return None
            reservations = [object() for _ in sizes]
            self._reserved.update(zip(reservations, sizes, strict=True))
            return [
                partial(self._reserved.pop, one, None) for one in reservations
            ]  # without a lock


# --- all transports together ---


def _list_footprints(
    options: Options, kind: Kind, within_host: Collection[bool]
) -> Iterator[Footprint]:
    classes = transport_classes()
    for transport in (classes[name] for name in options.order(kind) if name in classes):
        if kind in transport.kinds and transport.within_host in within_host:
            yield transport.footprint(options, kind)


def left_bytes(options: Options, kind: Kind) -> int:
    """Return the memory that remains for parts from other hosts, beyond those from this host."""
    local = _list_footprints(options, kind, [True])
    held_bytes = max((used.parts_held * used.each_bytes for used in local), default=0)
    return options.staging_limit_bytes - held_bytes


@lru_cache(maxsize=1024)  # every task of an array calls it first, with the same arguments
def staging_bytes(
    options: Options, kind: Kind, largest_bytes: int, remote_bytes: int, item_bytes: int
) -> int:
    """Return the upper bound of one task's memory beyond its inputs and its output.

    A task holds parts from this host and from other hosts at the same time, but in each case from
    one transport only. The sizes are those of the largest region read from one block, of all
    regions from other workers, and of one element, the smallest part.
    """
    sizes = largest_bytes, remote_bytes, item_bytes
    footprints = (_list_footprints(options, kind, [is_local]) for is_local in (True, False))
    return sum(max((used.task_bytes(*sizes) for used in some), default=0) for some in footprints)


def packed_bytes(options: Options, kind: Kind, readers: int, remote_bytes: int) -> int:
    """Return the upper bound of a worker's packed regions, for a number of concurrent readers.

    `remote_bytes` is the total that the readers read from the worker.
    """
    packing = [used for used in _list_footprints(options, kind, [True, False]) if used.parts_packed]
    task_bytes = max((used.parts_packed * used.each_bytes for used in packing), default=0)
    copies = max((used.copies for used in packing), default=0)
    return min(options.staging_limit_bytes, readers * task_bytes, copies * remote_bytes)


def idle_bytes(options: Options, kind: Kind) -> int:
    """Return the upper bound of all transports' idle buffers."""
    return sum(used.idle_bytes(options) for used in _list_footprints(options, kind, [True, False]))
