"""Where a member's links begin: memory for its process, a Unix socket for its host, TCP or TLS.

An endpoint gives streams that are connected and do not block; `meeting` finds out the member at the
other end. A connection between hosts may be cut, and neither end notices. The kernel asks an idle
peer now and then; `is_lost` returns whether a peer answers that is to take bytes. It is not a
time-out: a peer that computes for long answers all the same, and `TCP_USER_TIMEOUT` would end its
connection.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from dask_p2p.backends.hardware import kernel_and_namespace
from dask_p2p.errors import SectionError
from dask_p2p.sections.files import check_files
from dask_p2p.sections.in_process import Bell, Stream, pair
from dask_p2p.sections.strangers import Strangers, is_of_this_user

_CONNECT_S = 10.0
_SOCKET_BYTES = 1 << 20  # that the kernel buffers, where it lets us
_QUEUED = 4096  # connections that the kernel keeps waiting
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds
_PROBES = 3  # without an answer, before the kernel ends a connection
# In Linux' struct tcp_info: how often what was sent last has been sent again, and milliseconds
# since the last answer.
_RETRANSMITS, _PROBES_OUT, _LAST_ACK_RECV = slice(2, 3), slice(3, 4), slice(56, 60)
_TCP_INFO_BYTES = 60


@dataclass(frozen=True)
class Reach:
    """How members of a worker and those on other hosts reach each other."""

    host: str = ""  # name or number of this one; empty if no connection may leave it
    listening: ssl.SSLContext | None = None  # where connections between hosts are encrypted
    connecting: ssl.SSLContext | None = None
    timeout_s: float = 30.0  # without an answer, after which such a connection is lost
    uses_ucx: bool = False  # for large messages, to members that do

    @property
    def protocol(self) -> str:
        """Name how connections between hosts are made."""
        return "none" if not self.host else "tcp" if self.connecting is None else "tls"


class TlsSocket(ssl.SSLSocket):
    """A TLS socket that raises what others raise where it would have to wait.

    Its first messages take a handshake, for which it waits as for anything else.
    """

    send_event = select.POLLOUT  # for which the next `sendmsg` waits

    def sendmsg(self, buffers, *args):  # type: ignore[no-untyped-def, override]
        try:
            return self.send(buffers[0])
        except ssl.SSLWantReadError:
            self.send_event = select.POLLIN
            raise BlockingIOError from None
        except ssl.SSLWantWriteError:
            self.send_event = select.POLLOUT
            raise BlockingIOError from None

    def recv_into(self, buffer, nbytes=None, flags=0):  # type: ignore[no-untyped-def]
        try:
            return super().recv_into(buffer, nbytes, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if self.version() is not None:  # reading may have ended the handshake
                self.send_event = select.POLLOUT
            raise BlockingIOError from None


class Endpoint:
    """What listens for the links of a member, and begins them."""

    _here: ClassVar[dict[str, Endpoint]] = {}  # those of this process, by their texts

    def __init__(self, reach: Reach, bell: Bell) -> None:  # of its worker; what wakes its member
        self._reach, self._bell = reach, bell
        self._lock = threading.Lock()
        self._callers: deque[tuple[bytes, Stream]] | None = deque()  # None: it is closed
        self._strangers: list[Strangers] = []  # of each listener
        #: What others need to know to begin a link.
        self.text = ""
        try:
            self.text = self._listen(reach)
        except BaseException:
            self.close()
            raise
        self._here[self.text] = self

    def _listen(self, reach: Reach) -> str:
        """Begin to listen; return where."""
        port = 0
        try:
            unix = self._listener(socket.socket(socket.AF_UNIX))
            unix.bind("")  # to a name that the kernel makes: no file, and gone with the process
            unix.listen(_QUEUED)
            if reach.host:
                tcp = self._listener(_bound(reach.host))
                tcp.listen(_QUEUED)
                port = tcp.getsockname()[1]
        except OSError as exc:
            check_files(exc)
            raise
        ucx, name = "ucx" if reach.uses_ucx else "-", unix.getsockname().hex()
        host = reach.host or "-"
        return f"{_kernel_and_network()} {ucx} {_user()} {name} {reach.protocol} {host} {port}"

    def _listener(self, made: socket.socket) -> socket.socket:
        made.setblocking(False)
        self._strangers.append(Strangers(made, self._accepted, self._reach.timeout_s))
        return made

    @property
    def numbers(self) -> list[int]:
        """File descriptors to poll, for `accepted`."""
        return [number for each in self._strangers for number in each.numbers]

    @property
    def patience_s(self) -> float:
        """How long to wait for something there, at most, before `accepted` is called again."""
        return 0.0 if self._callers else min(each.patience_s for each in self._strangers)

    def is_here(self, endpoint: str) -> bool:
        """Return whether another member's endpoint is in this process."""
        return host_of(endpoint) == host_of(self.text) and endpoint in self._here

    def close(self) -> None:
        """Listen no more."""
        with self._lock:
            callers, self._callers = self._callers, None
        for _, stream in callers or ():
            stream.close()
        for each in self._strangers:
            each.close()
        self._here.pop(self.text, None)

    def stream_to(self, endpoint: str, said: bytes) -> Stream | None:
        """Return a stream to another member's endpoint, which gets some bytes as the first ones.

        None if it is in no member of this process.
        """
        other = self._here.get(endpoint) if self.is_here(endpoint) else None
        if other is None:
            return None
        own, far = pair(self._bell, other._bell)
        with other._lock:
            if other._callers is None:
                return None
            other._callers.append((said, far))
        other._bell.ring()
        return own

    def connect(self, endpoint: str, worker: str, most_s: float = _CONNECT_S) -> socket.socket:
        """Return a socket to another member's endpoint, on a worker, within so many seconds.

        `OSError` if it cannot be reached, `SectionError` if it must not be.
        """
        kernel, _, user, name, protocol, host, port = endpoint.split()
        try:
            if kernel == _kernel_and_network() and user == _user():
                return self._prepared(_connected(bytes.fromhex(name), most_s), None)
            if protocol != self._reach.protocol or protocol == "none":
                raise SectionError(
                    f"expected TCP, or TLS at both ends, between members on different hosts, got "
                    f"{self._reach.protocol} here and {protocol} on {worker}. Give the workers a "
                    f"certificate and a CA file where encryption is required."
                )
            timeout_s = min(most_s, self._reach.timeout_s)
            made = socket.create_connection((host, int(port)), timeout_s)
        except OSError as exc:
            check_files(exc)
            raise
        return self._prepared(made, self._reach.connecting)

    def accepted(self, ready: set[int], wanted: int) -> list[tuple[bytes, socket.socket | Stream]]:
        """Take new connections; return those that have sent so many bytes by now, and these.

        `ready` are those of `numbers` with something to read. `SectionError` if this process
        cannot have any more connections.
        """
        found: list[tuple[bytes, socket.socket | Stream]] = []
        while self._callers:
            found.append(self._callers.popleft())
        for strangers in self._strangers:
            found += strangers.accepted(ready, wanted)
        return found

    def _accepted(self, made: socket.socket) -> socket.socket:
        is_local = made.family == socket.AF_UNIX
        return self._prepared(made, None if is_local else self._reach.listening, is_server=True)

    def _prepared(
        self, made: socket.socket, context: ssl.SSLContext | None, is_server: bool = False
    ) -> socket.socket:
        made.setblocking(False)
        with suppress(OSError):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        if made.family != socket.AF_UNIX:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, share in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2 * _PROBES)):
                seconds = max(1, int(self._reach.timeout_s / share))
                made.setsockopt(socket.IPPROTO_TCP, option, seconds)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        if context is None:
            return made
        context.sslsocket_class = TlsSocket
        return context.wrap_socket(made, server_side=is_server, do_handshake_on_connect=False)


