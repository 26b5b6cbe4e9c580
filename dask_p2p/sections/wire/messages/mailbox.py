"""Messages between two ranks: those that have arrived on a connection, and those to be received.

A message is a value of any size, which one rank sends and another one receives. Its sender need not
wait for the receiver: a rank that waits in any call of the context also receives the messages that
arrive. They are kept until the function receives them, in order.

The messages share the sockets of the calls of all ranks. Each one has a header of the same size. A
small value lies in the header. A large value of a rank on the same host is not sent: the header has
its address, the receiver copies it from the sender's memory and acknowledges. Arrays in the memory
of a GPU are lent in the same way, by a `Lender`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dask_p2p.errors import SectionError
from dask_p2p.interprocess import process_memory
from dask_p2p.sections.wire.messages.format import (
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
    PROBE,
    ROOM_BYTES,
    SLOTS,
    VALUE,
    SentMessage,
    aligned,
    frame_of,
    padded,
)
from dask_p2p.sections.wire.messages.lender import Lender
from dask_p2p.sections.wire.messages.slots import Slots
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


@dataclass
class Receive:
    """A message that the function receives: the next one that has not been received."""

    tag: int
    communicator: int
    description: bytes | None = None  # of the value that `memory` is for
    memory: Any = None  # destination of the value's bytes, if it is given
    lent_memory: Any = None  # the same for an array that the sender lends
    arrival: Arrival | None = None  # the message, once its header is here

    @property
    def has_begun(self) -> bool:
        """True once the message's header is here."""
        return self.arrival is not None

    @property
    def is_complete(self) -> bool:
        """True once the message is here."""
        return self.arrival is not None and self.arrival.is_complete


@dataclass
class Mailbox:
    """The messages of one connection."""

    rank: int = -1  # the peer
    lender: Lender | None = None  # of this rank's arrays
    arrived: deque[Arrival] = field(default_factory=deque)  # not received by the function yet
    receives: deque[Receive] = field(default_factory=deque)  # begun by the function, without header
    #: Sent by address, and not acknowledged yet.
    unread: deque[SentMessage] = field(default_factory=deque)
    owed: deque[Arrival] = field(default_factory=deque)  # sent by address, which is not readable
    probes: list[bytes] = field(default_factory=list)  # of ranks that wait: see `deadlocks`
    received: int = 0  # number of messages
    slots: Slots | None = None  # for small messages, in memory that both ranks share
    received_bytes: int = 0
    _reads: dict[bytes, int] = field(default_factory=dict)  # by proof: its process if readable

    def receive(self, receive: Receive) -> None:
        """Begin to receive the next message."""
        if self.arrived:
            receive.arrival = self.arrived.popleft()
        else:
            self.receives.append(receive)

    def take_slot(self) -> None:
        """Take the message in the slot, if it comes next."""
        slots, number = self.slots, self.received + 1
        if slots is not None and (slot := slots.messages).has(number):
            found = slot.take(number)
            frame = self.open(*HEADER.unpack_from(found))
            memoryview(frame.payload)[:] = found[HEADER.size :]
            self.close(frame)

    def open(self, number: int, size_bytes: int, text: bytes) -> Frame:
        """Return the frame that a header begins."""
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
            if self.receives:
                frame.receive = self.receives.popleft()
                frame.receive.arrival = arrival
            else:
                self.arrived.append(arrival)
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
        if frame.kind == PROBE:
            self.probes.append(frame.payload.tobytes())
            return None
        if frame.kind == SLOTS:  # with the name of new slots; without, it wakes this rank
            if len(frame.payload):
                self.slots = Slots.opened(frame.payload.tobytes())
            return None
        if arrival is None:
            return self._answered(frame)
        payload, kind = frame.payload, frame.kind
        self.received_bytes += len(payload)
        if frame.length > ROOM_BYTES:
            arrival.description = payload[: frame.length].tobytes()
            payload = payload[aligned(frame.length) :]
            arrival.data = payload
        read = {ADDRESS: self._read, OFFER: self._bring}.get(kind)
        answer = b"" if read is None else read(frame, payload)
        if answer is None:
            self.owed.append(arrival)
            return SentMessage([frame_of(CANNOT_READ)])
        arrival.is_complete = True
        if read is None:
            return None
        return SentMessage(
            [frame_of(HAS_READ, len(answer)), *([memoryview(answer)] if answer else [])]
        )

    def _answered(self, frame: Frame) -> SentMessage | None:
        """Take the answer to a message that was sent by address; return its bytes if wanted."""
        sent, lender = self.unread.popleft(), self.lender
        if frame.kind == HAS_READ:
            if sent.lent and lender is not None:
                lender.acknowledged(self.rank, sent.lent, frame.payload.tobytes())
            sent.end, sent.parts = 0, ()
            return None
        parts = sent.parts
        if sent.lent and lender is not None:
            parts = padded([*map(lender.to_host, parts)])
            lender.refused(self.rank, sent.lent)
        sent.buffers = [frame_of(DATA, sum(map(len, parts))), *parts]
        return sent

    def _bring(self, frame: Frame, payload: Any) -> bytes | None:
        """Copy arrays that the sender lends; return the acknowledgement, None if unreadable."""
        arrival, receive = frame.arrival, frame.receive
        assert arrival is not None
        (size_bytes, _), at = OFFER_BYTES.unpack_from(payload), OFFER_BYTES.size
        offer = payload[at : at + size_bytes].tobytes()
        is_for_it = receive is not None and receive.description == arrival.description
        into = receive.lent_memory if receive is not None and is_for_it else None
        found = None if self.lender is None else self.lender.bring(self.rank, offer, into)
        if found is None or self.lender is None:
            arrival.data = None
            return None
        arrival.data, arrival.lent = payload[at + aligned(size_bytes) :], found
        self.received_bytes += sum(each.nbytes for each in found)
        return self.lender.acknowledgement()

    def _read(self, frame: Frame, descriptor: Any) -> bytes | None:
        """Copy a value from the sender's memory; return the acknowledgement, None if unreadable."""
        assert frame.arrival is not None
        own = descriptor.tobytes()
        proof, rest = own[: process_memory.PROOF_BYTES], own[process_memory.PROOF_BYTES :]
        parts = [*PART.iter_unpack(rest)]
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
        """Return the destination of the value's bytes."""
        to, arrival = self.receive, self.arrival
        if to and arrival and to.memory is not None and to.description == arrival.description:
            return to.memory
        return np.empty(size_bytes, np.uint8)
