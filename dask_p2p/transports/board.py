"""A notice board: blocks described in files, leased by file locks, between processes of one host.

A holder *posts* a small file that describes a block, and keeps the block referenced. A reader
*takes* a lease on it without asking anybody: it locks one byte of the holder's lock file, which
byte follows from the description. The kernel ends the lease when the reader lets go, or dies. To
give a block up, the holder first unlinks the description and then looks at the byte: as long as it
is locked somebody reads, and the block stays where it is::

    holder                               reader
    post: write file, keep block         take: open and read file, lock byte (shared),
                                               is it still there?  -> lease is valid
    retract: unlink, then look                 gone, or replaced?  -> let go, ask again
      byte is free   -> drop block
      byte is locked -> keep block,
                        look again later

A reader that locks after the unlinking does not find the file again; one that locked before is
seen by the holder. So no reader has a valid lease on a dropped block. The file is looked up again
by its name, since some file systems (NFS, FUSE) do not say of an open file that it was unlinked.

A holder that is killed leaves its files behind. While it lives it keeps the first byte locked, by
which readers tell (`Lease.holder_lives`) that somebody still stands by what the board says.

Open files grow with the workers, never with the blocks: a holder has its own lock file open, a
reader that of each holder that it has read from, until it leaves (`leave`).
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakSet

from dask_p2p.transports.locks import LOCKS, OWNER, LockFile, readers

__all__ = ["Board", "Intent", "Lease", "leave", "take"]

logger = logging.getLogger(__name__)

_LINGER_S = 0.1


@dataclass(slots=True)
class _Notice:
    """A posted block."""

    path: str  # empty once it is taken down, or another one is in its place
    byte: int
    owner: Any  # keeps the block's memory alive
    posted_s: float  # monotonic; when last posted


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

    Attributes
    ----------
    folder : str
        That folder; empty if it could not be made.
    refusal : str or None
        Why nothing can be posted.
    """

    def __init__(self, parent: str) -> None:
        self.folder = ""
        self.refusal: str | None = None
        self._file: LockFile | None = None
        self._notices: dict[Any, _Notice] = {}  # by key
        self._retracted: list[_Notice] = []  # still leased when last looked at
        self._intents: WeakSet[Intent] = WeakSet()
        self._lock = threading.Lock()
        try:
            self._set_up(parent)
        except (OSError, AttributeError) as exc:  # the latter where there are no such locks
            self.close()
            self.folder = ""
            logger.warning("descriptors cannot be published in %s: %s", parent, exc)
            # In the same words on all workers that have the same trouble.
            reason = getattr(exc, "strerror", None) or exc
            self.refusal = f"its folder for descriptors cannot be set up: {reason}"

    def _set_up(self, parent: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="p2p-", dir=parent)  # mode 0o700
        self._file = LockFile(self.folder, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._file.lock(OWNER, exclusive=True)

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
            The description that readers get. Two blocks never have the same at the same time.
        intent
            From before the block was looked up.

        Raises
        ------
        KeyError
            If the key was retracted since then.
        ValueError
            If the board is closed, or could not be made.
        """
        with self._lock:
            if self.refusal is not None:
                raise ValueError(self.refusal)
            if intent is not None and intent.void:
                raise KeyError(key)
            if self._renew(key, owner):
                # Another thread was quicker. A new notice in its place would take it away from
                # readers who were told that it is there.
                return
            path = _path(self.folder, key)
            try:
                _write(path, text)
            except BaseException:
                self._retract(key)
                raise
            if key in self._notices:
                self._notices[key].path = ""  # the new one has taken its place
                self._retract(key)
            self._notices[key] = _Notice(path, _byte(text), owner, time.monotonic())

    def renew(self, key: Any, owner: Any) -> bool:
        """Prolong the descriptor of a block; False if there is none, or one of an earlier block."""
        with self._lock:
            return self._renew(key, owner)

    def retract(self, key: Any) -> None:
        """Take a notice down; the block is dropped as soon as no lease is left."""
        with self._lock:
            for intent in self._intents:
                intent.void |= intent.key == key
            dropped = self._retract(key)
        del dropped  # freeing a GPU's memory may wait for it: nobody should wait for that lock

    def sweep(self, retain_s: float, is_spilled: Callable[[Any], bool] = lambda key: False) -> int:
        """Retract what was posted longer ago, or spilled since; drop what nobody reads.

        Return how many blocks are left.
        """
        with self._lock:
            oldest_s = time.monotonic() - retain_s
            due = [k for k, n in self._notices.items() if n.posted_s <= oldest_s or is_spilled(k)]
            dropped = [self._retract(key) for key in due], self._retracted
            self._retracted = [notice for notice in self._retracted if self._is_kept(notice)]
            left = len(self)
        del dropped
        return left

    def close(self) -> int:
        """Retract everything, refuse further posts; return how many leases are left."""
        with self._lock:
            self.refusal = self.refusal or "the board is closed"
        left = self.sweep(float("-inf"))
        with self._lock:
            # Not before the last reader is done, who would think that the holder was killed.
            if not left and self.folder:
                with suppress(OSError):  # removed already, together with the parent
                    os.unlink(os.path.join(self.folder, LOCKS))
                with suppress(OSError):
                    os.rmdir(self.folder)
                if self._file is not None:
                    self._file.close()
        return left

    def linger(self) -> None:
        """Close, in a thread of its own, as soon as the last reader is done."""

        def close() -> None:
            while self.close():
                time.sleep(_LINGER_S)

        threading.Thread(target=close, name="p2p-board", daemon=True).start()

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

    def _retract(self, key: Any) -> _Notice | None:
        notice = self._notices.pop(key, None)
        if notice is not None and self._is_kept(notice):
            self._retracted.append(notice)
        return notice

    def _is_kept(self, notice: _Notice) -> bool:
        """Take a notice down; tell whether its block must stay, since somebody may read it."""
        assert self._file is not None, "something was posted"
        try:
            if notice.path:
                with suppress(FileNotFoundError):  # somebody tidied up: its readers are there still
                    os.unlink(notice.path)
                notice.path = ""
            return self._file.is_locked(notice.byte)
        except (OSError, MemoryError):  # nobody knows: it is tried again
            return True


class Lease:
    """A reader's right to read a block, until closed.

    Attributes
    ----------
    text : bytes
        The holder's description of the block.
    """

    def __init__(self, folder: str, text: bytes) -> None:
        self.text = text
        self.byte = _byte(text)
        self._folder = folder
        self._file: LockFile | None = readers.begin(folder, self.byte)

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self._file is not None

    def holder_lives(self) -> bool:
        """Whether the process lives that posted the block. It opens no file."""
        if self._file is None:
            raise OSError(errno.EBADF, "the lease has ended")
        return self._file.is_locked(OWNER)

    def close(self) -> None:
        """End the lease. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            readers.end(self._folder, file, self.byte)


def take(folder: str, key: Any) -> Lease | None:
    """Take a lease on a block; None if the board in this folder has no valid notice of it."""
    path = _path(folder, key)
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:  # the file stays open until it is looked up again, or another could be taken for it
        status = os.fstat(fd)
        lease = Lease(folder, os.read(fd, status.st_size))
        is_valid = False
        try:
            is_valid = os.path.samestat(os.stat(path), status) and lease.holder_lives()
        finally:
            if not is_valid:
                lease.close()
        return lease if is_valid else None
    except FileNotFoundError:
        return None
    finally:
        with suppress(OSError):  # which would end in a lease that nobody has
            os.close(fd)


def leave(folder: str) -> None:
    """Close what a reader has open of the board in this folder, as soon as no lease is left."""
    readers.leave(folder)


def _write(path: str, text: bytes) -> None:
    """Write a notice: readers see the whole of it, or the one that was there before."""
    draft = f"{path}.draft"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            if os.write(fd, text) != len(text):
                raise OSError(errno.ENOSPC, "the descriptor could not be written as a whole")
        finally:
            os.close(fd)
        os.rename(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)  # or there could never be another one
        raise


def _path(folder: str, key: Any) -> str:
    return f"{folder}/{blake2b(repr(key).encode(), digest_size=16).hexdigest()}"


def _byte(text: bytes) -> int:
    """Return which byte of the lock file is for leases on this description."""
    return 1 + int.from_bytes(blake2b(text, digest_size=7).digest())
