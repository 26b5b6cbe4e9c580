"""Leases on blocks of other processes of this host. The kernel ends them if a reader dies.

A holder *publishes* a block: it writes a descriptor into a slot of its file, enters the slot into
the index, and keeps the block referenced. A reader *takes* a lease without a request: it finds the
entry, locks it, and checks it again. To withdraw a block, the holder first clears the entry and
then checks the lock::

    holder                                   reader
    publish: write descriptor, then entry    take: find entry, lock it (shared),
                                                   is it still the key's?  -> lease is valid
    withdraw: clear entry, then check lock         else                    -> unlock, request
      entry is free   -> drop block
      entry is locked -> keep block, check again later

A reader that locks after the withdrawal no longer finds the key. If it locked before, the holder
finds the lock. So no reader has a valid lease on a dropped block, and no slot is written while it
is read. A holder keeps the file's last byte locked as long as it lives, and readers check this.

The file is sparse: an index of 65,536 entries of 16 bytes, and 65,536 slots of 2 KiB. The digest of
a key selects a bucket of 64 entries, and the key may be in any of them. The file is not mapped into
memory, so a full disk causes an error and not a signal. Locks belong to the open file
(``F_OFD_SETLK``, see fcntl(2)), not to the process. A reader therefore opens the file once per task
and holder, and closing it ends all leases. A forked child would share them, so it closes the files.
The costs are:

- one open file per task and holder on this host,
- above about 40,000 published blocks of a worker, no entry for a few of them: other transports
  read these,
- 129 MiB of apparent size; on the disk 1 MiB, and 2 KiB per block. The holder writes the last byte
  of the file at the start. This fails on a full disk, and without sparse files it writes 129 MiB.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import tempfile
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from dask_p2p.errors import TransferError
from dask_p2p.types import Key

logger = logging.getLogger(__name__)

FILE = "descriptors"
_ENTRY_BYTES = 16  # the digest of a key, or zeros
_BUCKET_BYTES = 64 * _ENTRY_BYTES
INDEX_BYTES = 2**10 * _BUCKET_BYTES
_SLOT_BYTES = 2**11
_LENGTH_BYTES = 2  # size of the length in front of a descriptor
DESCRIPTOR_BYTES = _SLOT_BYTES - _LENGTH_BYTES  # length of the longest descriptor
OWNER = INDEX_BYTES + INDEX_BYTES // _ENTRY_BYTES * _SLOT_BYTES  # locked while the holder lives
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
CLOSED = 2**31 - 1  # never the number of an open file: all operations on it fail


class _LockFile:
    """An open file, closed by `close_file` (idempotent) or when no reference is left."""

    fd = CLOSED

    def __init__(self, folder: str, flags: int) -> None:
        self.fd = os.open(f"{folder}/{FILE}", flags, 0o600)
        _files.add(self)

    def lock(self, byte: int, kind: int = fcntl.F_RDLCK) -> None:
        """Lock a byte, or unlock it. Raises `BlockingIOError` if another lock conflicts."""
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))

    def is_locked(self, byte: int) -> bool:
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        conflict = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, query)
        return bool(_FLOCK.unpack(conflict)[0] != fcntl.F_UNLCK)

    def close_file(self) -> None:
        """Close the file. This ends its locks, unless a forked child also has the file open."""
        fd, self.fd = self.fd, CLOSED
        if fd != CLOSED:
            os.close(fd)

    __del__ = close_file


_files: weakref.WeakSet[_LockFile] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [*map(_LockFile.close_file, list(_files))])


class Leases(_LockFile):
    """A reader's leases on blocks of one holder, until closed. Not thread-safe.

    All methods raise `OSError` if the folder of `PublishedBlocks` is gone or cannot be read.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder, os.O_RDONLY)
        self.counts: defaultdict[int, int] = defaultdict(int)  # number of leases, by entry

    def take(self, key: Key) -> tuple[int, bytes] | None:
        """Take a lease on a block. Return its entry and descriptor; None if it is not published."""
        bucket = bucket_of(digest := hash_key(key))
        position = os.pread(self.fd, _BUCKET_BYTES, bucket).find(digest)
        if position < 0:
            return None
        entry = bucket + position
        self.lock(entry)
        self.counts[entry] += 1
        if os.pread(self.fd, _ENTRY_BYTES, entry) != digest or not self.holder_lives():
            self.end(entry)
            return None
        content = os.pread(self.fd, _SLOT_BYTES, slot_of(entry))
        length = int.from_bytes(content[:_LENGTH_BYTES])
        return entry, content[_LENGTH_BYTES : _LENGTH_BYTES + length]

    def end(self, entry: int) -> None:
        self.counts[entry] -= 1
        if self.counts[entry] == 0 and self.fd != CLOSED:
            with suppress(OSError):  # the kernel has no memory for it: the lock ends with the file
                self.lock(entry, fcntl.F_UNLCK)

    def holder_lives(self) -> bool:
        """Return whether the process that published the blocks is alive. Opens no file."""
        return self.is_locked(OWNER)

    close = _LockFile.close_file  # ends all leases


