"""Messages between two ranks: those that have arrived on a connection, and those to be received.

A message is a value of any size, which one rank sends and another one receives. Its sender need not
wait for the receiver: a rank that waits in any call of the context also receives the messages that
arrive. They are kept until the function receives them, in order.

The messages share the sockets of the calls of all ranks. Each one has a header of the same size. A
small value lies in the header. A large value of a rank on the same host is not sent: the header has
its address, the receiver copies it from the sender's memory and acknowledges.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from dask_p2p.errors import SectionError
from dask_p2p.geometry import round_up
from dask_p2p.interprocess import process_memory
from dask_p2p.types import Array

TEXT_BYTES = 240
HEADER = struct.Struct(f"<QQ{TEXT_BYTES}s")  # number, payload size in bytes, text of the call
#: Limit of the tags that users give.
MOST_TAG = 2**32
#: Tags of calls that consist of messages, by name.
CALL_TAGS = {
    "alltoall()": MOST_TAG,
    "gather(ragged=True)": MOST_TAG + 1,
    "allgather(ragged=True)": MOST_TAG + 2,
    "scatter()": MOST_TAG + 3,
    "bcast()": MOST_TAG + 4,
}
CALL_NAMES = {tag: name for name, tag in CALL_TAGS.items()}
#: Alignment of the arrays of a value in its bytes.
ALIGNMENT = 16
#: Size of the smallest value that a rank of the same host copies from the sender's memory.
LEAST_READ_BYTES = 1 << 16
# Kinds of frames. The texts of calls begin with other characters.
_VALUE, _ADDRESS, _HAS_READ, _CANNOT_READ, _DATA, _PROBE = range(1, 7)
_LAST_KIND = _PROBE
_KIND_AT = HEADER.size - TEXT_BYTES  # position of the kind in a header
_LABEL = struct.Struct("<BIH")  # kind, number of the communicator, size of the description
_ROOM_BYTES = TEXT_BYTES - _LABEL.size
#: Size of the largest description and value that lie in a header.
MOST_INLINE_BYTES = _ROOM_BYTES
_START = struct.Struct("<QQBIH")  # start of a message's header: tag, payload size, label
_PART = struct.Struct("<QQ")  # address, size
_BYTE = np.dtype(np.uint8)
#: A message in its header: tag, number of the communicator, description, bytes of the value.
InlineValue: TypeAlias = tuple[int, int, bytes, bytes]


@dataclass
class Arrival:
    """A message that arrives."""

    tag: int
    communicator: int
    description: bytes = b""  # shapes and dtypes of the value
    data: Any = b""  # bytes of the value, each array at a multiple of `ALIGNMENT`
    is_complete: bool = False


@dataclass
class Receive:
    """A message that the function receives: the next one that has not been received."""

    tag: int
    communicator: int
    description: bytes | None = None  # of the value that `memory` is for
    memory: Any = None  # destination of the value's bytes, if it is given
    arrival: Arrival | None = None  # the message, once its header is here

    @property
    def is_complete(self) -> bool:
        """True once the message is here."""
        return self.arrival is not None and self.arrival.is_complete

    def memory_for(self, description: bytes, size_bytes: int) -> Array:
        """Return the destination of a value's bytes."""
        if self.memory is not None and description == self.description:
            return self.memory
        return np.empty(size_bytes, np.uint8)


@dataclass
class SentMessage:
    """A message that is sent."""

    buffers: Sequence[Any]  # its header, and the bytes that follow
    parts: Sequence[Any] = ()  # bytes of the value, which its receiver copies from here
    end: int | None = None  # number of buffers that the connection has sent after this message

    def is_done(self, sent_buffers: int) -> bool:
        """Return whether the value may change, from the number of buffers sent so far."""
        return self.end is not None and sent_buffers >= self.end


