"""Connections that have not shown yet which member is at their other end.

Any process of the host, or of the network, can connect. A Unix socket of another user is closed
immediately, and one that is silent is closed after some seconds. There are never more than some
tens. Then the kernel keeps the next ones waiting, and silent ones are closed earlier.
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
from dask_p2p.sections.files import MOST_STRANGERS, check_files

# How long one may be silent without encryption, where members send immediately; and if others wait.
_SILENT_S = 5.0, 0.0
# The same of one that shakes hands, if others wait.
_TLS_AMONG_MOST_S = 1.0
_ROUND = 256  # connections that are taken before something else has its turn
_CREDENTIALS = struct.Struct("3i")  # Linux' struct ucred: process, user, group
# Errors of `accept` that are the peer's, or of the network in between: see accept(2). Errors of
# this process last, so it must not try again for ever.
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
    made: socket.socket
    silent_s: tuple[float, float]  # how long it may be; the same if others wait
    heard_s: float = inf  # when it was read last; it is new: not yet
    said: bytearray = field(default_factory=bytearray)

    def read(self, wanted: int) -> bool:
        """Read as much as has come; return whether it has sent all, and not gone."""
        self.heard_s = time.monotonic()
        try:
            while len(self.said) < wanted:
                part = bytearray(wanted - len(self.said))
                count = self.made.recv_into(part)
                if not count:
                    return False
                self.said += part[:count]
        except BlockingIOError:
            raise
        except OSError:  # no certificate of this cluster, for one
            return False
        return True


class Strangers:
    """Those at one listener of a member."""

    def __init__(
        self,
        listener: socket.socket,
        prepared: Callable[[socket.socket], socket.socket],  # for links; `OSError` if it has gone
        tls_s: float,  # how long one that is encrypted may be silent
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
        """How long to wait for them, at most, before `accepted` is called again."""
        return max(0.0, min(map(self._until_s, self._all), default=inf) - time.monotonic())

    @property
    def _is_full(self) -> bool:
        return len(self._all) >= MOST_STRANGERS

    def _until_s(self, stranger: _Stranger) -> float:
        return stranger.heard_s + stranger.silent_s[self._is_full]

    def accepted(self, ready: set[int], wanted: int) -> list[tuple[bytes, socket.socket]]:
        """Return those that have sent so many bytes by now, and these; close silent ones.

        `ready` are those of `numbers` with something to read. `SectionError` if this process
        cannot have any more connections.
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
                raise SectionError(f"a member cannot take connections: {exc}") from exc
            if not is_of_this_user(made):
                made.close()
                continue
            with suppress(OSError):  # it has gone since
                made = self._prepared(made)
                is_plain = type(made) is socket.socket
                silent_s = _SILENT_S if is_plain else (self._tls_s, _TLS_AMONG_MOST_S)
                self._all.append(_Stranger(made, silent_s))

    def _read(self, ready: set[int], wanted: int) -> list[tuple[bytes, socket.socket]]:
        found, left, now_s = [], [], time.monotonic()
        for each in self._all:
            is_new = each.heard_s == inf
            is_silent = not is_new and each.made.fileno() not in ready
            try:
                is_known = not is_silent and each.read(wanted)
            except BlockingIOError:
                is_silent, is_known = True, False
            if is_known:
                found.append((bytes(each.said), each.made))
            elif is_silent and now_s < self._until_s(each):
                left.append(each)
            else:
                each.made.close()
        self._all = left
        return found

    def close(self) -> None:
        """Close them all, and the listener."""
        self._listener.close()
        for each in self._all:
            each.made.close()


def is_of_this_user(made: socket.socket) -> bool:
    """Return whether a process of this user is at the other end; yes if that is another host."""
    if made.family != socket.AF_UNIX:
        return True
    said = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(said)[1] == os.geteuid())
