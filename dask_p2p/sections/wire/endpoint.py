"""Endpoints of ranks: how they are reached, by memory, a Unix socket, TCP or TLS.

The ranks of a process share one acceptor. Its threads block: they check the user at the other end
of a Unix socket, shake hands by TLS, receive the attempt tokens, and hand the connection to its
rank. Ranks of one process connect by memory, ranks of one host by Unix sockets.

The rank that needs a connection first makes it. If two ranks connect to each other at the same
time, the connection of the lower one stays: the higher rank asks whether its connection is taken.

A connection between hosts may be lost without a report to either end. The kernel probes an idle
peer now and then, and `is_lost` checks a peer that has bytes to receive. This is not a time-out of
messages: a peer that computes for long still answers, but `TCP_USER_TIMEOUT` would end its
connection.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar
from uuid import uuid4

from dask_p2p.backends.host import kernel_and_namespace
from dask_p2p.errors import SectionError
from dask_p2p.sections.wire.connection import Connection
from dask_p2p.sections.wire.streams import Bell, Stream, check_files, explain_files, pair

_CONNECT_S = 10.0
_SOCKET_BYTES = 1 << 20  # send buffer in the kernel, if it allows so much
_QUEUED = 4096  # connections that the kernel keeps waiting
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds
_CREDENTIALS = struct.Struct("3i")  # Linux' struct ucred: process, user, group
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
    endpoint: str  # its address for connections: `Endpoint.text`


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


class Endpoint:
    """Address of one rank in one attempt, and the connections that other ranks have made."""

    def __init__(self, reach: Reach) -> None:  # of its worker
        #: Attempt token: a secret of the gang, which identifies the rank to others.
        self.token = uuid4().hex
        #: Wakes the rank's thread.
        self.bell = Bell()
        self._reach = reach
        self._lock = threading.Lock()
        self._met = set[str]()  # tokens of the ranks that a connection exists to, or soon will
        self._arrived: deque[tuple[str, socket.socket | Stream]] | None = deque()  # None: closed
        self._failure: OSError | None = None  # of the acceptor
        with ExitStack() as stack, explain_files():
            stack.callback(self.bell.close)
            self._acceptor = Acceptor.add(self, reach)
            stack.pop_all()
        ucx = "ucx" if reach.uses_ucx else "-"
        #: Address for the connections of other ranks.
        self.text = (
            f"{_kernel_and_network()} {ucx} {_user()} {self._acceptor.unix_name.hex()} "
            f"{reach.protocol} {reach.host or '-'} {self._acceptor.port}"
        )

    def close(self) -> None:
        self._acceptor.remove(self)
        with self._lock:
            arrived, self._arrived = self._arrived, None
        for _, stream in arrived or ():
            stream.close()
        self.bell.close()

    def is_here(self, endpoint: str) -> bool:
        """Return whether the rank of an endpoint runs in this process."""
        host, _, _, unix_name, *_ = endpoint.split()
        return (host, unix_name) == (host_of(self.text), self._acceptor.unix_name.hex())

    def meet(self, token: str) -> bool:
        """Return True for the first connection with a rank: the one that stays. Thread-safe."""
        with self._lock:
            is_first = token not in self._met
            self._met.add(token)
            return is_first

    def connect(self, peer: RankAddress, asks: bool) -> Connection:
        """Return a new connection to another rank. If it `asks`, the first byte is the answer.

        Raises `OSError` if the rank cannot be reached. Raises `SectionError` if the two hosts have
        no protocol in common, or too many files are open here.
        """
        if self.is_here(peer.endpoint):
            if (other := self._acceptor.ranks.get(peer.token)) is None:
                raise ConnectionRefusedError("the rank has ended")
            near_end, far_end = pair(self.bell, other.bell)
            other.take(self.token, far_end, asks)
            return Connection(near_end)
        preamble = f"{self.token}{peer.token}{'?' if asks else '.'}".encode()
        return Connection(self._socket_to(peer), [memoryview(preamble)])

    def _socket_to(self, peer: RankAddress) -> socket.socket:
        kernel, _, user, unix_name, protocol, host, port = peer.endpoint.split()
        reach = self._reach
        with explain_files():
            if kernel == host_of(self.text) and user == _user():
                return _set_options(_connect_unix(bytes.fromhex(unix_name)), reach.timeout_s)
            if protocol != reach.protocol or protocol == "none":
                raise SectionError(
                    f"expected TCP, or TLS at both ends, between ranks on different hosts, got "
                    f"{reach.protocol} here and {protocol} on {peer.worker}. Give the workers a "
                    f"certificate and a CA file where encryption is required."
                )
            timeout_s = min(_CONNECT_S, reach.timeout_s)
            connected = socket.create_connection((host, int(port)), timeout_s)
        _set_options(connected, reach.timeout_s)
        return connected if reach.connecting is None else _with_tls(connected, reach.connecting)

    def take(self, token: str, stream: socket.socket | Stream, asks: bool) -> None:
        """Take a connection that another rank has made, unless this rank makes one. Any thread."""
        is_first = self.meet(token)
        if asks:
            stream.send(TAKEN if is_first else CROSSED)
        with self._lock:
            if is_first and self._arrived is not None:
                if isinstance(stream, socket.socket):
                    _set_options(stream, self._reach.timeout_s)
                self._arrived.append((token, stream))
                self.bell.ring()
                return
        stream.close()

    def arrivals(self) -> list[tuple[str, socket.socket | Stream]]:
        """Return the connections that other ranks have made, with the tokens of these ranks.

        Raises `SectionError` if this process cannot accept connections.
        """
        if self._failure is not None:
            check_files(self._failure)
            raise SectionError(f"a rank cannot accept connections: {self._failure}")
        arrived = self._arrived
        return [arrived.popleft() for _ in range(len(arrived))] if arrived else []

    def fail(self, failure: OSError) -> None:
        """Make the rank raise an error of its acceptor. Any thread may call this."""
        self._failure = failure
        self.bell.ring()


def host_of(endpoint: str) -> str:
    """Return the part of an endpoint's text that is the same for all ranks of a host."""
    return endpoint.split()[0]


