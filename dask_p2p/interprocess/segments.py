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
from typing import Any, NamedTuple

import numpy as np

from dask_p2p.backends import Backend, backend_named
from dask_p2p.backends.device import current_device
from dask_p2p.backends.driver import MEMCPY_DEFAULT
from dask_p2p.backends.hardware import kernel_and_namespace
from dask_p2p.backends.pinned import pin_while
from dask_p2p.errors import UnsuitableError
from dask_p2p.interprocess.buffers import Buffers
from dask_p2p.interprocess.requests import checked_integer, checked_text

FILE_NAME = "dask-p2p"  # which `/proc` shows
_per_thread = threading.local()


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

    def is_open(self) -> bool:
        """Return whether the process that made it still has it open."""
        try:
            return os.stat(f"/proc/{self.pid}/fd/{self.fd}").st_ino == self.inode
        except OSError:
            return False


class Segment:
    """Memory that is mapped here, and in another process."""

    #: Whether a holder may still write there, though its answer is no longer waited for.
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
        """Open another process' one; `UnsuitableError` if it cannot be, or is not what it says."""
        if name[:2] != kernel_and_namespace():
            raise UnsuitableError("they run on different hosts, or in different PID namespaces")
        path = f"/proc/{name.pid}/fd/{name.fd}"
        try:
            # Nothing else of that process is touched.
            if os.readlink(path) != f"/memfd:{FILE_NAME} (deleted)":
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
        """Have GPUs reach it, until it goes: for use by the thread's one. Idempotent."""
        with self._lock:
            if not self._is_pinned:
                pin_while(self, self.bytes)
                self._is_pinned = True
        self.device_id = current_device()

    def array(self, backend: Backend) -> Any:
        """Return it as a 1-D array of bytes."""
        if backend.on_device:
            self.pin()
        return backend.bytes_of(self, self.bytes.nbytes, self)


class Segments(Buffers):
    """Segments of this process. Each is lent to one call, and comes back as buffers do."""

    def _allocate(self, size_bytes: int) -> Segment:
        segment = Segment.make(size_bytes)
        if backend_named(self.kind).on_device:
            segment.pin()
        return segment

    def put_back(self, size_bytes: int, memory: Segment) -> None:
        if memory.is_lost:
            return
        # A reading has segments of one size. Those of other sizes are for readings with other
        # options or smaller arrays: they must not keep this one out, which takes long to make.
        for other in [key for key in list(self._idle) if key[1] != size_bytes]:
            with suppress(IndexError):  # another thread has taken the last one
                while self.idle_bytes + size_bytes > self.idle_limit_bytes:
                    self._idle[other].pop()
        super().put_back(size_bytes, memory)


def to_device(source: Any, buffers: Buffers) -> Any:
    """Copy an array in pinned memory to the device, and wait for that: call it from a thread."""
    import cupy

    runtime, streams = cupy.cuda.runtime, _per_thread.__dict__  # streams by device
    device = runtime.getDevice()
    stream = streams.get(device) or streams.setdefault(device, cupy.cuda.Stream(non_blocking=True))
    copy = buffers.take(source.shape, source.dtype)
    runtime.memcpyAsync(copy.data.ptr, source.data.ptr, source.nbytes, MEMCPY_DEFAULT, stream.ptr)
    stream.synchronize()
    return copy