def _connected(name: bytes, most_s: float) -> socket.socket:
    """Return a socket that is connected to a Unix socket of this user."""
    made = socket.socket(socket.AF_UNIX)
    try:
        # For so long the kernel waits for one whose queue is full.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(most_s), 0))
        made.connect(name)
        if not is_of_this_user(made):
            raise ConnectionRefusedError("another user's process has taken the place of the member")
    except BaseException:
        made.close()
        raise
    return made


def host_of(endpoint: str) -> str:
    """Return what members of one host have in common, of an endpoint's text."""
    return endpoint.split()[0]


def uses_ucx(endpoint: str) -> bool:
    """Return whether a member uses UCX, of its endpoint's text."""
    return endpoint.split()[1] == "ucx"


def is_lost(made: socket.socket | Stream, timeout_s: float) -> bool:
    """Tell whether a peer on another host should have answered, and has not for so long."""
    if isinstance(made, Stream) or made.family == socket.AF_UNIX:
        return False
    info = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    unanswered = max(info[_RETRANSMITS][0], info[_PROBES_OUT][0])
    since_s = int.from_bytes(info[_LAST_ACK_RECV], "little") / 1000
    return unanswered > 1 and since_s >= timeout_s  # the last one may be on its way


def _bound(host: str) -> socket.socket:
    """Return a socket that is reached under a name, or if that is another host's here at all."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = found[0]
    made = socket.socket(family)
    try:
        made.bind(address)
    except OSError:
        made.bind(("", 0))  # the worker has a contact address, which leads here
    return made


def _kernel_and_network() -> str:
    """Name this kernel and its network, to which names of Unix sockets belong."""
    return f"{kernel_and_namespace()[0]}/{os.stat('/proc/self/ns/net').st_ino}"


@cache
def _user() -> str:
    """Name the user of this process, and the namespace of that number."""
    return f"{os.geteuid()}/{os.stat('/proc/self/ns/user').st_ino}"
