"""Slots: small frames in memory that ranks of two processes of one host share.

Most of the time of a small frame in a socket is that of the system calls. A slot needs none. Each
connection has two slots in each direction: one for messages, and one for calls of all ranks. The
receiver polls a slot as long as it polls the socket. The sender uses the socket if the slot is
occupied, or if the receiver sleeps. Messages are numbered, in slots and sockets alike, and so are
calls. So both keep their order.

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
from dask_p2p.sections.wire.messages.format import HEADER

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
        self.written, self.taken = ((start + at) // _WORD_BYTES for at in (_WRITTEN, _TAKEN))
        self.frame = memory[start + _FRAME :][: _HEADER_BYTES + MOST_BYTES]
        # A header begins with its number, and the size of the payload.
        self._size = (start + _FRAME) // _WORD_BYTES + 1
        #: Its parts. At the receiver they may change after `free`.
        self.header, self.payload = self.frame[:_HEADER_BYTES], self.frame[_HEADER_BYTES:]
        self.last = 0  # number of the last frame that was put into the slot

    def has(self, number: int, looks: int = 1) -> bool:
        """Return whether a frame of this number is here after some looks. The first one is 1."""
        words, at = self.words, self.written
        for _ in range(looks):  # noqa: SIM110  `any` takes longer
            if words[at] == number:
                return True
        return False

    def take(self, number: int) -> bytes:
        """Return the frame of this number, and free the slot."""
        words = self.words
        frame = self.frame[: _HEADER_BYTES + words[self._size]].tobytes()
        words[self.taken] = number
        return frame

    def free(self, number: int) -> None:
        """Free the slot: this frame has been read."""
        self.words[self.taken] = number


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
    def made(cls) -> tuple[Slots, bytes] | None:
        """Return new slots, and the text for `opened` on the peer; None without shared memory."""
        try:
            segment = Segment.make(_SIZE_BYTES)
        except OSError:  # too many open files
            return None
        return cls(segment, is_maker=True), " ".join(map(str, segment.name)).encode()

    @classmethod
    def opened(cls, text: bytes) -> Slots | None:
        """Return the slots that the peer has made; None if this process cannot open them."""
        with suppress(UnsuitableError, OSError, ValueError):
            kernel, namespace, *numbers = text.decode().split()
            name = SegmentName(kernel, namespace, *map(int, numbers))
            if name.size_bytes == _SIZE_BYTES:
                found = cls(Segment.open(name), is_maker=False)
                found.sleeps = False
                return found
        return None

    def put(self, slot: FrameSlot, number: int, frame: bytes) -> bool:
        """Put a frame into a slot; return False if that is not free, or the receiver sleeps."""
        words = self._words
        if words[self._peer_sleeps] or words[slot.taken] != slot.last:
            return False
        self._segment = None
        slot.frame[: len(frame)] = frame
        words[slot.written] = slot.last = number
        return True

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
