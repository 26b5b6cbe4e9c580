"""Connections that have not shown yet which member is at their other end.

Any process of the host, or of the network, can connect. A Unix socket of another user is closed at
once. So are those that say nothing for long, and there are never more than some tens: until one
of them has gone, the kernel keeps the next ones waiting.
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
from dask_p2p.sections.files import check_files

MOST_STRANGERS = 32  # of one member
_SILENT_S = 5.0  # after which one that speaks openly is closed: members speak at once
_ROUND = 256  # connections that are taken before something else has its turn
_CREDENTIALS = struct.Struct("3i")  # Linux' struct ucred: process, user, group
# Errors of `accept` that are the peer's, or of the network in between: see accept(2). Those of this
# process last, so it must not try again for ever.
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
    silent_s: float  # how long it may be
    until_s: float = inf
    said: bytearray = field(default_factory=bytearray)

    def read(self, wanted: int) -> bool:
        """Read what it says; return whether it has said all, and not gone."""
        self.until_s = time.monotonic() + self.silent_s
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
    """Those at the listeners of one member."""

    def __init__(self, prepared: Callable[[socket.socket], socket.socket], tls_s: float) -> None:
        self._prepared = prepared  # for use by a link; `OSError` if the peer has gone
        self._tls_s = tls_s  # how long one that is encrypted may say nothing
        self._all: list[_Stranger] = []

    @property
    def numbers(self) -> list[int]:
        """File descriptors at which they say something."""
        return [each.made.fileno() for each in self._all]

    @property
    def is_full(self) -> bool:
        """Whether no more are taken now."""
        return len(self._all) >= MOST_STRANGERS

    @property
    def patience_s(self) -> float:
        """How long to wait for them, at most, before `read` is called again."""
        return max(0.0, min((each.until_s for each in self._all), default=inf) - time.monotonic())

    def accept(self, listener: socket.socket) -> None:
        """Take new connections. `SectionError` if this process cannot have any more."""
        for _ in range(_ROUND):
            if self.is_full:
                return
            try:
                made, _ = listener.accept()
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
            with suppress(OSError):  # it has gone meanwhile
                made = self._prepared(made)
                is_plain = type(made) is socket.socket
                self._all.append(_Stranger(made, _SILENT_S if is_plain else self._tls_s))

    def read(self, ready: set[int], wanted: int) -> list[tuple[bytes, socket.socket]]:
        """Return those that have said so many bytes by now, and which; close those that do not.

        Something has come at the file descriptors that are ready.
        """
        found, left, now_s = [], [], time.monotonic()
        for each in self._all:
            is_new = each.until_s == inf
            is_silent = not is_new and each.made.fileno() not in ready
            try:
                is_known = not is_silent and each.read(wanted)
            except BlockingIOError:
                is_silent, is_known = True, False
            if is_known:
                found.append((bytes(each.said), each.made))
            elif is_silent and now_s < each.until_s:
                left.append(each)
            else:
                each.made.close()
        self._all = left
        return found

    def close(self) -> None:
        """Close them all."""
        for each in self._all:
            each.made.close()


def is_of_this_user(made: socket.socket) -> bool:
    """Return whether a process of this user is at the other end; yes if that is another host."""
    if made.family != socket.AF_UNIX:
        return True
    said = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(said)[1] == os.geteuid())
