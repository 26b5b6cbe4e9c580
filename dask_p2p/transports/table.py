"""A table of descriptors in a file: its holder writes it, readers map it and lock what they lease.

It is a hash table of buckets of equal length. A bucket begins with an index that has one entry for
each slot: the digest of a key, or zeros. The descriptors follow. There are levels of 1, 2, 4, ...
buckets, and on each level a key can be in one bucket only. When all of these are full, another
level is added: nothing ever moves. A slot is identified, and locked, by the byte at which its entry
is.

A descriptor is written before its entry. Its slot is reused when the entry is cleared and nobody
has locked it. So a reader that locks a slot and then finds the digest there reads a whole
descriptor. The holder writes the file and does not map it: so a full disk is an error, and not a
signal.

Locks belong to the open file (``F_OFD_SETLK``, see fcntl(2)), not to the process. So two tables
within one process behave as those of two processes. A forked child would share and keep the locks,
so it closes the files first.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from hashlib import blake2b

from dask_p2p.types import Key

__all__ = ["FILE", "OWNER", "LockFile", "Table", "View", "digest_of", "views"]

FILE = "descriptors"
OWNER = 0  # the byte that the holder keeps locked while it lives
_LEVELS_AT = 0  # a byte that says how many there are
_BUCKET_BYTES = 2**16
_ENTRY_BYTES = 16
_INDEX_BYTES = 32 * _ENTRY_BYTES
_SLOT_BYTES = (_BUCKET_BYTES - _INDEX_BYTES) // 32
_LENGTH_BYTES = 2  # before a descriptor
TEXT_BYTES = _SLOT_BYTES - _LENGTH_BYTES  # of the longest descriptor
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


class LockFile:
    """An open file, closed with `close` (idempotent) or when nobody refers to it."""

    def __init__(self, path: str, flags: int) -> None:
        self._fd = os.open(path, flags, 0o600)
        self.close = weakref.finalize(self, os.close, self._fd)
        self.content: mmap.mmap | bytes = b""
        _open.add(self)

    def lock(self, byte: int, kind: int = fcntl.F_RDLCK) -> None:
        """Lock a byte, or unlock it; `BlockingIOError` if another's lock is in the way."""
        self._call(fcntl.F_OFD_SETLK, kind, byte)

    def is_locked(self, byte: int) -> bool:
        """Whether anybody else has locked a byte."""
        found = self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte)
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def _call(self, command: int, kind: int, byte: int) -> bytes:
        return fcntl.fcntl(self.fd, command, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))

    @property
    def fd(self) -> int:
        """Its descriptor, whose number may be another file's once this one is closed."""
        if not self.close.alive:
            raise OSError(errno.EBADF, "the table of descriptors is closed")
        return self._fd


class Table(LockFile):
    """The holder's side, not for several threads at a time."""

    def __init__(self, folder: str) -> None:
        super().__init__(f"{folder}/{FILE}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._used: set[int] = set()
        self._levels = 0
        self.lock(OWNER, fcntl.F_WRLCK)
        self._grow()

    def reserve(self, digest: bytes) -> int:
        """Find a slot for a key's descriptor."""
        while True:
            for index in _indexes(digest, self._levels):
                for slot in range(index, index + _INDEX_BYTES, _ENTRY_BYTES):
                    if slot not in self._used:
                        self._used.add(slot)
                        return slot
            self._grow()

    def publish(self, slot: int, digest: bytes, text: bytes) -> None:
        """Fill a slot. Readers may find it even if this fails."""
        if len(text) > TEXT_BYTES:
            raise ValueError(f"a descriptor has at most {TEXT_BYTES} bytes, and this {len(text)}")
        self._write(len(text).to_bytes(_LENGTH_BYTES) + text, _text_at(slot))
        self._write(digest, slot)

    def withdraw(self, slot: int) -> bool:
        """Clear a slot, so that no reader finds it; return whether it is still locked."""
        self._write(bytes(_ENTRY_BYTES), slot)
        if not (is_locked := self.is_locked(slot)):
            self._used.discard(slot)
        return is_locked

    def _grow(self) -> None:
        os.posix_fallocate(self.fd, 0, _BUCKET_BYTES << self._levels + 1)
        self._write(bytes([self._levels + 1]), _LEVELS_AT)
        self._levels += 1

    def _write(self, data: bytes, start: int) -> None:
        if os.pwrite(self.fd, data, start) != len(data):
            raise OSError(errno.ENOSPC, "the descriptor could not be written as a whole")


class View(LockFile):
    """A reader's side: a holder's table, and the leases that this process has on its blocks."""

    def __init__(self, folder: str) -> None:
        super().__init__(f"{folder}/{FILE}", os.O_RDONLY)
        self._leases: dict[int, int] = {}  # how many, by slot: they are one lock
        self._mutex = threading.Lock()

    def find(self, digest: bytes) -> int | None:
        """Return a key's slot if there is one."""
        content = self.content
        if not content or len(content) < _BUCKET_BYTES << content[_LEVELS_AT]:  # it has grown
            content = self.content = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)
        for index in _indexes(digest, (len(content) // _BUCKET_BYTES).bit_length() - 1):
            slot = content.find(digest, index, index + _INDEX_BYTES)
            if slot >= 0 and slot % _ENTRY_BYTES == 0:
                return slot
        return None

    def text(self, slot: int, digest: bytes) -> bytes | None:
        """Return the descriptor in a locked slot; None if its owner has died or withdrew it."""
        content, start = self.content, _text_at(slot)
        if content[slot : slot + _ENTRY_BYTES] != digest or not self.is_locked(OWNER):
            return None
        text = start + _LENGTH_BYTES
        return content[text : text + int.from_bytes(content[start:text])]

    def begin(self, slot: int) -> None:
        """Begin a lease; lock the slot for the first one."""
        with self._mutex:
            if slot not in self._leases:
                self.lock(slot)
            self._leases[slot] = self._leases.get(slot, 0) + 1

    def end(self, slot: int) -> None:
        """End a lease; unlock the slot after the last one."""
        if not self.close.alive:  # in a child, where the mutex may be taken forever
            return
        with self._mutex:
            self._leases[slot] -= 1
            if not self._leases[slot]:
                del self._leases[slot]
                self.lock(slot, fcntl.F_UNLCK)


def digest_of(key: Key) -> bytes:
    """Return the digest by which a key's descriptor is found."""
    return blake2b(repr(key).encode(), digest_size=_ENTRY_BYTES).digest()


def _indexes(digest: bytes, levels: int) -> Iterator[int]:
    """Where the indexes begin that may have a key; of the largest level first, which has most."""
    number = int.from_bytes(digest[:4])
    for level in reversed(range(levels)):  # of buckets 2**level and on; 0 is for the whole table
        yield (1 << level | number & (1 << level) - 1) * _BUCKET_BYTES


def _text_at(slot: int) -> int:
    place = slot % _BUCKET_BYTES
    return slot - place + _INDEX_BYTES + place // _ENTRY_BYTES * _SLOT_BYTES


def _close_in_child() -> None:
    for file in list(_open):
        file.close()
        if isinstance(file.content, mmap.mmap):
            file.content.close()  # which has the open file too
    views.clear()


_open: weakref.WeakSet[LockFile] = weakref.WeakSet()
views: dict[str, View] = {}  # of this process, by folder
os.register_at_fork(after_in_child=_close_in_child)
