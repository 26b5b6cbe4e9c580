"""Endpoints of a rank's connections: by memory, a Unix socket, TCP or TLS.

Ranks of one process connect by memory, ranks of one host by Unix sockets. An endpoint returns
connected streams that do not block; `connection_setup` identifies the rank at the other end.

A connection between hosts may be lost without a report to either end. The kernel probes an idle
peer now and then, and `is_lost` checks a peer that has bytes to receive. This is not a time-out of
messages: a peer that computes for long still answers, but `TCP_USER_TIMEOUT` would end its
connection.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import ClassVar

from dask_p2p.backends.host import kernel_and_namespace
from dask_p2p.errors import SectionError, TransferError
from dask_p2p.sections.wire.connection import Connection
from dask_p2p.sections.wire.streams import (
    Bell,
    Strangers,
    Stream,
    check_files,
    is_of_this_user,
    pair,
    reserve_files,
)

_CONNECT_S = 10.0
_SOCKET_BYTES = 1 << 20  # send buffer in the kernel, if it allows so much
_QUEUED = 4096  # connections that the kernel keeps waiting
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds
_PROBES = 3  # unanswered ones, before the kernel ends a connection
# Fields of Linux' struct tcp_info: retransmissions of the last segment, unanswered probes, and
# milliseconds since the last answer.
_RETRANSMITS, _PROBES_OUT, _LAST_ACK_RECV = slice(2, 3), slice(3, 4), slice(56, 60)
_TCP_INFO_BYTES = 60


@dataclass(frozen=True)
class RankAddress:
    """One rank of the gang, this rank included."""

    worker: str  # address of its worker
    token: str  # its attempt token: a secret of the gang
    endpoint: str  # address of its listeners: `Connections.endpoint`


@dataclass(frozen=True)
class Reach:
    """Connections between a worker's ranks and those on other hosts."""

    host: str = ""  # name or address of this host; empty if no connection may leave it
    listening: ssl.SSLContext | None = None  # if connections between hosts are encrypted
    connecting: ssl.SSLContext | None = None
    timeout_s: float = 30.0  # longest time without an answer on such a connection
    uses_ucx: bool = False  # for large messages, to ranks that use it too

    @property
    def protocol(self) -> str:
        return "none" if not self.host else "tcp" if self.connecting is None else "tls"


class TlsSocket(ssl.SSLSocket):
    """A TLS socket that raises `BlockingIOError` when it would block, like other sockets.

    The handshake is part of its first messages, and does not block either.
    """

    send_event = select.POLLOUT  # event that the next `sendmsg` waits for

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
            if self.version() is not None:  # reading may have completed the handshake
                self.send_event = select.POLLOUT
            raise BlockingIOError from None


