"""Descriptors of blocks in shared tables, leased by file locks, between processes of one host.

A holder *posts* a descriptor of a block in its table (`dask_p2p.transports.table`), and keeps the
block referenced. A reader *takes* a lease on it without asking anybody: it finds the descriptor's
slot in the table, and locks it. The kernel ends the lease when the reader lets go, or dies. To give
a block up, the holder first withdraws the descriptor and then looks at the lock: as long as it is
there somebody reads, and the block stays where it is::

    holder                                reader
    post: write descriptor, keep block    take: find slot, lock it (shared),
                                                is it still the key's?  -> lease is valid
    retract: withdraw, then look                else                    -> let go, ask again
      slot is free   -> drop block
      slot is locked -> keep block, look again later

A reader that locks after the withdrawal does not find the key any more; one that locked before is
seen by the holder. So no reader has a valid lease on a dropped block. A holder that is killed
leaves its table behind; while it lives it keeps the first byte locked, by which readers tell that
somebody stands by what the table says. Open files grow with the workers, never with the blocks.
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
from typing import Any
from weakref import WeakSet

from dask_p2p.transports.table import FILE, OWNER, Table, View, digest_of, views

__all__ = ["Board", "Intent", "Lease", "leave", "take"]

logger = logging.getLogger(__name__)

_LINGER_S = 0.1


@dataclass(slots=True)
class _Notice:
    """A posted block."""

    byte: int  # of the file, where its slot is
    owner: Any  # keeps the block's memory alive
    posted_s: float  # monotonic; when last posted


@dataclass(eq=False, slots=True, weakref_slot=True)
class Intent:
    """That a block is about to be looked up and posted: void once its key is retracted."""

    key: Any
    void: bool = False


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
        self._file: Table | None = None
        self._notices: dict[Any, _Notice] = {}  # by key
        self._retracted: list[_Notice] = []  # still leased when last looked at
        self._intents: WeakSet[Intent] = WeakSet()
        self._lock = threading.RLock()
        try:
            self.folder = tempfile.mkdtemp(prefix="p2p-", dir=parent)  # mode 0o700
            self._file = Table(self.folder)
        except (OSError, AttributeError) as exc:  # the latter where there are no such locks
            self.close()
            self.folder = ""
            logger.warning("descriptors cannot be published in %s: %s", parent, exc)
            # In the same words on all workers that have the same trouble.
            reason = getattr(exc, "strerror", None) or exc
            self.refusal = f"its folder for descriptors cannot be set up: {reason}"

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
            The descriptor that readers get.
        intent
            From before the block was looked up.

        Raises
        ------
        KeyError
            If the key was retracted since then.
        ValueError
            If the board is closed, or could not be made; or if the descriptor is too long.
        OSError
            If the descriptor cannot be written.
        """
        with self._lock:
            if self._file is None or self.refusal is not None:
                raise ValueError(self.refusal)
            if intent is not None and intent.void:
                raise KeyError(key)
            if self.renew(key, owner):
                return  # another thread was quicker, and readers may know its notice by now
            digest, replaced = digest_of(key), self._notices.pop(key, None)
            try:
                byte = self._file.reserve(digest)
                self._notices[key] = _Notice(byte, owner, time.monotonic())
                self._file.publish(byte, digest, text)
            except BaseException:
                self._retract(self._notices.pop(key, None))
                raise
            finally:  # not before: readers find the one or the other at any time
                self._retract(replaced)

    def renew(self, key: Any, owner: Any) -> bool:
        """Prolong the descriptor of a block; False if there is none, or one of an earlier block."""
        with self._lock:
            notice = self._notices.get(key)
            if notice is None or notice.owner is not owner:
                return False
            notice.posted_s = time.monotonic()
            return True

    def retract(self, key: Any) -> None:
        """Take a notice down; the block is dropped as soon as no lease is left."""
        with self._lock:
            for intent in self._intents:
                intent.void |= intent.key == key
            dropped = self._retract(self._notices.pop(key, None))
        del dropped  # freeing a GPU's memory may wait for it: nobody should wait for that lock

    def sweep(self, retain_s: float, is_spilled: Callable[[Any], bool] = lambda key: False) -> int:
        """Retract what is older, or spilled; drop what nobody reads; return how many are left."""
        with self._lock:
            oldest_s = time.monotonic() - retain_s
            due = [k for k, n in self._notices.items() if n.posted_s <= oldest_s or is_spilled(k)]
            dropped = [self._retract(self._notices.pop(key)) for key in due], self._retracted
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
                for remove, name in (os.unlink, FILE), (os.rmdir, ""):
                    with suppress(OSError):  # removed already, together with the parent
                        remove(os.path.join(self.folder, name))
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

    def _retract(self, notice: _Notice | None) -> _Notice | None:
        if notice is not None and self._is_kept(notice):
            self._retracted.append(notice)
        return notice

    def _is_kept(self, notice: _Notice) -> bool:
        """Withdraw a descriptor; tell whether its block must stay, since somebody may read it."""
        try:
            return self._file is not None and self._file.withdraw(notice.byte)
        except (OSError, MemoryError):  # nobody knows: it is tried again
            return True


@dataclass(eq=False, slots=True)
class Lease:
    """A reader's right to read a block, until closed."""

    text: bytes  # the holder's descriptor of the block
    byte: int  # of the holder's table, which is locked
    _view: View | None

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self._view is not None

    def holder_lives(self) -> bool:
        """Whether the process lives that posted the block. It opens no file."""
        if self._view is None:
            raise OSError(errno.EBADF, "the lease has ended")
        return self._view.is_locked(OWNER)

    def close(self) -> None:
        """End the lease. Idempotent."""
        view, self._view = self._view, None
        if view is not None:
            view.end(self.byte)


def take(folder: str, key: Any) -> Lease | None:
    """Take a lease on a block; None if the board in this folder has no valid descriptor of it."""
    digest = digest_of(key)
    try:
        view = views.get(folder) or views.setdefault(folder, View(folder))
        byte = view.find(digest)
    except (FileNotFoundError, ValueError):  # the latter where nothing can be mapped
        return None
    if byte is None:
        return None
    view.begin(byte)
    text = None
    try:
        text = view.text(byte, digest)
    finally:
        if text is None:
            view.end(byte)
    return None if text is None else Lease(text, byte, view)


def leave(folder: str) -> None:
    """Close what a reader has open of the board in this folder, as soon as no lease is left."""
    views.pop(folder, None)
