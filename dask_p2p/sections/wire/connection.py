"""Connection between two ranks: its socket, the messages in transit, and the peer's address."""

from __future__ import annotations

import secrets
import select
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

from dask_p2p import tuning
from dask_p2p.errors import P2PError, TransferError
from dask_p2p.sections.wire.frames import (
    HEADER,
    SentMessage,
    check_call,
    is_inline,
    is_message,
    text_of,
)
from dask_p2p.sections.wire.mailbox import FIRST_LOOKS, LOOKS, MOST_BYTES, Frame, Mailbox
from dask_p2p.sections.wire.streams import Stream
from dask_p2p.transports.ucx_messenger import Message, Messenger

#: Bytes in host memory. Messages that a connection `carries` by UCX may lie in GPU memory.
Buffer: TypeAlias = bytes | bytearray | memoryview

_MOST_BUFFERS = 256  # of one system call, which takes at most 1024


#: Header and data of a call of all ranks that the peer has made while this rank awaits a message.
EarlyCall: TypeAlias = tuple[bytes, memoryview]


class AttemptEndedError(P2PError):
    """The rank's current attempt cannot continue, or has ended."""


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
    #: The message or early call whose data is being received.
    frame: Frame | EarlyCall | None = None
    early: deque[EarlyCall] = field(default_factory=deque)
    listens: bool = False  # whether it waits for messages, also while no exchange needs it
    sent_buffers: int = 0  # buffers of `sending` that were sent
    may_share_slots: bool = False  # whether this end makes slots with its first small message

    @property
    def events(self) -> int:
        sends: int = getattr(self.socket, "send_event", select.POLLOUT) if self.sending else 0
        hears = select.POLLRDHUP if self.uses_channel else 0
        is_reading = not self.has_received or (self.listens and not self._stops)
        return sends | hears | (select.POLLIN if is_reading else 0)

    @property
    def uses_channel(self) -> bool:
        channel = self.channel
        return channel is not None and bool(channel.sending or channel.receiving)

    def carries(self, size_bytes: int) -> bool:
        return self.channel is not None and size_bytes >= tuning.current.ucx_message_bytes

    def channel_for(self, payload: Any) -> Channel | None:
        """Return the UCX channel for a message; None if it goes through the socket."""
        return self.channel if payload is not None and self.carries(len(payload)) else None

    def begin_to_send(self, text: bytes, data: Buffer, may_use_slot: bool = False) -> bool:
        """Begin to send a message, labelled with the text of its call; return if a slot has it."""
        payload = _bytes_of(data)
        header = HEADER.pack(self.number, len(payload), text)
        may_use_slot = may_use_slot and len(payload) <= MOST_BYTES and not self.sending
        slots = self.mailbox.slots if may_use_slot else None
        if slots and slots.write(slots.sent_calls, self.number, b"".join((header, payload))):
            return True
        self.sending.append(memoryview(header))
        if channel := self.channel_for(payload):
            channel.send(payload)
        elif len(payload):
            self.sending.append(payload)
        return False

    def begin_to_receive(self, into: Buffer | None) -> None:
        """Begin to receive a message into a buffer; None: allocate it when its size arrives."""
        self.has_received = False
        if self.receiving is None:  # otherwise the header is here, or a message is in transit
            self._begin_header()
        self.payload = payload = None if into is None else _bytes_of(into)
        if channel := self.channel_for(payload):
            channel.receive(payload)

    def _begin_header(self) -> None:
        self.receiving, self.is_header = self.header, True

    def write_to_slot(self, number: int, message: SentMessage) -> bool:
        """Put a message into the slot, if its value is small; return whether it is there."""
        slots = None if self.sending or message.parts else self.mailbox.slots
        if slots is None or message.size_bytes > MOST_BYTES:
            return False
        is_there = slots.write(slots.sent_messages, number, b"".join(message.buffers))
        if is_there:
            message.end = self.sent_buffers
        return is_there

    def post(self, message: SentMessage) -> None:
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
        self._read()

    def _read(self, text: bytes | None = None, own_rank: int = 0, rank: int = 0) -> None:
        """Read frames without blocking, until the data of the call with this text is here.

        Without a text, read messages, up to the header of a call.
        """
        while self.fill():
            frame, self.frame = self.frame, None
            if not self.is_header and frame is None:
                self.has_received, self.receiving = True, None
            elif not self.is_header:
                self._begin_header()
                if isinstance(frame, Frame):
                    reply = self.mailbox.close(frame)
                    if reply is not None:
                        reply.parts = ()
                        self.post(reply)
                    self.mailbox.take_slot()  # which may hold the next message
                elif frame is not None:
                    self.early.append(frame)
                    if text is not None:
                        self._take_call(text, own_rank, rank)
            elif text is not None and not is_message(self.header):
                # The peer may have filled the slot before it sent this header of a later call.
                if not self._take_call(text, own_rank, rank):
                    self._begin_payload(self._checked_call(self.header, text, own_rank, rank))
            else:
                self.mailbox.take_slot()  # its sender has filled it before it sent this header
                if self._stops:
                    return
                if is_message(self.header):
                    self.frame = frame = self.mailbox.open(*HEADER.unpack(self.header))
                    self.receiving = memoryview(frame.payload)
                else:
                    self.receiving = memoryview(bytearray(HEADER.unpack(self.header)[1]))
                    self.frame = bytes(self.header), self.receiving
                self.is_header = False
            if text is not None and self.has_received:
                return

    def receive_small(self, most_s: float) -> bytes | None:
        """Poll for the next message; return its bytes if it is in a slot, or in a header alone.

        None: it is another one, or has yet to arrive, or earlier ones are to be received before.
        Then `receive_messages` continues with the bytes that have arrived.
        """
        header, mailbox, since_s, small_frame = self.header, self.mailbox, 0.0, None
        is_begun = self.receiving is not None and len(self.receiving) != len(header)
        if is_begun or not self.is_header or mailbox.arrived or mailbox.receives or self.early:
            return None
        slot = None if mailbox.slots is None else mailbox.slots.messages
        number, looks, self.receiving = mailbox.received + 1, 1, header
        while True:
            if slot is not None and slot.has(number, looks):
                small_frame = slot.take(number)
                break
            try:
                count = self.socket.recv_into(header)
            except BlockingIOError:
                looks = FIRST_LOOKS if looks == 1 else LOOKS
                now_s = time.perf_counter()
                since_s = since_s or now_s
                if now_s >= since_s + most_s:
                    return None
                continue
            if not count:
                raise ConnectionResetError("closed by the peer")
            self.receiving = header[count:]
            # The peer has filled the slot before it sent this header.
            if slot is not None and slot.has(number):
                small_frame = slot.take(number)
            elif count == len(header) and is_inline(header):
                small_frame, self.receiving = bytes(header), header
            break
        if small_frame is not None:
            mailbox.received = number
            mailbox.received_bytes += len(small_frame) - len(header)
        if since_s:
            self.waited_s += time.perf_counter() - since_s
        return small_frame

    @property
    def has_call(self) -> bool:
        """True if the header of a call of all ranks is complete."""
        has_header = self.is_header and self.receiving is not None and not self.receiving
        return has_header and not is_message(self.header)

    @property
    def _stops(self) -> bool:
        """True if a call of all ranks is here, and no answer of the peer comes after it."""
        return self.has_call and not (self.mailbox.unread or self.mailbox.owed)

    @property
    def call(self) -> str:
        """Text of the call of all ranks that the peer makes; "" if that is unknown."""
        slots, header = self.mailbox.slots, self.header
        if slots is not None and slots.calls.has(self.number + 1):
            header = slots.calls.header
        elif self.early:
            header = memoryview(self.early[0][0])
        elif not self.has_call:
            return ""
        return text_of(header)

    def _checked_call(self, header: Any, text: bytes, own_rank: int, rank: int) -> int:
        """Return the size of a call's payload. Raises `SectionError` for another call."""
        size_bytes = None if self.payload is None else len(self.payload)
        return check_call(header, (self.number, size_bytes, text), own_rank, rank)

    def _begin_payload(self, size_bytes: int) -> None:
        is_begun = self.payload is not None
        if not is_begun:
            self.payload = memoryview(bytearray(size_bytes))
        self.receiving, self.is_header = self.payload, False
        if channel := self.channel_for(self.payload):
            if not is_begun:
                channel.receive(self.payload)
            channel.expect()
            self.receiving = None

    def advance(self, text: bytes, own_rank: int, rank: int) -> bool:
        """Send and receive without blocking; return whether the exchange is complete.

        Raises `SectionError`, with the ranks of both ends, if the peer's call has another text.
        """
        has_sent = self.send() if self.sending or self.channel is not None else True
        if not self.has_received:
            self._take_call(text, own_rank, rank, LOOKS)
            if not self.has_received:
                self._read(text, own_rank, rank)
        if self.sending:  # perhaps the answer to a message
            has_sent = self.send()
        return has_sent and self.has_received

    def poll_call(self, until_s: float) -> bool:
        """Poll for the data of a call until a time; return whether any may have come.

        This is one loop, since a function for each attempt would delay the answer.
        """
        slots, number, receiving = self.mailbox.slots, self.number, self.receiving
        if self.has_received or self.sending or self.channel is not None or not receiving:
            return True  # there is more to do
        words, at = ((), 0) if slots is None else (slots.calls.words, slots.calls.written_word)
        attempts = range(LOOKS if slots is not None else 0)
        while True:
            for _ in attempts:
                if words[at] == number:
                    return True
            try:
                count = self.socket.recv_into(receiving)
            except BlockingIOError:
                if time.perf_counter() >= until_s:
                    return False
                continue
            if not count:
                raise ConnectionResetError("closed by the peer")
            self.receiving = receiving[count:]
            return True

    def _take_call(self, text: bytes, own_rank: int, rank: int, looks: int = 1) -> bool:
        """Complete an exchange whose data is in the slot, or has come early; return if it is."""
        slot = None if self.mailbox.slots is None else self.mailbox.slots.calls
        if slot is not None and slot.has(self.number, looks):
            size_bytes = self._checked_call(slot.header, text, own_rank, rank)
            self._take(slot.payload[:size_bytes])
            slot.free(self.number)
        elif self.early:
            header, payload = self.early.popleft()
            self._checked_call(header, text, own_rank, rank)
            self._take(payload)
        return self.has_received

    def _take(self, payload: memoryview) -> None:
        if self.payload is None:
            self.payload = memoryview(bytearray(payload))
        elif payload:  # memory for nothing may be read-only
            self.payload[:] = payload
        self.has_received = True

    def send(self) -> bool:
        """Send without blocking; return whether everything has been sent."""
        while self.sending:
            try:
                sent = self.socket.sendmsg(self.sending[:_MOST_BUFFERS])
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
        self.socket.close()
        if self.channel is not None:
            self.channel.close()


