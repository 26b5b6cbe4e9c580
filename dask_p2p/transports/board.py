"""A notice board: blocks described in files, leased by file locks, between processes of one host.

A holder *posts* a small file that describes a block, and keeps the block referenced. A reader
*takes* a lease on it by locking the file, without asking anybody; the kernel ends the lease when
the reader lets go, or dies. To give a block up, the holder first unlinks the file and then tries
to lock it: as long as that fails somebody reads, and the block stays where it is::

    holder                               reader
    post: write file, keep block         take: open, lock shared,
                                               still linked? -> lease is valid
    retract: unlink, then                      unlinked?     -> let go, ask again
      lock exclusive ok  -> drop block
      lock refused       -> keep block,
                            try again

A reader that locks after the unlinking sees that the file has no links any more; one that locked
before makes the holder's attempt fail. So no reader has a valid lease on a dropped block.

A holder that is killed leaves its notices behind. While it lives it keeps one more file locked, by
which readers tell (`is_tended`) that somebody still stands by what the board says.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakSet

__all__ = ["Board", "Intent", "Lease", "is_tended", "take"]

_TENDED = "tended"


@dataclass(slots=True)
class _Notice:
    """A posted block."""

    path: str
    fd: int
    owner: Any  # keeps the block's memory alive
    posted_s: float  # monotonic; when last posted
    linked: bool = True

    def retract(self) -> None:
        if self.linked:
            self.linked = False
            with suppress(FileNotFoundError):  # somebody tidied up: its readers are there still
                os.unlink(self.path)

    def is_read(self) -> bool:
        """Whether a reader holds a lease; only meaningful once retracted."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


class Intent:
    """That a block is about to be looked up and posted: void once its key is retracted."""

    __slots__ = ("__weakref__", "key", "void")

    def __init__(self, key: Any) -> None:
        self.key = key
        self.void = False


class Board:
    """The holder's side.

    Parameters
    ----------
    parent : str
        Folder in which the board makes a folder of its own, that only this user can enter.
    """

    def __init__(self, parent: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="p2p-", dir=parent)  # mode 0o700
        self._tended = os.open(os.path.join(self.folder, _TENDED), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._tended, fcntl.LOCK_EX)
        self._notices: dict[Any, _Notice] = {}  # by key
        self._retracted: list[_Notice] = []  # still leased when last looked at
        self._intents: WeakSet[Intent] = WeakSet()
        self._closed = False
        self._lock = threading.Lock()

    def intend(self, key: Any) -> Intent:
        """Say that a block is about to be looked up, to be posted then.

        Between the two it may be released by another thread, which does not wait for it.
        """
        intent = Intent(key)
        with self._lock:
            self._intents.add(intent)
        return intent

    def post(self, key: Any, owner: Any, text: bytes, intent: Intent | None = None) -> None:
        """Post a block, replacing an earlier one with the same key; prolong it if it is posted.

        Parameters
        ----------
        key
            Of the block.
        owner
            Whatever keeps its memory alive; referenced until the notice is retracted and no
            lease is left.
        text
            The description that readers get.
        intent
            From before the block was looked up.

        Raises
        ------
        KeyError
            If the key was retracted since then.
        """
        with self._lock:
            if self._closed:
                raise ValueError("the board is closed")
            if intent is not None and intent.void:
                raise KeyError(key)
            if self._renew(key, owner):
                # Another thread was quicker. A new notice in its place would take it away from
                # readers who were told that it is there.
                return
            path = _path(self.folder, key)
            try:
                fd = _write(path, text)
            except BaseException:
                self._retract(key)
                raise
            if key in self._notices:
                self._notices[key].linked = False  # the new one has taken its place
                self._retract(key)
            self._notices[key] = _Notice(path, fd, owner, time.monotonic())

    def renew(self, key: Any, owner: Any) -> bool:
        """Prolong the notice of a block; False if there is none, or one of an earlier block."""
        with self._lock:
            return self._renew(key, owner)

    def retract(self, key: Any) -> None:
        """Take a notice down; the block is dropped as soon as no lease is left."""
        with self._lock:
            for intent in self._intents:
                intent.void |= intent.key == key
            self._retract(key)
            self._drop_unread()

    def sweep(self, retain_s: float) -> int:
        """Retract what was posted longer ago, drop what nobody reads; return how many are left."""
        with self._lock:
            oldest_s = time.monotonic() - retain_s
            for key in [k for k, n in self._notices.items() if n.posted_s <= oldest_s]:
                self._retract(key)
            self._drop_unread()
            return len(self._notices) + len(self._retracted)

    def close(self) -> int:
        """Retract everything, refuse further posts; return how many leases are left."""
        with self._lock:
            self._closed = True
            for key in list(self._notices):
                self._retract(key)
            self._drop_unread()
            if not self._retracted and self._tended >= 0:
                # Not before the last reader is done, who would think that the holder was killed.
                with suppress(OSError):  # removed already, together with the parent
                    os.unlink(os.path.join(self.folder, _TENDED))
                    os.rmdir(self.folder)
                os.close(self._tended)
                self._tended = -1
            return len(self._retracted)

    @property
    def leased_bytes(self) -> int:
        """Bytes of the blocks that the board keeps alive."""
        with self._lock:
            kept = [*self._notices.values(), *self._retracted]
        return sum(getattr(notice.owner, "nbytes", 0) for notice in kept)

    def __len__(self) -> int:
        """Blocks that the board keeps alive."""
        return len(self._notices) + len(self._retracted)

    def _renew(self, key: Any, owner: Any) -> bool:
        notice = self._notices.get(key)
        if notice is None or notice.owner is not owner:
            return False
        notice.posted_s = time.monotonic()
        return True

    def _retract(self, key: Any) -> None:
        notice = self._notices.pop(key, None)
        if notice is not None:
            notice.retract()
            self._retracted.append(notice)

    def _drop_unread(self) -> None:
        still_read = []
        for notice in self._retracted:
            if notice.is_read():
                still_read.append(notice)
            else:
                os.close(notice.fd)
        self._retracted = still_read


class Lease:
    """A reader's right to read a block, until closed.

    Attributes
    ----------
    text : bytes
        The holder's description of the block.
    """

    def __init__(self, fd: int, text: bytes) -> None:
        self._fd = fd
        self.text = text

    def close(self) -> None:
        """End the lease. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)  # and with it the lock
            self._fd = -1


def is_tended(folder: str) -> bool:
    """Tell whether the process that made the board in this folder lives."""
    try:
        fd = os.open(f"{folder}/{_TENDED}", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def take(folder: str, key: Any) -> Lease | None:
    """Take a lease on a block; None if the board in this folder has no valid notice of it."""
    if not is_tended(folder):
        return None
    try:
        fd = os.open(_path(folder, key), os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        status = os.fstat(fd)
        if status.st_nlink:
            return Lease(fd, os.read(fd, status.st_size))
    except BlockingIOError:  # the holder is just dropping it
        pass
    os.close(fd)
    return None


def _write(path: str, text: bytes) -> int:
    """Write a notice: readers see the whole of it, or the one that was there before."""
    draft = f"{path}.draft"
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, text)
        os.rename(draft, path)
    except BaseException:
        os.close(fd)
        os.unlink(draft)  # or there could never be another one
        raise
    return fd


def _path(folder: str, key: Any) -> str:
    return f"{folder}/{blake2b(repr(key).encode(), digest_size=16).hexdigest()}"
