"""Messages between two ranks: those that have arrived on a connection, and those to be received.

A message is a value of any size, which one rank sends and another one receives. Its sender need not
wait for the receiver: a rank that waits in any call of the context also receives the messages that
arrive. They are kept until the function receives them, in order.

The messages share the sockets of the calls of all ranks. Each one has a header of the same size. A
small value lies in the header. A large value of a rank on the same host is not sent: the header has
its address, the receiver copies it from the sender's memory and acknowledges. Arrays in the memory
of a GPU are lent in the same way: a message has an *offer* in their place, and the receiver copies
them or requests their bytes.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dask_p2p.errors import SectionError, TransferError
from dask_p2p.sections.wire.frames import (
    ADDRESS,
    ARRIVALS,
    CALL_NAMES,
    CANNOT_READ,
    DATA,
    HAS_READ,
    HEADER,
    LABEL,
    OFFER,
    OFFER_BYTES,
    PART,
    ROOM_BYTES,
    SLOTS,
    VALUE,
    SentMessage,
    aligned,
    pad_parts,
    reply_header,
)
from dask_p2p.transports import process_memory
from dask_p2p.transports.buffers import Segment, SegmentName
from dask_p2p.types import Array

_BYTE = np.dtype(np.uint8)


@dataclass
class Arrival:
    """A message that arrives."""

    tag: int
    communicator: int
    description: bytes = b""  # shapes and dtypes of the value
    data: Any = b""  # bytes of the value, each array at a multiple of `ALIGNMENT`
    #: Bytes of the arrays that the sender has lent, which are not in `data`; None if all are.
    lent: Sequence[Array] | None = None
    is_complete: bool = False


@dataclass(eq=False)
class Receive:
    """A message that the function receives: the next one that has not been received."""

    tag: int
    communicator: int
    description: bytes | None = None  # of the value that `memory` is for
    memory: Any = None  # destination of the value's bytes, if it is given
    lent_memory: Any = None  # the same for an array that the sender lends
    arrival: Arrival | None = None  # the message, once its header is here

    @property
    def is_complete(self) -> bool:
        return self.arrival is not None and self.arrival.is_complete


@dataclass
class Mailbox:
    """The messages of one connection."""

    rank: int = -1  # the peer
    lender: Any = None  # of this rank's arrays: a `MessageLender`, if they are in GPU memory
    arrived: deque[Arrival] = field(default_factory=deque)  # not received by the function yet
    receives: deque[Receive] = field(default_factory=deque)  # begun by the function, without header
    #: Sent by address, and not acknowledged yet.
    unread: deque[SentMessage] = field(default_factory=deque)
    owed: deque[Arrival] = field(default_factory=deque)  # sent by address, which is not readable
    received: int = 0  # number of messages
    slots: Slots | None = None  # for small messages, in memory that both ranks share
    received_bytes: int = 0
    _reads: dict[bytes, int] = field(default_factory=dict)  # by proof: its process if readable

    def receive(self, receive: Receive) -> None:
        if self.arrived:
            receive.arrival = self.arrived.popleft()
        else:
            self.receives.append(receive)

    def take(self, arrival: Arrival) -> Receive | None:
        """Take a message that arrives; return the receive that was waiting for it."""
        if not self.receives:
            self.arrived.append(arrival)
            return None
        receive = self.receives.popleft()
        receive.arrival = arrival
        return receive

    def take_slot(self) -> None:
        slots, number = self.slots, self.received + 1
        if slots is not None and (slot := slots.messages).has(number):
            frame_bytes = slot.take(number)
            frame = self.open(*HEADER.unpack_from(frame_bytes))
            memoryview(frame.payload)[:] = frame_bytes[HEADER.size :]
            self.close(frame)

    def open(self, number: int, size_bytes: int, text: bytes) -> Frame:
        kind, communicator, length = LABEL.unpack_from(text)
        frame = Frame(kind, length)
        if kind == DATA:
            frame.arrival = self.owed.popleft()
            if frame.arrival.data is None:  # of an offer
                frame.arrival.data = np.empty(size_bytes, np.uint8)
            frame.payload = frame.arrival.data
        elif kind in ARRIVALS:
            frame.arrival = arrival = Arrival(number, communicator)
            self.received += 1
            frame.receive = self.take(arrival)
            if length <= ROOM_BYTES:
                arrival.description = text[LABEL.size :][:length]
                arrival.data = text[LABEL.size + length :]
            if size_bytes and kind == VALUE and length <= ROOM_BYTES:
                arrival.data = frame.payload = frame.memory(size_bytes)
        if frame.payload is None:
            frame.payload = np.empty(size_bytes, np.uint8)
        return frame

    def close(self, frame: Frame) -> SentMessage | None:
        """Take a frame that is complete; return an answer to send, if there is one."""
        arrival = frame.arrival
        if frame.kind == SLOTS:  # with the name of new slots; without, it wakes this rank
            if len(frame.payload):
                self.slots = Slots.open(frame.payload.tobytes())
            return None
        if arrival is None:
            return self._take_reply(frame)
        payload, kind = frame.payload, frame.kind
        self.received_bytes += len(payload)
        if frame.length > ROOM_BYTES:
            arrival.description = payload[: frame.length].tobytes()
            payload = payload[aligned(frame.length) :]
            arrival.data = payload
        read = {ADDRESS: self._read, OFFER: self._bring}.get(kind)
        acknowledgement = b"" if read is None else read(frame, payload)
        if acknowledgement is None:
            self.owed.append(arrival)
            return SentMessage([reply_header(CANNOT_READ)])
        arrival.is_complete = True
        if read is None:
            return None
        header = reply_header(HAS_READ, len(acknowledgement))
        return SentMessage([header, memoryview(acknowledgement)] if acknowledgement else [header])

    def _take_reply(self, frame: Frame) -> SentMessage | None:
        """Take the answer to a message that was sent by address; return its bytes if wanted."""
        sent, lender = self.unread.popleft(), self.lender
        if frame.kind == HAS_READ:
            if sent.lent and lender is not None:
                lender.acknowledged(self.rank, sent.lent, frame.payload.tobytes())
            sent.end, sent.parts = 0, ()
            return None
        parts = sent.parts
        if sent.lent and lender is not None:
            parts = pad_parts([*map(lender.to_host, parts)])
            lender.refused(self.rank, sent.lent)
        sent.buffers = [reply_header(DATA, sum(map(len, parts))), *parts]
        return sent

    def _bring(self, frame: Frame, payload: Any) -> bytes | None:
        """Copy arrays that the sender lends; return the acknowledgement, None if unreadable."""
        arrival, receive = frame.arrival, frame.receive
        assert arrival is not None
        (size_bytes, _), at = OFFER_BYTES.unpack_from(payload), OFFER_BYTES.size
        offer = payload[at : at + size_bytes].tobytes()
        is_for_it = receive is not None and receive.description == arrival.description
        into = receive.lent_memory if receive is not None and is_for_it else None
        copies = None if self.lender is None else self.lender.bring(self.rank, offer, into)
        if copies is None:
            arrival.data = None
            return None
        arrival.data, arrival.lent = payload[at + aligned(size_bytes) :], copies
        self.received_bytes += sum(array.nbytes for array in copies)
        acknowledgement: bytes = self.lender.acknowledgement()
        return acknowledgement

    def _read(self, frame: Frame, descriptor: Any) -> bytes | None:
        """Copy a value from the sender's memory; return the acknowledgement, None if unreadable."""
        assert frame.arrival is not None
        proof = descriptor[: process_memory.PROOF_BYTES].tobytes()
        parts = [*PART.iter_unpack(descriptor[process_memory.PROOF_BYTES :])]
        sizes = [size_bytes for _, size_bytes in parts]
        memory = frame.arrival.data = frame.memory(sum(map(aligned, sizes[:-1])) + sizes[-1])
        if proof not in self._reads:
            self._reads[proof] = process_memory.readable_pid(proof)
        if not (pid := self._reads[proof]):
            return None
        at = 0
        for address, size_bytes in parts:
            runs = process_memory.runs_of(address, (size_bytes,), (1,), 1)
            process_memory.read(pid, runs, _BYTE, memory[at : at + size_bytes])
            at += aligned(size_bytes)
        self.received_bytes += at
        return b""

    def check_read(self, rank: int, peer: int) -> None:
        """Raise `SectionError` if the function has not received all messages."""
        if self.arrived:
            tag = self.arrived[0].tag
            sent = CALL_NAMES.get(tag, f"send(dest={rank}, tag={tag})")
            raise SectionError(
                f"expected rank {rank} to receive all messages, but its function returned before "
                f"it received {len(self.arrived)} of rank {peer}, the first by {sent}. Receive "
                f"each message, and make calls of all ranks on all of them."
            )