def _bytes_of(buffer: Any) -> Any:
    if isinstance(buffer, memoryview):
        return buffer.cast("B")
    return memoryview(buffer) if isinstance(buffer, (bytes, bytearray)) else buffer


# Channels: large messages between hosts by UCX, where both ends support it.
#
# The socket of a connection still carries all headers. So differing calls and dead peers are
# detected as everywhere else. Large payloads go by UCX, from and to memory of the host or of a GPU,
# over InfiniBand or any other transport that UCX finds.
#
# A large message is sent in parts. If a connection is lost, no part arrives, and UCX may not report
# it. So parts have a deadline, which starts when the header arrives: the time that a peer computes
# before it sends does not count.

# The tags of the worker's transport are below: see `MessageTags`.
_FIRST_TAG = 1 << 62
_OFFER = struct.Struct("<QQ")  # first tag, number of endpoints closed so far


class Channel:
    """The UCX path for large messages between two ranks."""

    def __init__(
        self,
        messenger: Messenger,  # of this process
        address: bytes,  # of the peer's messenger
        timeout_s: float,  # longest wait for the next part
    ) -> None:
        self._messenger, self._address, self._timeout_s = messenger, address, timeout_s
        first = _FIRST_TAG + secrets.randbits(60)
        self.offer = _OFFER.pack(first, messenger.count_closed(address))
        self._own_tags = count(first)
        self.sending = deque[Message]()
        self.receiving = deque[Message]()
        self._due_s: float | None = None  # deadline of the next part

    def open(self, offer: Any) -> None:
        first, closed = _OFFER.unpack(offer)
        self._messenger.reset_endpoint(self._address, closed)
        self._peers_tags = count(first)

    def send(self, payload: Any) -> None:
        """Begin to send bytes, which must not change until `has_sent` returns True."""
        for part in _parts(payload):
            tag = next(self._peers_tags)
            self.sending.append(self._messenger.send(self._address, part, tag, other_host=True))

    def receive(self, payload: Any) -> None:
        for part in _parts(payload):
            self.receiving.append(self._messenger.receive(part, next(self._own_tags)))

    def expect(self) -> None:
        """Start the deadline of the next part: the peer has begun to send."""
        self._due_s = time.monotonic() + self._timeout_s

    def has_sent(self) -> bool:
        """Return whether all messages were sent; raise `TransferError` if one failed."""
        _drop_done(self.sending)
        return not self.sending

    def has_received(self) -> bool:
        """Return whether all messages have arrived; raise `TransferError` if one failed."""
        if _drop_done(self.receiving):
            self.expect()
        if self.receiving and self._due_s is not None and time.monotonic() > self._due_s:
            raise TransferError(f"no bytes within {self._timeout_s:g} s", is_silence=True)
        return not self.receiving

    def close(self) -> None:
        """Give up messages in flight. Their memory is kept until UCX no longer uses it."""
        for message in (*self.sending, *self.receiving):
            message.give_up(self._timeout_s)


def _parts(payload: Any) -> list[Any]:
    size_bytes = tuning.current.ucx_part_bytes
    return [payload[at : at + size_bytes] for at in range(0, len(payload), size_bytes)]


def _drop_done(messages: deque[Message]) -> bool:
    any_done = False
    while messages and messages[0].is_complete:
        messages.popleft().result(0.0)
        any_done = True
    return any_done
