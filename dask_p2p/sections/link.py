"""One stream between two members, what is on its way through it, and who is at the other end."""

from __future__ import annotations

import select
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dask_p2p.errors import P2PError, SectionError
from dask_p2p.sections.channel import LEAST_BYTES, Channel
from dask_p2p.sections.in_process import Stream

#: Bytes; those of a GPU too, where a link `carries` so many.
Buffer: TypeAlias = bytes | bytearray | memoryview

TEXT_BYTES = 240
HEADER = struct.Struct(f"<QQ{TEXT_BYTES}s")  # number, bytes that follow, text of the call


class AttemptEndedError(P2PError):
    """The attempt that a member takes part in cannot go on, or has ended."""


@dataclass(frozen=True)
class Peer:
    """Another member, or this one."""

    worker: str  # address of its worker
    ticket: str  # of its run: nobody else knows it
    endpoint: str  # where its links begin: `Links.endpoint`


@dataclass
class Link:
    """One socket, and what is on its way through it in the current exchange.

    Of a message by UCX the header alone goes through the socket.
    """

    socket: socket.socket | Stream
    sending: list[memoryview] = field(default_factory=list)
    header: memoryview = field(default_factory=lambda: memoryview(bytearray(HEADER.size)))
    receiving: memoryview | None = None  # the part of the header, or the payload, still to come
    payload: Any = None  # where it goes; None if the sender says how long it is
    is_header: bool = True
    has_received: bool = True
    number: int = 0  # of exchanges so far, which is the same at both ends
    channel: Channel | None = None  # to another host, if there is UCX at both ends
    received_bytes: int = 0  # in all
    waited_s: float = 0.0  # for this member, after all from whom something came before it

    @property
    def events(self) -> int:
        """What to wait for before it can go on."""
        sends: int = getattr(self.socket, "send_event", select.POLLOUT) if self.sending else 0
        hears = select.POLLRDHUP if self.uses_channel else 0
        return sends | hears | (0 if self.has_received else select.POLLIN)

    @property
    def uses_channel(self) -> bool:
        """Whether something is on its way by UCX."""
        return self.channel is not None and self.channel.is_busy

    def carries(self, size_bytes: int) -> bool:
        """Return whether a message goes by UCX."""
        return self.channel is not None and size_bytes >= LEAST_BYTES

    def channel_for(self, payload: Any) -> Channel | None:
        """Return what carries a message beside the socket; None if that does."""
        return self.channel if payload is not None and self.carries(len(payload)) else None

    def begin_to_send(self, text: bytes, given: Buffer) -> None:
        """Begin to send a message of a call with this text."""
        payload = _bytes_of(given)
        self.sending.append(memoryview(HEADER.pack(self.number, len(payload), text)))
        if channel := self.channel_for(payload):
            channel.send(payload)
        elif len(payload):
            self.sending.append(payload)

    def begin_to_receive(self, into: Buffer | None) -> None:
        """Begin to receive a message where it belongs, if that is known."""
        self.receiving, self.is_header, self.has_received = self.header, True, False
        self.payload = payload = None if into is None else _bytes_of(into)
        if channel := self.channel_for(payload):
            channel.receive(payload)

    def _check_call(self, text: bytes, own: int, rank: int) -> None:
        """Raise `SectionError` if the header is of another call."""
        number, count, peers_text = HEADER.unpack(self.header)
        peers_text = peers_text.rstrip(b"\0")
        wanted = count if self.payload is None else len(self.payload)
        if (number, count, peers_text) == (self.number, wanted, text):
            return
        calls = sorted([(own, self.number, text), (rank, number, peers_text)])
        named = " and ".join(
            f"member {each} called {what.decode(errors='replace')} as number {at}"
            for each, at, what in calls
        )
        raise SectionError(
            f"expected the same calls of all members in the same order, but {named}. Let no call "
            f"of the context depend on the rank, or on values that differ between members."
        )

    def _begin_payload(self) -> None:
        """Go on behind the header, which says how long the message is."""
        is_begun = self.payload is not None
        if not is_begun:
            self.payload = memoryview(bytearray(HEADER.unpack(self.header)[1]))
        self.receiving, self.is_header = self.payload, False
        if channel := self.channel_for(self.payload):
            if not is_begun:
                channel.receive(self.payload)
            channel.expect()
            self.receiving = None

    def advance(self, text: bytes, own: int, rank: int) -> bool:
        """Send and receive as much as is possible now; return whether that ends the exchange.

        `SectionError`, with the ranks of both ends, if the peer's call has another text.
        """
        has_sent = self.send()
        while not self.has_received and self.fill():
            if self.is_header:
                self._check_call(text, own, rank)
                self._begin_payload()
            else:
                self.has_received = True
        return has_sent and self.has_received

    def send(self) -> bool:
        """Send what the socket takes; return whether that was all."""
        while self.sending:
            try:
                sent = self.socket.sendmsg(self.sending)
            except BlockingIOError:
                return False
            while self.sending and sent >= len(self.sending[0]):
                sent -= len(self.sending.pop(0))
            if self.sending:
                self.sending[0] = self.sending[0][sent:]
        return self.channel is None or self.channel.has_sent()

    def fill(self) -> bool:
        """Receive what has come; return whether all of `receiving` has."""
        while self.receiving:
            try:
                count = self.socket.recv_into(self.receiving)
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionResetError("it has ended")
            self.receiving = self.receiving[count:]
        return self.is_header or self.channel is None or self.channel.has_received()

    def close(self) -> None:
        """End it, and give up what is on its way."""
        self.socket.close()
        if self.channel is not None:
            self.channel.close()


def _bytes_of(buffer: Any) -> Any:
    """Return a buffer as bytes; an array on a GPU is one of bytes."""
    is_on_host = isinstance(buffer, (bytes, bytearray, memoryview))
    return memoryview(buffer).cast("B") if is_on_host else buffer