def uses_ucx(endpoint: str) -> bool:
    """Return whether a rank uses UCX, from its endpoint's text."""
    return endpoint.split()[1] == "ucx"


#: Answers to a rank that asks whether its connection is taken, or crosses one of the other rank.
TAKEN, CROSSED = b"+", b"-"
_TOKEN_BYTES = 32
_PREAMBLE_BYTES = 2 * _TOKEN_BYTES + 1  # tokens of both ranks, and whether the first one asks
# Any process of the host or of the network can connect. Ranks send their tokens immediately.
_SILENT_S = 5.0  # longest silence of a connection without attempt tokens
_MOST_UNIDENTIFIED = 64  # most of these at a listener; the kernel queues further ones
_RETRY_S = 0.1  # after an error
# Errors of `accept` that come again at each retry. Others are those of a peer or of the network:
# see accept(2).
_OF_PROCESS = {errno.EBADF, errno.EINVAL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Accepts the connections of all ranks of this process, as long as there are ranks."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _running: ClassVar[dict[Any, Acceptor]] = {}  # by host and TLS settings

    def __init__(self, reach: Reach) -> None:
        self.ranks: dict[str, Endpoint] = {}  # by token
        self._key, self._is_closed = (reach.host, reach.listening), False
        with ExitStack() as stack:
            unix = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listeners = [unix]
            unix.bind("")  # a name from the kernel: no file, and gone with the process
            self.unix_name, self.port = unix.getsockname(), 0
            if reach.host:
                self._listeners.append(stack.enter_context(_bound(reach.host)))
                self.port = self._listeners[1].getsockname()[1]
            for listener in self._listeners:
                listener.listen(_QUEUED)
            stack.pop_all()
        for listener in self._listeners:
            is_local = listener.family == socket.AF_UNIX
            _start_thread(self._accept, listener, None if is_local else reach.listening)

    @classmethod
    def add(cls, rank: Endpoint, reach: Reach) -> Acceptor:
        """Accept connections of a rank, from now on; return its acceptor."""
        with cls._lock:
            acceptor = cls._running.get((reach.host, reach.listening)) or cls(reach)
            cls._running[acceptor._key] = acceptor
            acceptor.ranks[rank.token] = rank
            return acceptor

    def remove(self, rank: Endpoint) -> None:
        with self._lock:
            self.ranks.pop(rank.token, None)
            if self.ranks or self._is_closed:
                return
            self._is_closed = True
            self._running.pop(self._key, None)
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends its thread, which closes it

    def _accept(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        unidentified = threading.Semaphore(_MOST_UNIDENTIFIED)
        with listener:
            while True:
                unidentified.acquire()
                try:
                    accepted, _ = listener.accept()
                except OSError as exc:
                    unidentified.release()
                    if self._is_closed:
                        return
                    if exc.errno in _OF_PROCESS:
                        for rank in [*self.ranks.values()]:
                            rank.fail(exc)
                    time.sleep(_RETRY_S)
                    continue
                _start_thread(self._identify, accepted, context, unidentified)

    def _identify(
        self,
        accepted: socket.socket,
        context: ssl.SSLContext | None,
        unidentified: threading.Semaphore,
    ) -> None:
        """Hand a connection to its rank, or close it."""
        try:
            accepted.settimeout(_SILENT_S)
            if not is_of_this_user(accepted):
                raise ConnectionRefusedError("another user's process")
            if context is not None:
                accepted = _with_tls(accepted, context, is_server=True)
            preamble = bytearray()
            while missing := _PREAMBLE_BYTES - len(preamble):
                if not (part := accepted.recv(missing)):
                    raise ConnectionResetError("closed by the peer")
                preamble += part
            tokens = preamble.decode("latin-1")  # Python opens files for other names of the codec
            peer_token, token = tokens[:_TOKEN_BYTES], tokens[_TOKEN_BYTES:-1]
            if (rank := self.ranks.get(token)) is None:  # of another attempt
                raise ConnectionRefusedError("no rank of this process")
            rank.take(peer_token, accepted, preamble.endswith(b"?"))
        except OSError:  # for example, a certificate of another cluster
            accepted.close()
        finally:
            unidentified.release()


def _start_thread(function: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=function, args=args, name="dask-p2p-accept", daemon=True).start()


class TlsSocket(ssl.SSLSocket):
    """A TLS socket that raises `BlockingIOError` when it would block, like other sockets.

    The handshake of the rank that connects is part of its first messages, and does not block.
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


def _with_tls(
    peer_socket: socket.socket, context: ssl.SSLContext, is_server: bool = False
) -> socket.socket:
    context.sslsocket_class = TlsSocket
    return context.wrap_socket(peer_socket, is_server, do_handshake_on_connect=is_server)


def _set_options(peer_socket: socket.socket, timeout_s: float) -> socket.socket:
    """Prepare a connection between ranks, which does not block; return it."""
    peer_socket.setblocking(False)
    with suppress(OSError):
        peer_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    if peer_socket.family != socket.AF_UNIX:
        peer_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, share in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2 * _PROBES)):
            peer_socket.setsockopt(socket.IPPROTO_TCP, option, max(1, int(timeout_s / share)))
        peer_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    return peer_socket


def _connect_unix(name: bytes) -> socket.socket:
    with ExitStack() as stack:
        client_socket = stack.enter_context(socket.socket(socket.AF_UNIX))
        # Longest wait of the kernel for a listener with a full queue.
        wait = _TIMEVAL.pack(int(_CONNECT_S), 0)
        client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        client_socket.connect(name)
        if not is_of_this_user(client_socket):
            raise ConnectionRefusedError("another user's process listens in place of the rank")
        stack.pop_all()
    return client_socket


def is_of_this_user(peer_socket: socket.socket) -> bool:
    """Return whether the peer process belongs to this user; True for TCP."""
    if peer_socket.family != socket.AF_UNIX:
        return True
    received = peer_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(received)[1] == os.geteuid())


def is_lost(peer_socket: socket.socket | Stream, timeout_s: float) -> bool:
    """Return whether a peer on another host owes an answer, and has sent none for `timeout_s`."""
    if isinstance(peer_socket, Stream) or peer_socket.family == socket.AF_UNIX:
        return False
    info = peer_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    unanswered = max(info[_RETRANSMITS][0], info[_PROBES_OUT][0])
    since_s = int.from_bytes(info[_LAST_ACK_RECV], "little") / 1000
    return unanswered > 1 and since_s >= timeout_s  # one answer may be in flight


def _bound(host: str) -> socket.socket:
    """Return a socket bound to a host name, or to all interfaces if that name is not local."""
    addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = addresses[0]
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