@dataclass(slots=True)
class _Published:
    """A published block."""

    entry: int  # offset of the entry in the file
    block: Any  # reference that keeps the memory alive
    touched_s: float  # time of the last publication (`time.monotonic`)


class PublishedBlocks(_LockFile):
    """A holder's published blocks, in a new folder in `parent` that only this user can enter."""

    def __init__(self, parent: str) -> None:
        self.folder = ""  # path of the folder; empty if it could not be made
        self.refusal: str | None = None  # reason why no block can be published

        self.published: dict[Any, _Published] = {}  # by key
        self.withdrawn: list[_Published] = []  # withdrawn blocks, leased at the last check
        self.publications: dict[object, Key] = {}  # publications in progress that are not withdrawn
        self._used: set[int] = set()  # offsets of used entries
        self._lock = threading.RLock()
        try:
            self.folder = tempfile.mkdtemp(prefix="p2p-", dir=parent)  # mode 0o700
            super().__init__(self.folder, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            self.lock(OWNER, fcntl.F_WRLCK)
            self._write(b"\0", OWNER)
        except (OSError, AttributeError) as exc:  # AttributeError: the system has no such locks
            self.close()
            self.folder = ""
            logger.warning("descriptors cannot be published in %s: %s", parent, exc)
            # The text is the same on all workers, so that the user sees one warning.
            reason = getattr(exc, "strerror", None) or exc
            self.refusal = f"its folder for descriptors cannot be set up: {reason}"

    def publish(self, key: Key, find: Callable[[], Any], describe: Callable[[Any], bytes]) -> None:
        """Publish a block, or touch it if it is published. Replaces an earlier block of the key.

        `find` returns the block, which stays referenced until it is withdrawn and no lease is left.
        `describe` waits for the block's values, and returns its descriptor.

        Raises `KeyError` if the key was withdrawn meanwhile, `TransferError` if the descriptor is
        too long or no entry is free, and `ValueError` or `OSError` if nothing can be published.
        """
        publication, replaced = object(), None
        with self._lock:
            self.publications[publication] = key
        try:
            block = find()
            if self.touch(key, block):
                return
            text = describe(block)
            with self._lock:
                if self.refusal is not None:
                    raise ValueError(self.refusal)
                if publication not in self.publications:
                    raise KeyError(key)
                if not self.touch(key, block):  # unless another thread was quicker
                    replaced = self._replace(key, block, text)
        finally:
            with self._lock:
                self.publications.pop(publication, None)
            del replaced  # see `withdraw`

    def _replace(self, key: Key, block: Any, text: bytes) -> _Published | None:
        digest, replaced = hash_key(key), self.published.pop(key, None)
        try:
            if len(text) > DESCRIPTOR_BYTES:  # a dtype with many fields
                message = f"its descriptor has {len(text)} bytes, more than {DESCRIPTOR_BYTES}"
                raise TransferError(message, scope="region")
            bucket = bucket_of(digest)
            entries = range(bucket, bucket + _BUCKET_BYTES, _ENTRY_BYTES)
            entry = next((entry for entry in entries if entry not in self._used), None)
            if entry is None:
                message = "too many blocks are published: no entry is free for this one"
                raise TransferError(message, scope="region")
            self._used.add(entry)
            self.published[key] = _Published(entry, block, time.monotonic())
            self._write(len(text).to_bytes(_LENGTH_BYTES) + text, slot_of(entry))
            self._write(digest, entry)  # last: readers that find the entry find a valid slot
        except BaseException:
            self._withdraw(self.published.pop(key, None))
            raise
        finally:  # last: readers find one of the two at any time
            self._withdraw(replaced)
        return replaced

    def touch(self, key: Key, block: Any) -> bool:
        """Extend a block's publication. Return False if this block is not published."""
        with self._lock:
            published = self.published.get(key)
            if published is None or published.block is not block:
                return False
            published.touched_s = time.monotonic()
            return True

    def withdraw(self, key: Key, *, also_unfinished: bool = True) -> None:
        """Withdraw a block. Its memory is freed as soon as no lease is left.

        Publications in progress end too, unless `also_unfinished` is false.
        """
        with self._lock:
            for publication, published_key in list(self.publications.items()):
                if published_key == key and also_unfinished:
                    del self.publications[publication]
            dropped = self._withdraw(self.published.pop(key, None))
        del dropped  # outside of the lock, since freeing GPU memory may wait for the GPU

    def expire(self, ttl_s: float, is_spilled: Callable[[Any], bool] = lambda key: False) -> int:
        """Withdraw old and spilled blocks. Drop unleased ones. Return the number of those left."""
        with self._lock:
            oldest_s = time.monotonic() - ttl_s
            expired_keys = [
                k for k, n in self.published.items() if n.touched_s <= oldest_s or is_spilled(k)
            ]
            dropped = (
                [self._withdraw(self.published.pop(key)) for key in expired_keys],
                self.withdrawn,
            )
            self.withdrawn = [block for block in self.withdrawn if self._is_kept(block)]
            remaining = len(self)
        del dropped
        return remaining

    def close(self) -> int:
        """Withdraw all blocks and reject further ones. Return the number of leased blocks."""
        with self._lock:
            self.refusal = self.refusal or "the directory is closed"
        remaining = self.expire(float("-inf"))
        with self._lock:
            # Only after the last read: to a reader, the unlocked file means a dead holder.
            if not remaining and self.folder:
                for remove, name in (os.unlink, FILE), (os.rmdir, ""):
                    with suppress(OSError):  # already removed, together with the parent
                        remove(os.path.join(self.folder, name))
                self.close_file()
        return remaining

    @property
    def leased_bytes(self) -> int:
        with self._lock:
            live_blocks = [*self.published.values(), *self.withdrawn]
        return sum(getattr(published.block, "nbytes", 0) for published in live_blocks)

    def __len__(self) -> int:
        return len(self.published) + len(self.withdrawn)

    def _write(self, data: bytes, start: int) -> None:
        if os.pwrite(self.fd, data, start) != len(data):
            raise OSError(errno.ENOSPC, "the descriptor could not be written as a whole")

    def _withdraw(self, published: _Published | None) -> _Published | None:
        if published is not None and self._is_kept(published):
            self.withdrawn.append(published)
        return published

    def _is_kept(self, published: _Published) -> bool:
        """Clear a block's entry. Return whether a reader may still have a lease on the block."""
        try:
            self._write(bytes(_ENTRY_BYTES), published.entry)
            if self.is_locked(published.entry):
                return True
        except (OSError, MemoryError):  # unknown: checked again later
            return True
        self._used.discard(published.entry)
        return False


def hash_key(key: Key) -> bytes:
    """Return a key's digest, the index of its descriptor."""
    return blake2b(repr(key).encode(), digest_size=_ENTRY_BYTES).digest()


def bucket_of(digest: bytes) -> int:
    """Return the offset of a digest's bucket in the file."""
    return int.from_bytes(digest[:4]) * _BUCKET_BYTES % INDEX_BYTES


def slot_of(entry: int) -> int:
    """Return the offset of an entry's slot in the file."""
    return INDEX_BYTES + entry // _ENTRY_BYTES * _SLOT_BYTES
