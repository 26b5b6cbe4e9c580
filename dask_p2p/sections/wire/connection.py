"""Connection between two ranks: its socket, the messages in transit, and the peer's address."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dask_p2p import tuning
from dask_p2p.errors import P2PError, SectionError
from dask_p2p.sections.wire.channel import Channel
from dask_p2p.sections.wire.in_process import Stream
from dask_p2p.sections.wire.messages.format import (
    HEADER,
    TEXT_BYTES,
    InlineValue,
    SentMessage,
    inline_value,
    is_message,
)
from dask_p2p.sections.wire.messages.mailbox import Frame, Mailbox
from dask_p2p.sections.wire.messages.slots import LOOKS

#: Bytes in host memory. Messages that a connection `carries` by UCX may lie in GPU memory.
Buffer: TypeAlias = bytes | bytearray | memoryview

__all__ = ["HEADER", "TEXT_BYTES", "AttemptEndedError", "Buffer", "Connection", "RankAddress"]

_MOST_BUFFERS = 256  # of one system call, which takes at most 1024


class AttemptEndedError(P2PError):
    """The rank's current attempt cannot continue, or has ended."""


@dataclass(frozen=True)
class RankAddress:
    """One rank of the gang, this rank included."""

    worker: str  # address of its worker
    token: str  # its attempt token: a secret of the gang
    endpoint: str  # address of its listeners: `Connections.endpoint`


