"""Unidentified connections: those that have not sent their attempt tokens yet.

Any process of the host or of the network can connect. A Unix socket of another user is closed
immediately, a silent connection after some seconds. At most `MOST_STRANGERS` are open. Then the
kernel queues further ones, and silent ones are closed earlier.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

from dask_p2p.errors import SectionError
from dask_p2p.sections.wire.files import MOST_STRANGERS, check_files

# Time that a connection without TLS may be silent: usually, and while others are queued. Ranks send
# their tokens immediately.
_SILENT_S = 5.0, 0.0
# Time that a TLS connection may be silent while others are queued.
_TLS_AMONG_MOST_S = 1.0
_ROUND = 256  # most connections accepted in one call
_CREDENTIALS = struct.Struct("3i")  # Linux' struct ucred: process, user, group
# Errors of `accept` caused by the peer or the network: see accept(2). Errors of this process would
# come again at each retry.
_OF_PEERS = {
    errno.ECONNABORTED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENONET,
    errno.ENOPROTOOPT,
    errno.EOPNOTSUPP,
    errno.EPERM,  # a rule of the firewall
    errno.EPROTO,
    errno.ETIMEDOUT,
}


@dataclass
class _Stranger:
    """One unidentified connection."""

    made: socket.socket
    silent_s: tuple[float, float]  # time it may be silent: usually, and while others are queued
    read_s: float = inf  # time of the last read; inf: none yet
    received: bytearray = field(default_factory=bytearray)  # bytes received

    def read(self, wanted: int) -> bool:
        """Read without blocking. Return True when `wanted` bytes are here, False if it failed.

        Raises `BlockingIOError` while bytes are missing.
        """
        self.read_s = time.monotonic()
        try:
            while len(self.received) < wanted:
                part = bytearray(wanted - len(self.received))
                count = self.made.recv_into(part)
                if not count:
                    return False
                self.received += part[:count]
        except BlockingIOError:
            raise
        except OSError:  # for example, a certificate of another cluster
            return False
        return True


class Strangers:
    """The unidentified connections at one listener of a rank."""

    def __init__(
        self,
        listener: socket.socket,
        prepared: Callable[[socket.socket], socket.socket],  # sets up a connection, or `OSError`
        tls_s: float,  # time that a TLS connection may be silent
    ) -> None:
        self._listener, self._prepared, self._tls_s = listener, prepared, tls_s
        self._all: list[_Stranger] = []

    @property
    def numbers(self) -> list[int]:
        """File descriptors to poll, for `accepted`."""
        found = [each.made.fileno() for each in self._all]
        return found if self._is_full else [*found, self._listener.fileno()]

    @property
    def patience_s(self) -> float:
        """Longest time to poll before `accepted` must be called again, in seconds."""
        return max(0.0, min(map(self._until_s, self._all), default=inf) - time.monotonic())

    @property
    def _is_full(self) -> bool:
        return len(self._all) >= MOST_STRANGERS

    def _until_s(self, stranger: _Stranger) -> float:
        return stranger.read_s + stranger.silent_s[self._is_full]

    def accepted(self, ready: set[int], wanted: int) -> list[tuple[bytes, socket.socket]]:
        """Return connections that have sent `wanted` bytes, with these; close silent ones.

        `ready` are the descriptors of `numbers` that are readable. Raises `SectionError` if this
        process cannot open any more connections.
        """
        if self._listener.fileno() in ready:
            self._accept()
        return self._read(ready, wanted)

    def _accept(self) -> None:
        for _ in range(_ROUND):
            if self._is_full:
                return
            try:
                made, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in _OF_PEERS:
                    continue
                check_files(exc)
                raise SectionError(f"a rank cannot accept connections: {exc}") from exc
            if not is_of_this_user(made):
                made.close()
                continue
            with suppress(OSError):  # already closed by the peer
                made = self._prepared(made)
                is_plain = type(made) is socket.socket
                silent_s = _SILENT_S if is_plain else (self._tls_s, _TLS_AMONG_MOST_S)
                self._all.append(_Stranger(made, silent_s))

    def _read(self, ready: set[int], wanted: int) -> list[tuple[bytes, socket.socket]]:
        found, left, now_s = [], [], time.monotonic()
        for each in self._all:
            is_new = each.read_s == inf
            is_silent = not is_new and each.made.fileno() not in ready
            try:
                is_known = not is_silent and each.read(wanted)
            except BlockingIOError:
                is_silent, is_known = True, False
            if is_known:
                found.append((bytes(each.received), each.made))
            elif is_silent and now_s < self._until_s(each):
                left.append(each)
            else:
                each.made.close()
        self._all = left
        return found

    def close(self) -> None:
        """Close the listener, and all unidentified connections."""
        self._listener.close()
        for each in self._all:
            each.made.close()


def is_of_this_user(made: socket.socket) -> bool:
    """Return whether the peer process belongs to this user; True for TCP."""
    if made.family != socket.AF_UNIX:
        return True
    received = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(received)[1] == os.geteuid())