@dataclass
class Frame:
    """A header of a message, with the payload that follows it."""

    kind: int
    length: int  # size of the description
    arrival: Arrival | None = None  # the message; None for acknowledgements
    receive: Receive | None = None  # the receive that was waiting for the message
    payload: Any = None  # destination of the bytes that follow the header

    def memory(self, size_bytes: int) -> Array:
        to, arrival = self.receive, self.arrival
        if to and arrival and to.memory is not None and to.description == arrival.description:
            return to.memory
        return np.empty(size_bytes, np.uint8)


# Slots: small frames in memory that ranks of two processes of one host share.
#
# Most of the time of a small frame in a socket is that of the system calls. A slot needs none. Each
# connection has two slots in each direction: one for messages, and one for calls of all ranks. The
# receiver polls a slot as long as it polls the socket. The sender uses the socket if the slot is
# occupied, or if the receiver sleeps. Messages are numbered, in slots and sockets alike, and so are
# calls. So both keep their order.
#
# A sender that has filled the slot wakes the receiver by the socket if it has begun to sleep. Slots
# need a processor whose stores appear in order in other processes, as those of x86 do: Python has
# no barriers. Such a processor may still delay a store while later loads complete, so that the
# sender does not see that the receiver sleeps. So the receiver looks again after a moment.