@dataclass
class Connection:
    """One socket, and its messages of the current exchange.

    A message by UCX sends only its header through the socket.
    """

    socket: socket.socket | Stream
    sending: list[memoryview] = field(default_factory=list)
    header: memoryview = field(default_factory=lambda: memoryview(bytearray(HEADER.size)))
    receiving: memoryview | None = None  # missing part of the header or the payload
    payload: Any = None  # receive buffer; None if the message's header gives its length
    is_header: bool = True
    has_received: bool = True
    number: int = 0  # exchanges so far: the same count at both ends
    channel: Channel | None = None  # UCX channel to another host, if both ends have UCX
    received_bytes: int = 0  # total of all exchanges
    waited_s: float = 0.0  # time for this rank, since the previous peer's message was complete
    mailbox: Mailbox = field(default_factory=Mailbox)  # messages of `ctx.send` from the peer
    frame: Frame | None = None  # the message that is being received
    #: Headers and data of calls of all ranks that the peer made while this rank awaits a message.
    early: deque[tuple[bytes, memoryview]] = field(default_factory=deque)
    is_early: bool = False  # whether the data of the last one is incomplete
    listens: bool = False  # whether it waits for messages, also while no exchange needs it
    sent_buffers: int = 0  # buffers of `sending` that were sent
    may_share_slots: bool = False  # whether this end makes slots with its first small message

    @property
    def is_unix(self) -> bool:
        """True between two processes of one host."""
        return getattr(self.socket, "family", None) == socket.AF_UNIX

    @property
    def events(self) -> int:
        """Poll events that the connection waits for."""
        sends: int = getattr(self.socket, "send_event", select.POLLOUT) if self.sending else 0
        hears = select.POLLRDHUP if self.uses_channel else 0
        is_reading = not self.has_received or (self.listens and not self._stops)
        return sends | hears | (select.POLLIN if is_reading else 0)

    @property
    def uses_channel(self) -> bool:
        """True while a UCX message is in transit."""
        return self.channel is not None and self.channel.is_busy

    @property
    def all_received_bytes(self) -> int:
        """Bytes received so far, those of messages included."""
        return self.received_bytes + self.mailbox.received_bytes

    def carries(self, size_bytes: int) -> bool:
        """Return whether a message of this size goes by UCX."""
        return self.channel is not None and size_bytes >= tuning.current.ucx_message_bytes

    def channel_for(self, payload: Any) -> Channel | None:
        """Return the UCX channel for a message; None if it goes through the socket."""
        return self.channel if payload is not None and self.carries(len(payload)) else None

    def begin_to_send(self, text: bytes, given: Buffer) -> None:
        """Begin to send a message, labelled with the text of its call."""
        payload = _bytes_of(given)
        self.sending.append(memoryview(HEADER.pack(self.number, len(payload), text)))
        if channel := self.channel_for(payload):
            channel.send(payload)
        elif len(payload):
            self.sending.append(payload)

    def begin_to_receive(self, into: Buffer | None) -> None:
        """Begin to receive a message into a buffer; None: allocate it when its size arrives."""
        self.has_received = False
        if self.receiving is None:  # otherwise the header is here, or a message is in transit
            self.receiving, self.is_header = self.header, True
        self.payload = payload = None if into is None else _bytes_of(into)
        if channel := self.channel_for(payload):
            channel.receive(payload)

    def _begin_header(self) -> None:
        self.receiving, self.is_header = self.header, True

    def post(self, message: SentMessage) -> None:
        """Begin to send a message of `ctx.send`."""
        self.sending += message.buffers
        if message.parts:  # the peer copies them, and acknowledges
            self.mailbox.unread.append(message)
        else:
            message.end = self.sent_buffers + len(self.sending)

    def receive_messages(self) -> None:
        """Receive messages without blocking, up to the header of a call of all ranks.

        If the peer has yet to acknowledge a message, or to send its data, receive the data of the
        call as well: the answer comes after it.
        """
        self.mailbox.take_slot()
        if self.receiving is None:
            self._begin_header()
        while self.fill():
            if self._takes_frame() or self._ends_early():
                continue
            if self._stops:
                return
            header = bytes(self.header)
            payload = memoryview(bytearray(HEADER.unpack(header)[1]))
            self.early.append((header, payload))
            self.receiving, self.is_header, self.is_early = payload, False, True

    def receive_inline(self, most_s: float) -> InlineValue | None:
        """Poll for the next message; return it if its value lies in the header.

        None: it is another one, or has yet to arrive, or earlier ones are to be received before.
        Then `receive_messages` continues with the bytes that have arrived.
        """
        is_begun = self.receiving is not None and len(self.receiving) != HEADER.size
        earlier = self.mailbox.arrived or self.mailbox.receives or self.early
        if is_begun or not self.is_header or earlier:
            return None
        header, mailbox, since_s = self.header, self.mailbox, 0.0
        self.receiving = header
        while (found := mailbox.value_in_slot(LOOKS)) is None:
            try:
                count = self.socket.recv_into(header)
            except BlockingIOError:
                now_s = time.perf_counter()
                since_s = since_s or now_s
                if now_s >= since_s + most_s:
                    return None
                continue
            if not count:
                raise ConnectionResetError("closed by the peer")
            # The peer has filled the slot before it sent this header.
            if (found := mailbox.value_in_slot()) is None and count == HEADER.size:
                found = inline_value(header)
                if found is not None:
                    mailbox.received += 1
                    break
            self.receiving = header[count:]
            break
        if since_s:
            self.waited_s += time.perf_counter() - since_s
        return found

    def _ends_early(self) -> bool:
        if self.is_early:
            self.is_early = False
            self._begin_header()
            return True
        return False

    @property
    def _has_call(self) -> bool:
        """True if the header of a call of all ranks is complete."""
        has_header = self.is_header and self.receiving is not None and not self.receiving
        return has_header and not is_message(self.header)

    @property
    def _stops(self) -> bool:
        """True if a call of all ranks is here, and no answer of the peer comes after it."""
        return self._has_call and not (self.mailbox.unread or self.mailbox.owed)

    @property
    def call(self) -> str:
        """Text of the call of all ranks that the peer makes; "" if that is unknown."""
        if not self.early and not self._has_call:
            return ""
        header = self.early[0][0] if self.early else self.header
        text: bytes = HEADER.unpack(header)[2]
        return text.rstrip(b"\0").decode(errors="replace")

    def _takes_frame(self) -> bool:
        """Take a header or a payload that is complete, if it belongs to a message."""
        if self.frame is None:
            if not self.is_header:
                return False
            self.mailbox.take_slot()  # its sender has filled it before it sent this header
            if not is_message(self.header):
                return False
            self.frame = self.mailbox.open(*HEADER.unpack(self.header))
            self.receiving, self.is_header = memoryview(self.frame.payload), False
        if not self.receiving:
            answer = self.mailbox.close(self.frame)
            self.frame = None
            self._begin_header()
            if answer is not None:
                answer.parts = ()
                self.post(answer)
        return True

    def _check_call(self, header: Any, text: bytes, own: int, rank: int) -> None:
        """Raise `SectionError` if the received header belongs to another call."""
        number, count, peers_text = HEADER.unpack(header)
        peers_text = peers_text.rstrip(b"\0")
        wanted = count if self.payload is None else len(self.payload)
        if (number, count, peers_text) == (self.number, wanted, text):
            return
        calls = sorted([(own, self.number, text), (rank, number, peers_text)])
        named = " and ".join(
            f"rank {each} called {call.decode(errors='replace')} as number {at}"
            for each, at, call in calls
        )
        raise SectionError(
            f"expected the same calls on all ranks, in the same order, but {named}. Make no call "
            f"of the context depend on the rank, or on values that differ between ranks."
        )

    def _begin_payload(self) -> None:
        """Begin to receive the payload, whose length the header gives."""
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
        """Send and receive without blocking; return whether the exchange is complete.

        Raises `SectionError`, with the ranks of both ends, if the peer's call has another text.
        """
        has_sent = self.send()
        if self.early and not self.is_early:
            self._take_early(text, own, rank)
        while not self.has_received and self.fill():
            if self.is_header and not is_message(self.header):
                self._check_call(self.header, text, own, rank)
                self._begin_payload()
            elif self.is_header or self.frame is not None:
                self._takes_frame()
            elif self.is_early and self._ends_early():
                self._take_early(text, own, rank)
            else:
                self.has_received, self.receiving = True, None
        if self.sending:  # perhaps the answer to a message
            has_sent = self.send()
        return has_sent and self.has_received

    def _take_early(self, text: bytes, own: int, rank: int) -> None:
        """Complete an exchange whose data has come early."""
        header, payload = self.early.popleft()
        self._check_call(header, text, own, rank)
        if self.payload is None:
            self.payload = payload
        else:
            self.payload[:] = payload
        self.has_received = True

    def send(self) -> bool:
        """Send without blocking; return whether everything has been sent."""
        while self.sending:
            try:
                some = (
                    self.sending
                    if len(self.sending) < _MOST_BUFFERS
                    else self.sending[:_MOST_BUFFERS]
                )
                sent = self.socket.sendmsg(some)
            except BlockingIOError:
                return False
            while self.sending and sent >= len(self.sending[0]):
                sent -= len(self.sending.pop(0))
                self.sent_buffers += 1
            if self.sending:
                self.sending[0] = self.sending[0][sent:]
        return self.channel is None or self.channel.has_sent()

    def fill(self) -> bool:
        """Receive into `receiving` without blocking; return whether it is complete."""
        while self.receiving:
            try:
                count = self.socket.recv_into(self.receiving)
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionResetError("closed by the peer")
            self.receiving = self.receiving[count:]
        if self.is_header or self.frame is not None:
            return True
        return self.channel is None or self.channel.has_received()

    def close(self) -> None:
        """Close the connection, and drop messages in transit."""
        self.socket.close()
        if self.channel is not None:
            self.channel.close()


def _bytes_of(buffer: Any) -> Any:
    """Return a buffer as bytes; a GPU array already is an array of bytes."""
    is_on_host = isinstance(buffer, (bytes, bytearray, memoryview))
    return memoryview(buffer).cast("B") if is_on_host else buffer
