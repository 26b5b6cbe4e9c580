"""Descriptors of blocks in shared tables, leased by file locks, between processes of one host.

A holder *publishes* a descriptor of a block in its table (`dask_p2p.transports.table`), and keeps
the block referenced. A reader *takes* a lease on it without asking anybody: it finds the
descriptor's slot in the table, and locks it. The kernel ends the lease when the reader releases the
lock, or dies. To give up a block, the holder first withdraws the descriptor and then checks the
lock. While the slot is locked somebody reads, and the block stays where it is::

    holder                                   reader
    publish: write descriptor, keep block    take: find slot, lock it (shared),
                                                   is it still the key's?  -> lease is valid
    withdraw: clear slot, then look                else                    -> let go, ask again
      slot is free   -> drop block
      slot is locked -> keep block, look again later

A reader that locks after the withdrawal no longer finds the key. One that locked before is seen by
the holder. So no reader has a valid lease on a dropped block. A holder that is killed leaves its
table behind. While it lives it keeps the first byte locked, so that readers can check that the
owner of the table is alive. The number of open files grows with the workers, never with the blocks.
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

from dask_p2p.config import Section, duration_s, option, section
from dask_p2p.transports.table import FILE, OWNER, Table, View, digest_of, views
from dask_p2p.types import Key

__all__ = ["DescriptorDirectory", "DirectoryOptions", "Lease", "PublishToken", "leave", "take"]

logger = logging.getLogger(__name__)

_LINGER_S = 0.1


@section("transports.directory")
@dataclass(frozen=True, slots=True)
class DirectoryOptions(Section):
    """See p2p-schema.yaml."""

    wait_s: float = option("wait", duration_s)
    retain_s: float = option("retain", duration_s)


@dataclass(slots=True)
class _Published:
    """A published block."""

    byte: int  # of the file, where its slot is
    owner: Any  # keeps the block's memory alive
    touched_s: float  # monotonic; when last published


@dataclass(eq=False, slots=True, weakref_slot=True)
class PublishToken:
    """Lets a block be looked up and published; it is cancelled when its key is withdrawn."""

    key: Key
    cancelled: bool = False


class DescriptorDirectory:
    """The holder's side.

    Parameters
    ----------
    parent : str
        Folder in which the directory makes a folder of its own, that only this user can enter.

    Attributes
    ----------
    folder : str
        That folder; empty if it could not be made.
    refusal : str or None
        Why nothing can be published.
    """

    def __init__(self, parent: str) -> None:
        self.folder = ""
        self.refusal: str | None = None
        self._file: Table | None = None
        self.published: dict[Any, _Published] = {}  # by key
        self.withdrawn: list[_Published] = []  # still leased when last looked at
        self._tokens: WeakSet[PublishToken] = WeakSet()
        self._lock = threading.RLock()
        try:
            self.folder = tempfile.mkdtemp(prefix="p2p-", dir=parent)  # mode 0o700
            self._file = Table(self.folder)
        except (OSError, AttributeError) as exc:  # the latter where there are no such locks
            self.close()
            self.folder = ""
            logger.warning("descriptors cannot be published in %s: %s", parent, exc)
            # The same text on all workers, so that the user sees one warning.
            reason = getattr(exc, "strerror", None) or exc
            self.refusal = f"its folder for descriptors cannot be set up: {reason}"

    def token(self, key: Key) -> PublishToken:
        """Return a token for a block that is about to be looked up and then published.

        Between the two it may be released by another thread, which does not wait for it.
        """
        token = PublishToken(key)
        with self._lock:
            self._tokens.add(token)
        return token

    def publish(self, key: Key, owner: Any, text: bytes, token: PublishToken | None = None) -> None:
        """Publish a block in the place of an earlier one with its key, or touch it if it is there.

        Parameters
        ----------
        key
            Of the block.
        owner
            Whatever keeps its memory alive; referenced until the entry is withdrawn and no
            lease is left.
        text
            The descriptor that readers get.
        token
            From before the block was looked up.

        Raises
        ------
        KeyError
            If the key was withdrawn since then.
        ValueError
            If the directory is closed, or could not be made; or if the descriptor is too long.
        OSError
            If the descriptor cannot be written.
        """
        with self._lock:
            if self._file is None or self.refusal is not None:
                raise ValueError(self.refusal)
            if token is not None and token.cancelled:
                raise KeyError(key)
            if self.touch(key, owner):
                return  # another thread was quicker, and readers may know its entry by now
            digest, replaced = digest_of(key), self.published.pop(key, None)
            try:
                byte = self._file.reserve(digest)
                self.published[key] = _Published(byte, owner, time.monotonic())
                self._file.publish(byte, digest, text)
            except BaseException:
                self._withdraw(self.published.pop(key, None))
                raise
            finally:  # not before: readers find the one or the other at any time
                self._withdraw(replaced)

    def touch(self, key: Key, owner: Any) -> bool:
        """Keep a block's descriptor for longer; False if there is none, or an earlier block's."""
        with self._lock:
            entry = self.published.get(key)
            if entry is None or entry.owner is not owner:
                return False
            entry.touched_s = time.monotonic()
            return True

    def withdraw(self, key: Key) -> None:
        """Withdraw an entry; its block is dropped as soon as no lease is left."""
        with self._lock:
            for token in self._tokens:
                token.cancelled |= token.key == key
            dropped = self._withdraw(self.published.pop(key, None))
        del dropped  # freeing a GPU's memory may wait for it: nobody should wait for that lock

    def expire(self, ttl_s: float, is_spilled: Callable[[Any], bool] = lambda key: False) -> int:
        """Withdraw what is older, or spilled; drop what nobody reads; return how many are left."""
        with self._lock:
            oldest_s = time.monotonic() - ttl_s
            due = [k for k, n in self.published.items() if n.touched_s <= oldest_s or is_spilled(k)]
            dropped = [self._withdraw(self.published.pop(key)) for key in due], self.withdrawn
            self.withdrawn = [entry for entry in self.withdrawn if self._is_kept(entry)]
            remaining = len(self)
        del dropped
        return remaining

    def close(self) -> int:
        """Withdraw everything, refuse further publishes; return how many leases are left."""
        with self._lock:
            self.refusal = self.refusal or "the directory is closed"
        remaining = self.expire(float("-inf"))
        with self._lock:
            # Not before the last reader is done, who would think that the holder was killed.
            if not remaining and self.folder:
                for remove, name in (os.unlink, FILE), (os.rmdir, ""):
                    with suppress(OSError):  # already removed, together with the parent
                        remove(os.path.join(self.folder, name))
                if self._file is not None:
                    self._file.close()
        return remaining

    def linger(self) -> None:
        """Close, in a thread of its own, as soon as the last reader is done."""

        def close() -> None:
            while self.close():
                time.sleep(_LINGER_S)

        threading.Thread(target=close, name="p2p-directory", daemon=True).start()

    @property
    def leased_bytes(self) -> int:
        """Bytes of the blocks that the directory keeps alive."""
        with self._lock:
            kept = [*self.published.values(), *self.withdrawn]
        return sum(getattr(entry.owner, "nbytes", 0) for entry in kept)

    def __len__(self) -> int:
        """Blocks that the directory keeps alive."""
        return len(self.published) + len(self.withdrawn)

    def _withdraw(self, entry: _Published | None) -> _Published | None:
        if entry is not None and self._is_kept(entry):
            self.withdrawn.append(entry)
        return entry

    def _is_kept(self, entry: _Published) -> bool:
        """Withdraw a descriptor; return whether its block must stay, since somebody may read it."""
        try:
            return self._file is not None and self._file.withdraw(entry.byte)
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
        """Return whether the process that published the block is alive. It opens no file."""
        if self._view is None:
            raise OSError(errno.EBADF, "the lease has ended")
        return self._view.is_locked(OWNER)

    def close(self) -> None:
        """End the lease. Idempotent."""
        view, self._view = self._view, None
        if view is not None:
            view.end(self.byte)


def take(folder: str, key: Key) -> Lease | None:
    """Take a lease on a block; None if this folder's directory has no valid descriptor of it."""
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
    """Close what a reader has open of the directory in this folder, as soon as no lease is left."""
    views.pop(folder, None)
