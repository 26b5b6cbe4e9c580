"""Where a member's links begin: a Unix socket for its host, and TCP or TLS for others.

An endpoint gives sockets that are connected and do not block; whose they are, `links` finds out. A
connection between hosts may be cut without either end hearing of it. The kernel asks an idle peer
now and then; `is_lost` tells whether one answers that is to take something. It is no time-out: a
peer that computes for long answers all the same, and `TCP_USER_TIMEOUT` would end its connection.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass

from dask_p2p.backends.hardware import kernel_and_namespace
from dask_p2p.errors import SectionError

_CONNECT_S = 10.0
_SOCKET_BYTES = 1 << 20  # that the kernel buffers, where it lets us
_MOST_STRANGERS = 1000  # connections that have not said yet whose they are
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

    def __init__(self, reach: Reach) -> None:  # of its worker
        self._reach = reach
        self._strangers: dict[int, tuple[socket.socket, bytearray]] = {}  # by file descriptor
        unix = socket.socket(socket.AF_UNIX)
        unix.bind("")  # to a name that the kernel makes: no file, and gone with the process
        name = unix.getsockname().hex()
        self._listeners = [unix]
        port = 0
        if reach.host:
            self._listeners.append(_bound(reach.host))
            port = self._listeners[-1].getsockname()[1]
        for listener in self._listeners:
            listener.listen(4096)
            listener.setblocking(False)
        #: What others need to know to begin a link.
        self.text = " ".join(
            (
                _kernel_and_network(),
                "ucx" if reach.uses_ucx else "-",
                name,
                reach.protocol,
                reach.host or "-",
                str(port),
            )
        )

    @property
    def numbers(self) -> list[int]:
        """File descriptors at which something comes for `accepted`."""
        return [*(each.fileno() for each in self._listeners), *self._strangers]

    def close(self) -> None:
        """Listen no more."""
        for each in (*self._listeners, *(stranger for stranger, _ in self._strangers.values())):
            each.close()

    def connect(self, endpoint: str, worker: str) -> socket.socket:
        """Return a socket to another member's endpoint, on a worker.

        `OSError` if it cannot be reached, `SectionError` if it must not be.
        """
        kernel, _, name, protocol, host, port = endpoint.split()
        if kernel == _kernel_and_network():
            made = socket.socket(socket.AF_UNIX)
            try:
                made.settimeout(_CONNECT_S)
                made.connect(bytes.fromhex(name))
            except BaseException:
                made.close()
                raise
            return self._prepared(made, None)
        if protocol != self._reach.protocol or protocol == "none":
            raise SectionError(
                f"expected TCP, or TLS at both ends, between members on different hosts, got "
                f"{self._reach.protocol} here and {protocol} on {worker}. Give the workers a "
                f"certificate and a CA file where encryption is required."
            )
        timeout_s = min(_CONNECT_S, self._reach.timeout_s)
        made = socket.create_connection((host, int(port)), timeout_s)
        return self._prepared(made, self._reach.connecting)

    def accepted(self, ready: set[int], wanted: int) -> list[tuple[bytes, socket.socket]]:
        """Take new connections; return those that have said so many bytes by now, and what.

        Of `numbers` something has come at those that are ready.
        """
        for listener in self._listeners:
            if listener.fileno() in ready:
                with suppress(OSError):  # it has gone meanwhile
                    stranger, _ = listener.accept()
                    is_local = stranger.family == socket.AF_UNIX
                    context = None if is_local else self._reach.listening
                    stranger = self._prepared(stranger, context, is_server=True)
                    self._strangers[stranger.fileno()] = (stranger, bytearray())
                    if len(self._strangers) > _MOST_STRANGERS:
                        self._strangers.pop(next(iter(self._strangers)))[0].close()
        found = []
        for number in ready & self._strangers.keys():
            stranger, said = self._strangers[number]
            with suppress(BlockingIOError):
                is_open = _heard(stranger, said, wanted)
                del self._strangers[number]
                if is_open:
                    found.append((bytes(said), stranger))
                else:
                    stranger.close()
        return found

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


def host_of(endpoint: str) -> str:
    """Return what members of one host have in common, of an endpoint's text."""
    return endpoint.split()[0]


def uses_ucx(endpoint: str) -> bool:
    """Return whether a member uses UCX, of its endpoint's text."""
    return endpoint.split()[1] == "ucx"


def is_lost(made: socket.socket, timeout_s: float) -> bool:
    """Tell whether a peer on another host should have answered, and has not for so long."""
    if made.family == socket.AF_UNIX:
        return False
    info = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    unanswered = max(info[_RETRANSMITS][0], info[_PROBES_OUT][0])
    since_s = int.from_bytes(info[_LAST_ACK_RECV], "little") / 1000
    return unanswered > 1 and since_s >= timeout_s  # the last one may be on its way


def _heard(stranger: socket.socket, said: bytearray, wanted: int) -> bool:
    """Read what a stranger says; return whether it has said all, and not gone."""
    try:
        while len(said) < wanted:
            part = bytearray(wanted - len(said))
            count = stranger.recv_into(part)
            if not count:
                return False
            said += part[:count]
    except BlockingIOError:
        raise
    except OSError:  # no certificate of this cluster, for one
        return False
    return True


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
