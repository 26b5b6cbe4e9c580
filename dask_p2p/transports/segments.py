"""Memory that processes of one host share, pinned for their GPUs.

It is a file without a name (``memfd_create``), which exists as long as a process has it open. So
nothing is left behind when a process is killed, and the limits of ``/dev/shm`` do not apply.
Another process opens it as a file of the first one, ``/proc/PID/fd``: the kernel allows that only
to the same user. The file has all of its pages from the start, and cannot be made shorter, so no
process gets a ``SIGBUS``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import numpy as np

from dask_p2p.backends import Backend, backend_named
from dask_p2p.backends.device import current_device, device_work
from dask_p2p.errors import UnsuitableError
from dask_p2p.layout import Box, box_shape
from dask_p2p.transports.buffers import Buffers
from dask_p2p.transports.descriptor import kernel_and_namespace
from dask_p2p.transports.requests import checked_integer, checked_text
from dask_p2p.types import DType, Kind

__all__ = ["DeviceCopy", "Segment", "SegmentName", "Segments", "region_at"]

_FILE_NAME = "dask-p2p"
_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the driver sees from the addresses where they are
_PORTABLE_AND_MAPPED = 3  # cudaHostRegister's flags: for all GPUs of the process, and kernels


class SegmentName(NamedTuple):
    """What a process calls a segment of its own."""

    kernel: str  # which run of which
    pid_namespace: str
    pid: int
    fd: int
    inode: int
    size_bytes: int

    @classmethod
    def parse(cls, fields: Any) -> SegmentName:
        """Read the name that another process has sent; `ValueError` if it is none."""
        if type(fields) not in (list, tuple) or len(fields) != len(cls._fields):
            raise ValueError("memory: expected the name of a segment")
        name = cls(*fields)
        checked_text("kernel", name.kernel)
        checked_text("pid_namespace", name.pid_namespace)
        for number in name[2:]:
            checked_integer("memory", number, 0, 2**63)
        return name


class Segment:
    """Memory that is mapped here, and in another process.

    Attributes
    ----------
    is_lost : bool
        Whether somebody may write there whom nobody waits for.
    """

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
        """Make one, all of whose pages are there."""
        fd = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
        """Open another process' one.

        Raises
        ------
        UnsuitableError
            If it cannot be opened from here, or is not what it should be.
        """
        if name[:2] != kernel_and_namespace():
            raise UnsuitableError("they run on different hosts, or in different PID namespaces")
        path = f"/proc/{name.pid}/fd/{name.fd}"
        try:
            # Nothing else of that process is touched.
            if os.readlink(path) != f"/memfd:{_FILE_NAME} (deleted)":
                raise UnsuitableError("the reader's memory is not where it says")
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise UnsuitableError(f"the reader's memory cannot be opened: {exc}") from exc
        try:
            status, seals = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            is_right = (status.st_ino, status.st_size) == (name.inode, name.size_bytes)
            if not is_right or not seals & fcntl.F_SEAL_SHRINK:
                raise UnsuitableError("the reader's memory is not what it says")
            return cls(fd, name)
        finally:
            os.close(fd)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Where it is, for `Buffers`."""
        return self.bytes.__array_interface__

    def pin(self) -> None:
        """Have GPUs reach it, until it goes. Idempotent."""
        import cupy

        with self._lock:
            if not self._is_pinned:
                runtime = cupy.cuda.runtime
                runtime.hostRegister(self.ptr, self.bytes.nbytes, _PORTABLE_AND_MAPPED)
                unpin = weakref.finalize(self, _unpin, self.bytes)
                unpin.atexit = False
                self._is_pinned = True

    def array(self, backend: Backend) -> Any:
        """Return it as a 1-D array of bytes."""
        if backend.on_device:
            self.pin()
            self.device_id = current_device()
        return backend.bytes_of(self, self.bytes.nbytes, self)


def _unpin(memory: np.ndarray[Any, Any]) -> None:
    import cupy

    with device_work():
        cupy.cuda.runtime.hostUnregister(int(memory.ctypes.data))


class Segments(Buffers):
    """Segments of this process. Each is lent to one call, and comes back as buffers do."""

    def __init__(self, kind: Kind, idle_bytes: int) -> None:
        super().__init__(kind, idle_bytes)
        self._by_address: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()

    def lend(self, size_bytes: int) -> tuple[Segment, Any]:
        """Return a segment, and its memory, which lends it until all views of that are gone."""
        memory = self.take((size_bytes,), np.uint8)
        on_device = backend_named(self.kind).on_device
        address = memory.data.ptr if on_device else memory.ctypes.data
        return self._by_address[address], memory

    def inodes(self) -> list[int]:
        """Return of which files there are segments."""
        segments = [reference() for reference in self._by_address.valuerefs()]
        return [segment.name.inode for segment in segments if segment is not None]

    def _allocate(self, size_bytes: int) -> Segment:
        segment = Segment.make(size_bytes)
        if backend_named(self.kind).on_device:
            segment.pin()
            segment.device_id = current_device()
        self._by_address[segment.ptr] = segment
        return segment

    def _put_back(self, size_bytes: int, memory: Segment) -> None:
        if memory.is_lost:
            return
        # A reading has segments of one size. Those of other sizes are for readings with other
        # options or smaller arrays: they must not keep this one out, which takes long to make.
        for other in [key for key in list(self._idle) if key[1] != size_bytes]:
            with suppress(IndexError):  # another thread has taken the last one
                while self.idle_bytes + size_bytes > self.idle_limit_bytes:
                    self._idle[other].pop()
        super()._put_back(size_bytes, memory)


class DeviceCopy:
    """A copy of an array in pinned memory to the device, which is begun at once.

    Parameters
    ----------
    source
        The array; kept until the copy is done.
    buffers
        Where device memory comes from.
    """

    _per_thread = threading.local()  # streams by device

    def __init__(self, source: Any, buffers: Buffers) -> None:
        import cupy

        runtime, streams = cupy.cuda.runtime, self._per_thread.__dict__
        device = runtime.getDevice()
        stream = streams.get(device) or streams.setdefault(
            device, cupy.cuda.Stream(non_blocking=True)
        )
        self._source, self._copy = source, buffers.take(source.shape, source.dtype)
        self._done = cupy.cuda.Event(disable_timing=True)
        runtime.memcpyAsync(
            self._copy.data.ptr, source.data.ptr, source.nbytes, _MEMCPY_DEFAULT, stream.ptr
        )
        self._done.record(stream)

    def wait(self) -> Any:
        """Wait until it is done, and return the array on the device."""
        self._done.synchronize()
        self._source = None  # its memory may be lent to the next call
        return self._copy


def region_at(memory: Any, place: int, box: Box, dtype: DType) -> Any:
    """Return a region as a C-ordered array in memory of bytes, from this one on."""
    shape = box_shape(box)
    return memory[place : place + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