#: True if stores appear in order in other processes.
HAS_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")
#: Looks at the slot for each attempt to receive from the socket: half a microsecond.
LOOKS = 16
#: The same after the first attempt: no system call delays an answer that comes immediately.
FIRST_LOOKS = 64
#: More than the longest time until a store appears in other processes.
STORE_S = 1e-3
#: Size of the largest payload in a slot.
MOST_BYTES = 1 << 14
_WORD_BYTES, _LINE_BYTES = 8, 64
# Positions in a slot. Its sender writes the first line, and its receiver the second.
_WRITTEN, _TAKEN, _FRAME = 0, _LINE_BYTES, 2 * _LINE_BYTES
_SLEEPS = 0, _LINE_BYTES  # positions of a word of each end, first that of the maker
_FIRST_SLOT = 2 * _LINE_BYTES
_HEADER_BYTES = HEADER.size
_SLOT_BYTES = _FRAME + _HEADER_BYTES + MOST_BYTES
_SIZE_BYTES = _FIRST_SLOT + 4 * _SLOT_BYTES


class FrameSlot:
    """Memory for one frame in one direction: its header, and the payload that follows."""

    def __init__(self, memory: memoryview, start: int) -> None:
        self.words = memory.cast("Q")
        self.written_word, self.taken_word = (
            (start + at) // _WORD_BYTES for at in (_WRITTEN, _TAKEN)
        )
        self.frame = memory[start + _FRAME :][: _HEADER_BYTES + MOST_BYTES]
        # A header begins with its number, and the size of the payload.
        self._size = (start + _FRAME) // _WORD_BYTES + 1
        #: Its parts. At the receiver they may change after `free`.
        self.header, self.payload = self.frame[:_HEADER_BYTES], self.frame[_HEADER_BYTES:]
        self.last = 0  # number of the last frame that was put into the slot

    def has(self, number: int, looks: int = 1) -> bool:
        """Return whether a frame of this number is here after some looks. The first one is 1."""
        words, at = self.words, self.written_word
        for _ in range(looks):  # noqa: SIM110  `any` takes longer
            if words[at] == number:
                return True
        return False

    def take(self, number: int) -> bytes:
        words = self.words
        frame = self.frame[: _HEADER_BYTES + words[self._size]].tobytes()
        words[self.taken_word] = number
        return frame

    def free(self, number: int) -> None:
        self.words[self.taken_word] = number


class Slots:
    """The slots of one connection, as one of its ends has them."""

    def __init__(self, segment: Segment, is_maker: bool) -> None:
        #: Kept until the peer has opened it.
        self._segment: Segment | None = segment
        memory = segment.bytes.data
        slots = [FrameSlot(memory, _FIRST_SLOT + number * _SLOT_BYTES) for number in range(4)]
        sent, received = (slots[:2], slots[2:]) if is_maker else (slots[2:], slots[:2])
        self.sent_messages, self.sent_calls = sent
        self.messages, self.calls = received
        self._words = memory.cast("Q")
        ends = [at // _WORD_BYTES for at in _SLEEPS]
        self._own_sleeps, self._peer_sleeps = ends if is_maker else ends[::-1]
        if is_maker:
            self._words[self._peer_sleeps] = 1  # until it opens the memory

    @classmethod
    def make(cls) -> tuple[Slots, bytes] | None:
        """Return new slots, and the text for `open` on the peer; None without shared memory."""
        try:
            segment = Segment.make(_SIZE_BYTES)
        except OSError:  # too many open files
            return None
        return cls(segment, is_maker=True), " ".join(map(str, segment.name)).encode()

    @classmethod
    def open(cls, text: bytes) -> Slots | None:
        """Return the slots that the peer has made; None if this process cannot open them."""
        with suppress(TransferError, OSError, ValueError):
            kernel, namespace, *numbers = text.decode().split()
            name = SegmentName(kernel, namespace, *map(int, numbers))
            if name.size_bytes == _SIZE_BYTES:
                slots = cls(Segment.open(name), is_maker=False)
                slots.sleeps = False
                return slots
        return None

    def write(self, slot: FrameSlot, number: int, frame: bytes) -> bool:
        """Put a frame into a slot; return False if that is not free, or the receiver sleeps."""
        words = self._words
        if words[self._peer_sleeps] or words[slot.taken_word] != slot.last:
            return False
        self._segment = None
        slot.frame[: len(frame)] = frame
        words[slot.written_word] = slot.last = number
        return True

    @property
    def peer_sleeps(self) -> bool:
        return bool(self._words[self._peer_sleeps])

    @property
    def sleeps(self) -> bool:
        return bool(self._words[self._own_sleeps])

    @sleeps.setter
    def sleeps(self, sleeps: bool) -> None:
        self._words[self._own_sleeps] = sleeps
