"""Shared memory between processes of one host, pinned for their GPUs.

A segment is a file without a name (``memfd_create``), which exists while a process has it open. A
killed process therefore leaves no files, and the limits of ``/dev/shm`` do not apply. Another
process opens it as a file of the first one, ``/proc/PID/fd``; the kernel allows this only to the
same user. The file has all its pages from the start and cannot shrink, so no process gets a
``SIGBUS``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from dask_p2p.backends import Backend, backend_named
from dask_p2p.backends.device import current_device
from dask_p2p.backends.driver import MEMCPY_DEFAULT
from dask_p2p.backends.host.hardware import kernel_and_namespace
from dask_p2p.backends.host.pinned import pin_while
from dask_p2p.errors import UnsuitableError
from dask_p2p.interprocess.buffers import Buffers

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
        """Return true if the segment's process still has it open."""
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
        """Make a segment with all its pages."""
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
        """Open another process's segment; `UnsuitableError` on failure or if it is another file."""
        if name[:2] != kernel_and_namespace():
            raise UnsuitableError("they run on different hosts, or in different PID namespaces")
        path = f"/proc/{name.pid}/fd/{name.fd}"
        try:
            # Other files of that process are never opened.
            if os.readlink(path) != f"/memfd:{FILE_NAME} (deleted)":
                raise UnsuitableError(f"expected the reader's memory at {path}, got another file")
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise UnsuitableError(f"the reader's memory cannot be opened: {exc}") from exc
        try:
            status, seals = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            is_right = (status.st_ino, status.st_size) == (name.inode, name.size_bytes)
            if not is_right or not seals & fcntl.F_SEAL_SHRINK:
                raise UnsuitableError("the reader's memory does not match its name, size or seal")
            return cls(fd, name)
        finally:
            os.close(fd)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array interface, for `Buffers`."""
        return self.bytes.__array_interface__

    def pin(self) -> None:
        """Pin the memory for GPUs until it is freed, for use by the thread's GPU. Idempotent."""
        with self._lock:
            if not self._is_pinned:
                pin_while(self, self.bytes)
                self._is_pinned = True
        self.device_id = current_device()

    def array(self, backend: Backend) -> Any:
        """Return the memory as a 1-D array of bytes."""
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
        for other in [key for key in list(self._idle) if key[1] != size_bytes]:
            with suppress(IndexError):  # another thread has taken the last one
                while self.idle_bytes + size_bytes > self.idle_limit_bytes:
                    self._idle[other].pop()
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
