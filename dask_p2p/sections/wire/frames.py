"""The format of messages between two ranks: their headers, and the bytes that follow.

Messages share the sockets of the calls of all ranks. Each one has a header of the same size, whose
text has the kind of the message, the number of its communicator and the description of its value.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_p2p.errors import SectionError
from dask_p2p.geometry import round_up
from dask_p2p.transports import process_memory
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
    "allreduce()": MOST_TAG + 5,
    "gather() of an object": MOST_TAG + 6,
    "allgather() of an object": MOST_TAG + 7,
}
CALL_NAMES = {tag: name for name, tag in CALL_TAGS.items()}
#: Alignment of the arrays of a value in its bytes.
ALIGNMENT = 16
# Kinds of frames. The texts of calls begin with other characters.
VALUE, ADDRESS, OFFER, HAS_READ, CANNOT_READ, DATA, SLOTS = range(1, 8)
_LAST_KIND = SLOTS
ARRIVALS = (VALUE, ADDRESS, OFFER)  # kinds that begin a message
_KIND_AT = HEADER.size - TEXT_BYTES  # position of the kind in a header
LABEL = struct.Struct("<BIH")  # kind, number of the communicator, size of the description
#: Size of the largest description and value that lie in a header.
ROOM_BYTES = TEXT_BYTES - LABEL.size
_START = struct.Struct("<QQBIH")  # start of a message's header: tag, payload size, label
PART = struct.Struct("<QQ")  # address, size
OFFER_BYTES = struct.Struct("<QQ")  # size of an offer, and zero: so that the rest is aligned


@dataclass
class SentMessage:
    """A message that is sent."""

    buffers: Sequence[Any]  # its header, and the bytes that follow
    parts: Sequence[Any] = ()  # bytes of the value, which its receiver copies from here
    lent: int = 0  # number of arrays among them that its sender offers
    end: int | None = None  # number of buffers that the connection has sent after this message

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.buffers[1:]))

    def is_done(self, sent_buffers: int) -> bool:
        """Return whether the value may change, from the number of buffers sent so far."""
        return self.end is not None and sent_buffers >= self.end


def is_message(header: bytes | memoryview) -> bool:
    """Return whether a header is that of a message, and not that of a call of all ranks."""
    return 0 < header[_KIND_AT] <= _LAST_KIND


def inline_start(tag: int, communicator: int, description: bytes) -> bytes:
    """Return the start of the header of a message with a value in it: the value follows."""
    return _START.pack(tag, 0, VALUE, communicator, len(description)) + description


def is_inline(header: memoryview) -> bool:
    """Return whether a header is that of a message with its value in it."""
    _, size_bytes, kind, *_ = _START.unpack_from(header)
    return kind == VALUE and not size_bytes


def small_value(frame: bytes) -> tuple[int, int, bytes, bytes]:
    """Return the tag, communicator, description and bytes of the value of a small message."""
    tag, size_bytes, _, communicator, length = _START.unpack_from(frame)
    if length > ROOM_BYTES:
        at = HEADER.size + aligned(length)
        return tag, communicator, frame[HEADER.size :][:length], frame[at:]
    at = _START.size + length
    return tag, communicator, frame[_START.size : at], frame[HEADER.size if size_bytes else at :]


def value_message(
    tag: int,
    communicator: int,
    description: bytes,  # shapes and dtypes of the value
    parts: Sequence[Any],  # bytes of its arrays
    has_address: bool,  # whether the receiver copies the value from this process's memory
) -> SentMessage:
    """Return a message that can be sent."""
    length = len(description)
    before, inline = _place_description(description)
    if has_address:
        addresses = [PART.pack(_address(part), len(part)) for part in parts]
        buffers: list[Any] = [*before, b"".join([process_memory.own_proof(), *addresses])]
    elif not before and length + sum(map(aligned, map(len, parts))) <= ROOM_BYTES:
        inline = b"".join((description, *pad_parts(parts)))
        buffers = []
    else:
        buffers = [*before, *pad_parts(parts)]
    kind = ADDRESS if has_address else VALUE
    frame = _join_buffers(tag, LABEL.pack(kind, communicator, length) + inline, buffers)
    return SentMessage(frame, pad_parts(parts) if has_address else ())


def offer_message(
    tag: int,
    communicator: int,
    description: bytes,  # shapes and dtypes of the value
    parts: Sequence[Any],  # bytes in host memory, and arrays that are lent
    lent: Sequence[Array],  # these arrays
    offer: bytes,
) -> SentMessage:
    """Return a message with an offer of the arrays among its parts."""
    before, inline = _place_description(description)
    text = LABEL.pack(OFFER, communicator, len(description)) + inline
    padded_offer = OFFER_BYTES.pack(len(offer), 0) + offer.ljust(aligned(len(offer)), b"\0")
    on_host = [part for part in parts if not any(part is array for array in lent)]
    return SentMessage(
        _join_buffers(tag, text, [*before, padded_offer, *pad_parts(on_host)]), parts, len(lent)
    )


def _place_description(description: bytes) -> tuple[list[bytes], bytes]:
    """Return the description behind the header, if it has no room in it, and in it."""
    length = len(description)
    if length <= ROOM_BYTES:
        return [], description
    return [description.ljust(aligned(length), b"\0")], b""


def _join_buffers(tag: int, text: bytes, buffers: Sequence[Any]) -> list[memoryview]:
    header = HEADER.pack(tag, sum(map(len, buffers)), text)
    return [memoryview(buffer) for buffer in (header, *buffers)]


def slots_message(name: bytes) -> SentMessage:
    """Return a frame with the name of new slots; without, it wakes its receiver."""
    return SentMessage([reply_header(SLOTS, len(name)), memoryview(name)])


def pad_parts(parts: Sequence[Any]) -> list[Any]:
    """Return the parts of a value with the gaps between them."""
    if len(parts) < 2:
        return [*parts]
    padded_parts: list[Any] = []
    for part in parts:
        gap = aligned(len(part)) - len(part)
        padded_parts += [part, bytes(gap)] if gap else [part]
    return padded_parts[:-1] if gap else padded_parts


def reply_header(kind: int, size_bytes: int = 0) -> memoryview:
    """Return the header of an answer."""
    return memoryview(HEADER.pack(0, size_bytes, LABEL.pack(kind, 0, 0)))


def _address(part: Any) -> int:
    return int(np.frombuffer(part, np.uint8).ctypes.data) if len(part) else 0


def aligned(size_bytes: int) -> int:
    """Return the size of an array with the gap after it."""
    return round_up(size_bytes, ALIGNMENT)


def text_of(header: Any) -> str:
    """Return the text of the call in a header."""
    return _decoded(HEADER.unpack(header)[2])


def check_call(
    header: Any,  # received from `rank`
    expected: tuple[int, int | None, bytes],  # number, payload size, text; None: any size
    own_rank: int,  # this rank
    rank: int,
) -> int:
    """Return the size of a call's payload. Raises `SectionError` for another call than wanted."""
    number: int
    size_bytes: int
    number, size_bytes, text = HEADER.unpack(header)
    own_number, wanted_bytes, own_text = expected
    is_size = wanted_bytes is None or size_bytes == wanted_bytes
    if number == own_number and is_size and text.rstrip(b"\0") == own_text:
        return size_bytes
    calls = sorted([(own_rank, own_number, _decoded(own_text)), (rank, number, _decoded(text))])
    first, second = (f"{call} on rank {caller}" for caller, _, call in calls)
    if number != own_number:
        second = f"call {calls[1][1]} was {second}"
    raise SectionError(
        f"expected the same calls on all ranks, in the same order, but call {calls[0][1]} was "
        f"{first}, and {second}. {_remedy(*(call for *_, call in calls))}"
    )


def _remedy(first: str, second: str) -> str:
    name = first.partition("(")[0]
    if name != second.partition("(")[0] or " of " not in first:
        return (
            "Make no call of the context depend on the rank, or on values that differ between "
            "ranks."
        )
    if name in ("gather", "allgather"):
        return f"Give values of one shape and dtype, or call ctx.{name}(value, ragged=True)."
    return "Give the same arguments, and values of one shape and dtype, on all ranks."


def _decoded(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")
