"""Slots: small messages in memory that ranks of two processes of one host share.

Most of the time of a small message in a socket is that of two system calls. A slot needs none. Each
connection has one slot in each direction, for the header of a message with a small value. The
receiver polls the slot as long as it polls the socket. The sender uses the socket if the slot is
occupied, or if the receiver sleeps. Messages are numbered, in slots and sockets alike, so they keep
their order.

A sender that has filled the slot wakes the receiver by the socket if it has begun to sleep. Slots
need a processor whose stores appear in order in other processes, as those of x86 do: Python has no
barriers. Such a processor may still delay a store while later loads complete, so that the sender
does not see that the receiver sleeps. So the receiver looks again after a moment.
"""

from __future__ import annotations

import platform
from contextlib import suppress

from dask_p2p.errors import UnsuitableError
from dask_p2p.interprocess.segments import Segment, SegmentName

#: True if stores appear in order in other processes.
HAS_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")
#: Looks at the slot for each attempt to receive from the socket: half a microsecond.
LOOKS = 16
#: More than the longest time until a store appears in other processes.
STORE_S = 1e-3
_WORD_BYTES, _LINE_BYTES = 8, 64
_SLOT_BYTES = 512
# Positions in a slot. Its sender writes the first two, and its receiver the others.
_WRITTEN, _HEADER, _TAKEN, _SLEEPS = 0, _LINE_BYTES, 384, 384 + _WORD_BYTES


class Slots:
    """The slots of one connection, as one of its ends has them."""

    def __init__(self, segment: Segment, header_bytes: int, is_maker: bool) -> None:
        #: Kept until the peer has opened it.
        self._segment: Segment | None = segment
        memory = segment.bytes.data
        self._words = memory.cast("Q")
        sent, received = (0, _SLOT_BYTES) if is_maker else (_SLOT_BYTES, 0)
        self._sent_header = memory[sent + _HEADER :][:header_bytes]
        #: Header of the message that is here; it may change after `free`.
        self.received_header = memory[received + _HEADER :][:header_bytes]
        self._written, self._taken, self._peer_sleeps = _words(sent)
        self._arrived, self._own_taken, self._own_sleeps = _words(received)
        self._last = 0  # number of the last message that was put into the slot
        if is_maker:
            self._words[self._peer_sleeps] = 1  # until it opens the memory

    @classmethod
    def made(cls, header_bytes: int) -> tuple[Slots, bytes] | None:
        """Return new slots, and the text for `opened` on the peer; None without shared memory."""
        try:
            segment = Segment.make(2 * _SLOT_BYTES)
        except OSError:  # too many open files
            return None
        return cls(segment, header_bytes, is_maker=True), " ".join(map(str, segment.name)).encode()

    @classmethod
    def opened(cls, text: bytes, header_bytes: int) -> Slots | None:
        """Return the slots that the peer has made; None if this process cannot open them."""
        with suppress(UnsuitableError, OSError, ValueError):
            kernel, namespace, *numbers = text.decode().split()
            name = SegmentName.parse([kernel, namespace, *map(int, numbers)])
            if name.size_bytes == 2 * _SLOT_BYTES:
                found = cls(Segment.open(name), header_bytes, is_maker=False)
                found.sleeps = False
                return found
        return None

    def put(self, number: int, header: bytes) -> bool:
        """Put a message into the slot; return False if it is not free, or the receiver sleeps."""
        words = self._words
        if words[self._peer_sleeps] or words[self._taken] != self._last:
            return False
        self._segment = None
        self._sent_header[:] = header
        words[self._written] = self._last = number
        return True

    def has(self, number: int, looks: int = 1) -> bool:
        """Return whether a message of this number is here after some looks. The first one is 1."""
        words, at = self._words, self._arrived
        for _ in range(looks):  # noqa: SIM110  `any` takes longer
            if words[at] == number:
                return True
        return False

    def free(self, number: int) -> None:
        """Free the slot: this message has been read."""
        self._words[self._own_taken] = number

    @property
    def peer_sleeps(self) -> bool:
        """True if the peer does not poll."""
        return bool(self._words[self._peer_sleeps])

    @property
    def sleeps(self) -> bool:
        """True if this end does not poll."""
        return bool(self._words[self._own_sleeps])

    @sleeps.setter
    def sleeps(self, sleeps: bool) -> None:
        self._words[self._own_sleeps] = sleeps


def _words(start: int) -> list[int]:
    """Return the numbers of the words of a slot."""
    return [(start + at) // _WORD_BYTES for at in (_WRITTEN, _TAKEN, _SLEEPS)]