@dataclass
class Mailbox:
    """The messages of one connection."""

    arrived: deque[Arrival] = field(default_factory=deque)  # not received by the function yet
    receives: deque[Receive] = field(default_factory=deque)  # begun by the function, without header
    unread: deque[SentMessage] = field(
        default_factory=deque
    )  # sent by address, and not acknowledged yet
    owed: deque[Arrival] = field(default_factory=deque)  # sent by address, which is not readable
    probes: list[bytes] = field(default_factory=list)  # of ranks that wait: see `deadlocks`
    received: int = 0  # number of messages
    received_bytes: int = 0
    _reads: dict[bytes, int] = field(default_factory=dict)  # by proof: its process if readable

    def receive(self, receive: Receive) -> None:
        """Begin to receive the next message."""
        if self.arrived:
            receive.arrival = self.arrived.popleft()
        else:
            self.receives.append(receive)

    def open(self, number: int, size_bytes: int, text: bytes) -> Frame:
        """Return the frame that a header begins."""
        kind, communicator, length = _LABEL.unpack_from(text)
        frame = Frame(kind, length)
        if kind == _DATA:
            frame.arrival = self.owed.popleft()
            frame.payload = frame.arrival.data
        elif kind in (_VALUE, _ADDRESS):
            frame.arrival = arrival = Arrival(number, communicator)
            self.received += 1
            if self.receives:
                frame.receive = self.receives.popleft()
                frame.receive.arrival = arrival
            else:
                self.arrived.append(arrival)
            if length <= _ROOM_BYTES:
                arrival.description = text[_LABEL.size :][:length]
                arrival.data = text[_LABEL.size + length :]
            if size_bytes and kind == _VALUE and length <= _ROOM_BYTES:
                arrival.data = frame.payload = frame.memory(size_bytes)
        if frame.payload is None:
            frame.payload = np.empty(size_bytes, np.uint8)
        return frame

    def close(self, frame: Frame) -> SentMessage | None:
        """Take a frame that is complete; return an answer to send, if there is one."""
        arrival = frame.arrival
        if frame.kind == _PROBE:
            self.probes.append(frame.payload.tobytes())
            return None
        if arrival is None:
            sent = self.unread.popleft()
            if frame.kind == _HAS_READ:
                sent.end = 0
                return None
            sent.buffers = [_frame(_DATA, sum(map(len, sent.parts))), *sent.parts]
            return sent
        payload, kind = frame.payload, frame.kind
        self.received_bytes += len(payload)
        if frame.length > _ROOM_BYTES:
            arrival.description = payload[: frame.length].tobytes()
            payload = payload[_aligned(frame.length) :]
            arrival.data = payload
        if kind == _ADDRESS and not self._read(frame, payload):
            self.owed.append(arrival)
            return SentMessage([_frame(_CANNOT_READ)])
        arrival.is_complete = True
        return SentMessage([_frame(_HAS_READ)]) if kind == _ADDRESS else None

    def _read(self, frame: Frame, descriptor: Any) -> bool:
        """Copy a value from the sender's memory, if it is readable; return whether it is."""
        assert frame.arrival is not None
        own = descriptor.tobytes()
        proof, rest = own[: process_memory.PROOF_BYTES], own[process_memory.PROOF_BYTES :]
        parts = [*_PART.iter_unpack(rest)]
        sizes = [size_bytes for _, size_bytes in parts]
        memory = frame.arrival.data = frame.memory(sum(map(_aligned, sizes[:-1])) + sizes[-1])
        if proof not in self._reads:
            self._reads[proof] = process_memory.readable_pid(proof)
        if not (pid := self._reads[proof]):
            return False
        at = 0
        for address, size_bytes in parts:
            runs = process_memory.runs_of(address, (size_bytes,), (1,), 1)
            process_memory.read(pid, runs, _BYTE, memory[at : at + size_bytes])
            at += _aligned(size_bytes)
        self.received_bytes += at
        return True

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
        if self.receive is None or self.arrival is None:
            return np.empty(size_bytes, np.uint8)
        return self.receive.memory_for(self.arrival.description, size_bytes)


def is_message(header: bytes | memoryview) -> bool:
    """Return whether a header is that of a message, and not that of a call of all ranks."""
    return 0 < header[_KIND_AT] <= _LAST_KIND


def inline_header(tag: int, communicator: int, description: bytes, data: bytes) -> bytes:
    """Return the header of a message with a value of at most `MOST_INLINE_BYTES`."""
    start = _START.pack(tag, 0, _VALUE, communicator, len(description))
    return (start + description + data).ljust(HEADER.size, b"\0")


def inline_value(header: memoryview) -> InlineValue | None:
    """Return the message in a header; None for any other header, and for larger values."""
    tag, size_bytes, kind, communicator, length = _START.unpack_from(header)
    if kind != _VALUE or size_bytes or length > _ROOM_BYTES:
        return None
    text = bytes(header)
    end = _START.size + length
    return tag, communicator, text[_START.size : end], text[end:]


def sent_message(
    tag: int,
    communicator: int,
    description: bytes,  # shapes and dtypes of the value
    parts: Sequence[Any],  # bytes of its arrays
    has_address: bool,  # whether the receiver copies the value from this process's memory
) -> SentMessage:
    """Return a message that can be sent."""
    length = len(description)
    is_inline = length <= _ROOM_BYTES
    before = [] if is_inline else [description.ljust(_aligned(length), b"\0")]
    inline = description if is_inline else b""
    if has_address:
        own = [process_memory.own_proof()]
        own += [_PART.pack(_address(part), len(part)) for part in parts]
        buffers: list[Any] = [*before, b"".join(own)]
    elif is_inline and length + sum(map(_aligned, map(len, parts))) <= _ROOM_BYTES:
        inline = b"".join((description, *_padded(parts)))
        buffers = []
    else:
        buffers = [*before, *_padded(parts)]
    kind = _ADDRESS if has_address else _VALUE
    text = _LABEL.pack(kind, communicator, length) + inline
    header = HEADER.pack(tag, sum(map(len, buffers)), text)
    frame = [memoryview(each) for each in (header, *buffers)]
    return SentMessage(frame, _padded(parts) if has_address else ())


def sent_probe(probe: bytes) -> SentMessage:
    """Return a probe that can be sent."""
    return SentMessage([_frame(_PROBE, len(probe)), memoryview(probe)])


def _padded(parts: Sequence[Any]) -> list[Any]:
    """Return the parts of a value with the gaps between them."""
    if len(parts) < 2:
        return [*parts]
    found: list[Any] = []
    for part in parts:
        gap = _aligned(len(part)) - len(part)
        found += [part, bytes(gap)] if gap else [part]
    return found[:-1] if gap else found


def _frame(kind: int, size_bytes: int = 0) -> memoryview:
    return memoryview(HEADER.pack(0, size_bytes, _LABEL.pack(kind, 0, 0)))


def _address(part: Any) -> int:
    return int(np.frombuffer(part, np.uint8).ctypes.data) if len(part) else 0


def _aligned(size_bytes: int) -> int:
    return round_up(size_bytes, ALIGNMENT)