class Endpoint:
    """Listens for the connections of a rank, and opens them."""

    _here: ClassVar[dict[str, Endpoint]] = {}  # endpoints of this process, by `text`

    def __init__(self, reach: Reach, bell: Bell) -> None:  # the worker's reach; the rank's bell
        self._reach, self._bell = reach, bell
        self._lock = threading.Lock()
        self._callers: deque[tuple[bytes, Stream]] | None = deque()  # None: closed
        self._strangers: list[Strangers] = []  # one for each listener
        #: Address for other ranks' connections.
        self.text = ""
        try:
            self.text = self._listen(reach)
        except BaseException:
            self.close()
            raise
        self._here[self.text] = self

    def _listen(self, reach: Reach) -> str:
        port = 0
        try:
            unix = self._listener(socket.socket(socket.AF_UNIX))
            unix.bind("")  # a name from the kernel: no file, and gone with the process
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

    def _listener(self, listener: socket.socket) -> socket.socket:
        listener.setblocking(False)
        self._strangers.append(Strangers(listener, self._accepted, self._reach.timeout_s))
        return listener

    @property
    def numbers(self) -> list[int]:
        return [number for strangers in self._strangers for number in strangers.numbers]

    @property
    def patience_s(self) -> float:
        """Longest time to poll before `accepted` is called again."""
        return 0.0 if self._callers else min(strangers.patience_s for strangers in self._strangers)

    def is_here(self, endpoint: str) -> bool:
        return host_of(endpoint) == host_of(self.text) and endpoint in self._here

    def close(self) -> None:
        with self._lock:
            callers, self._callers = self._callers, None
        for _, stream in callers or ():
            stream.close()
        for strangers in self._strangers:
            strangers.close()
        self._here.pop(self.text, None)

    def stream_to(self, endpoint: str, preamble: bytes) -> Stream | None:
        """Return a stream to another rank's endpoint, with `preamble` as its first bytes.

        It is None if the endpoint is not in this process, or closed.
        """
        other = self._here.get(endpoint) if self.is_here(endpoint) else None
        if other is None:
            return None
        own, far = pair(self._bell, other._bell)
        with other._lock:
            if other._callers is None:
                return None
            other._callers.append((preamble, far))
        other._bell.ring()
        return own

    def connect(self, endpoint: str, worker: str, most_s: float = _CONNECT_S) -> socket.socket:
        """Return a socket to another rank's endpoint on a worker, within `most_s` seconds.

        Raises `OSError` if the endpoint cannot be reached. Raises `SectionError` if the two hosts
        have no protocol in common, or too many files are open here.
        """
        kernel, _, user, name, protocol, host, port = endpoint.split()
        try:
            if kernel == _kernel_and_network() and user == _user():
                return self._prepared(_connected(bytes.fromhex(name), most_s), None)
            if protocol != self._reach.protocol or protocol == "none":
                raise SectionError(
                    f"expected TCP, or TLS at both ends, between ranks on different hosts, got "
                    f"{self._reach.protocol} here and {protocol} on {worker}. Give the workers a "
                    f"certificate and a CA file where encryption is required."
                )
            timeout_s = min(most_s, self._reach.timeout_s)
            connected = socket.create_connection((host, int(port)), timeout_s)
        except OSError as exc:
            check_files(exc)
            raise
        return self._prepared(connected, self._reach.connecting)

    def accepted(self, ready: set[int], wanted: int) -> list[tuple[bytes, socket.socket | Stream]]:
        """Accept new connections; return those that have sent `wanted` bytes, with these bytes.

        `ready` contains the readable file descriptors of `numbers`. Raises `SectionError` if this
        process cannot have more connections.
        """
        found: list[tuple[bytes, socket.socket | Stream]] = []
        while self._callers:
            found.append(self._callers.popleft())
        for strangers in self._strangers:
            found += strangers.accepted(ready, wanted)
        return found

    def _accepted(self, accepted: socket.socket) -> socket.socket:
        is_local = accepted.family == socket.AF_UNIX
        return self._prepared(accepted, None if is_local else self._reach.listening, is_server=True)

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
    client_socket = socket.socket(socket.AF_UNIX)
    try:
        # Longest wait of the kernel for a listener with a full queue.
        client_socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(most_s), 0)
        )
        client_socket.connect(name)
        if not is_of_this_user(client_socket):
            raise ConnectionRefusedError("another user's process listens in place of the rank")
    except BaseException:
        client_socket.close()
        raise
    return client_socket


def host_of(endpoint: str) -> str:
    """Return the part of an endpoint's text that is the same for all ranks of a host."""
    return endpoint.split()[0]


def uses_ucx(endpoint: str) -> bool:
    """Return whether a rank uses UCX, from its endpoint's text."""
    return endpoint.split()[1] == "ucx"


def is_lost(made: socket.socket | Stream, timeout_s: float) -> bool:
    """Return whether a peer on another host owes an answer, and has sent none for `timeout_s`."""
    if isinstance(made, Stream) or made.family == socket.AF_UNIX:
        return False
    info = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    unanswered = max(info[_RETRANSMITS][0], info[_PROBES_OUT][0])
    since_s = int.from_bytes(info[_LAST_ACK_RECV], "little") / 1000
    return unanswered > 1 and since_s >= timeout_s  # one answer may be in flight


