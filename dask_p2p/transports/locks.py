"""Lock files: one a holder, in which its readers lock the bytes of the blocks that they lease.

A process opens each holder's lock file once, for all its leases. Several leases on one block are
one lock there, and so they are counted.

The locks are those of the open file (``F_OFD_SETLK``, see fcntl(2)), not of the process: two boards
within one process are as far apart as those of two. A forked child would share them, and keep them
for as long as it lives; so it closes the files first of all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from weakref import WeakSet

__all__ = ["LOCKS", "OWNER", "LockFile", "Readers", "readers"]

LOCKS = "locks"  # the file's name
OWNER = 0  # the byte that the holder keeps locked while it lives; the others are for leases
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


class LockFile:
    """An open lock file.

    Parameters
    ----------
    folder : str
        In which it lies.
    flags : int
        See open(2).
    """

    def __init__(self, folder: str, flags: int) -> None:
        self.leases: dict[int, int] = {}  # how many, by byte; see `Readers`
        self._fd = os.open(f"{folder}/{LOCKS}", flags, 0o600)
        _open.add(self)

    @property
    def is_open(self) -> bool:
        """Whether it was not closed; a child's files are."""
        return self._fd >= 0

    def lock(self, byte: int, exclusive: bool = False) -> None:
        """Lock a byte; `BlockingIOError` if somebody else's lock is in the way."""
        self._set(fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, byte)

    def unlock(self, byte: int) -> None:
        """End the lock of a byte."""
        self._set(fcntl.F_UNLCK, byte)

    def _set(self, kind: int, byte: int) -> None:
        self._call(fcntl.F_OFD_SETLK, kind, byte)

    def _call(self, command: int, kind: int, byte: int) -> bytes:
        if self._fd < 0:
            raise OSError(errno.EBADF, "the lock file is closed")
        return fcntl.fcntl(self._fd, command, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))

    def is_locked(self, byte: int) -> bool:
        """Whether anybody else has locked a byte."""
        found = self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte)
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the file, and so end its locks. Idempotent."""
        if self.is_open:
            fd, self._fd = self._fd, -1
            os.close(fd)


class Readers:
    """The leases of this process."""

    def __init__(self) -> None:
        self._files: dict[str, LockFile] = {}  # by folder
        self._lock = threading.Lock()

    def begin(self, folder: str, byte: int) -> LockFile:
        """Begin a lease; lock the byte for the first one."""
        with self._lock:
            file = self._files.get(folder)
            if file is None:
                file = self._files[folder] = LockFile(folder, os.O_RDONLY)
            leases = file.leases.get(byte, 0)
            if not leases:
                file.lock(byte)
            file.leases[byte] = leases + 1
            return file

    def end(self, folder: str, file: LockFile, byte: int) -> None:
        """End a lease; unlock the byte after the last one."""
        with self._lock:
            file.leases[byte] -= 1
            if file.leases[byte] or not file.is_open:
                return
            del file.leases[byte]
            if file.leases or self._files.get(folder) is file:
                file.unlock(byte)
            else:
                file.close()

    def leave(self, folder: str) -> None:
        """Close a lock file, after its last lease if there are any."""
        with self._lock:
            file = self._files.pop(folder, None)
            if file is not None and not file.leases:
                file.close()


_open: WeakSet[LockFile] = WeakSet()
readers = Readers()


def _close_in_child() -> None:
    for file in list(_open):
        file.close()
    readers.__init__()  # type: ignore[misc]  # its lock may have been taken just then


os.register_at_fork(after_in_child=_close_in_child)
