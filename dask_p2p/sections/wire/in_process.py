"""Streams between ranks of one process: bytes in memory, without sockets.

A stream has the methods of sockets that connections use. The kernel wakes a thread that polls a
socket. Here each rank has a bell: its thread polls the bell, and the streams of its peers ring it.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from dask_p2p.sections.wire.files import check_files

_PIPE_BYTES = 1 << 20  # limit of unread bytes: a writer of more waits


class Bell:
    """Wakes the thread of one rank, from any other thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = True
        try:
            self._number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as exc:
            check_files(exc)
            raise

    def fileno(self) -> int:
        """Return the file descriptor that the thread polls."""
        return self._number

    def ring(self) -> None:
        """Wake the thread, or keep it from going to sleep."""
        with self._lock:  # after closing, the number may be that of another file
            if self._is_open:
                os.eventfd_write(self._number, 1)

    def hush(self) -> None:
        """Clear all rings so far."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._number)

    def close(self) -> None:
        """Close the bell: later rings do nothing."""
        with self._lock:
            self._is_open = False
            os.close(self._number)


class _Pipe:
    """Bytes in flight from one rank to another."""

    def __init__(self, writer: Bell, reader: Bell) -> None:
        self._writer, self._reader = writer, reader
        self._lock = threading.Lock()
        self._parts = deque[memoryview]()
        self.size_bytes = 0
        self.is_closed = False

    @property
    def has_room(self) -> bool:
        return self.size_bytes < _PIPE_BYTES

    def write(self, buffers: Iterable[Any]) -> int:
        """Take bytes while there is room; return their number."""
        with self._lock:
            if self.is_closed:
                raise BrokenPipeError("the peer's end is closed")
            if not self.has_room:
                raise BlockingIOError
            before = self.size_bytes
            for buffer in buffers:
                if part := bytes(buffer[: _PIPE_BYTES - self.size_bytes]):
                    self._parts.append(memoryview(part))
                    self.size_bytes += len(part)
            taken = self.size_bytes - before
        self._reader.ring()
        return taken

    def read(self, into: memoryview) -> int:
        """Copy unread bytes into `into`; return their number, 0 at the end of the stream."""
        with self._lock:
            had_room, count = self.has_room, 0
            while self._parts and count < len(into):
                part = self._parts.popleft()
                size = min(len(part), len(into) - count)
                into[count : count + size] = part[:size]
                if size < len(part):
                    self._parts.appendleft(part[size:])
                count += size
            self.size_bytes -= count
            if not count and not self.is_closed:
                raise BlockingIOError
        if not had_room:
            self._writer.ring()
        return count

    def close(self) -> None:
        with self._lock:
            self.is_closed = True


class Stream:
    """One end of a stream. Its methods raise the errors of non-blocking sockets."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, peer: Bell) -> None:
        self._incoming, self._outgoing, self._peer = incoming, outgoing, peer

    def sendmsg(self, buffers: Iterable[Any]) -> int:
        """Send bytes while there is room; return their number."""
        return self._outgoing.write(buffers)

    def send(self, data: Any) -> int:
        """Send bytes while there is room; return their number."""
        return self._outgoing.write((data,))

    def recv_into(self, into: Any) -> int:
        """Receive bytes that have arrived; return their number."""
        return self._incoming.read(memoryview(into))

    def is_ready(self, events: int) -> bool:
        """Return whether one of these events of `select.poll` is ready."""
        reads = self._incoming.size_bytes > 0 or self._incoming.is_closed
        writes = self._outgoing.has_room or self._outgoing.is_closed
        return bool((reads and events & select.POLLIN) or (writes and events & select.POLLOUT))

    def close(self) -> None:
        """Close this end. The peer can still read all bytes that were sent."""
        self._incoming.close()
        self._outgoing.close()
        self._peer.ring()


def pair(one: Bell, other: Bell) -> tuple[Stream, Stream]:
    """Return both ends of a stream between two ranks, in the order of their bells."""
    there, back = _Pipe(one, other), _Pipe(other, one)
    return Stream(back, there, other), Stream(there, back, one)