def _bound(host: str) -> socket.socket:
    """Return a socket bound to a host name, or to all interfaces if that name is not local."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = found[0]
    listener = socket.socket(family)
    try:
        listener.bind(address)
    except OSError:
        listener.bind(("", 0))  # the name is a contact address that leads here
    return listener


def _kernel_and_network() -> str:
    """Return an identifier of this kernel and network: the scope of Unix socket names."""
    return f"{kernel_and_namespace()[0]}/{os.stat('/proc/self/ns/net').st_ino}"


@cache
def _user() -> str:
    return f"{os.geteuid()}/{os.stat('/proc/self/ns/user').st_ino}"


# Connection set-up: the lower rank connects, and sends both attempt tokens.
#
# So two ranks never have two connections. The lower rank does not connect if it calls something
# else, or if its function has returned. The higher rank, which waits, then *knocks*: it connects,
# sends both tokens, and closes that connection. A knock makes the lower rank connect.

_KNOCK_S = 0.5  # time that a rank waits for a lower one before it knocks
_AT_DOOR_S = 1.0  # timeout of a knock's connection


class ConnectionSetup:
    """Makes and accepts the connections of one rank."""

    def __init__(self, reach: Reach) -> None:  # network settings of its worker
        #: Wakes the rank's thread.
        self.bell = Bell()
        try:
            self._endpoint = Endpoint(reach, self.bell)
        except BaseException:
            self.bell.close()
            raise
        self.endpoint = self._endpoint.text
        #: Knocks with tokens still to send, by file descriptor.
        self._knocks: dict[int, Connection] = {}
        self._knocked = set[int]()  # ranks that got a knock in this attempt: one at most
        self._knock_s = inf  # time of the next knock; infinite until a rank is missed

    def start(self, rank: int, peers: Sequence[RankAddress]) -> None:
        """Begin an attempt, with the attempt tokens and addresses of all ranks."""
        self._rank, self._peers, self._own = rank, peers, peers[rank]
        self._ranks = {peer.token: rank for rank, peer in enumerate(peers)}
        self._is_here = [self._endpoint.is_here(peer.endpoint) for peer in peers]

    @property
    def has_company(self) -> bool:
        return sum(self._is_here) > 1

    def reserve_files(self) -> None:
        """Raise the limit of open files for all connections; `SectionError` if not permitted."""
        here = sum(self._is_here)
        reserve_files(here, len(self._is_here) - here)

    def close(self) -> None:
        self._endpoint.close()
        for knock in self._knocks.values():
            knock.close()
        self.bell.close()

    def connect(self, rank: int, **most_s: float) -> Connection:
        """Return a connection to a rank. Raises `OSError` if the rank cannot be reached."""
        peer = self._peers[rank]
        tokens = f"{self._own.token}{peer.token}".encode()
        if (stream := self._endpoint.stream_to(peer.endpoint, tokens)) is not None:
            return Connection(stream)
        made = self._endpoint.connect(peer.endpoint, peer.worker, **most_s)
        return Connection(made, [memoryview(tokens)])

    def begin(self) -> None:
        self._knock_s = inf

    def register(self, poll: select.poll, missing: Iterable[int]) -> float:
        """Register descriptors to poll for `callers`; return the longest time to poll, in seconds.

        `missing` are ranks without a connection. Lower ones are expected to connect.
        """
        missing = [rank for rank in missing if rank < self._rank and rank not in self._knocked]
        left_s = inf
        if missing:
            now_s = time.monotonic()
            self._knock_s = min(self._knock_s, now_s + _KNOCK_S)
            left_s = self._knock_s - now_s
        if left_s <= 0.0:
            for rank in missing:
                self._knock(rank)
            left_s = inf
        for number in self._endpoint.numbers:
            poll.register(number, select.POLLIN)
        for number, knock in self._knocks.items():
            poll.register(number, knock.events)
        return min(left_s, self._endpoint.patience_s)

    def _knock(self, rank: int) -> None:
        self._knocked.add(rank)
        with suppress(OSError):  # the rank is lost, which the scheduler will notice
            knock = self.connect(rank, most_s=_AT_DOOR_S)
            if isinstance(knock.socket, Stream):
                knock.close()  # the tokens have arrived
            else:
                self._knocks[knock.socket.fileno()] = knock

    def _show_tokens(self, ready: set[int]) -> None:
        for number in ready & self._knocks.keys():
            try:
                is_done = self._knocks[number].send()
            except (OSError, TransferError):
                is_done = True  # the rank is lost, as above
            if is_done:
                self._knocks.pop(number).close()

    def callers(self, ready: set[int]) -> list[tuple[int, Connection | None]]:
        """Accept new connections; return their ranks with the connections. A knock has None."""
        self._show_tokens(ready)
        found: list[tuple[int, Connection | None]] = []
        length = len(self._own.token)
        for received, stream in self._endpoint.accepted(ready, 2 * length):
            theirs, own = received[:length].decode("latin"), received[length:].decode("latin")
            rank = self._ranks.get(theirs)
            if own == self._own.token and rank is not None and rank < self._rank:
                found.append((rank, Connection(stream)))
                continue
            stream.close()  # a knock, a rank of another attempt, or no rank at all
            if own == self._own.token and rank is not None and rank > self._rank:
                found.append((rank, None))
        return found
