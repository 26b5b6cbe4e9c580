"""Streams between ranks of one process: bytes in memory, without sockets.

A stream has the methods of sockets that connections use. The kernel wakes a thread that polls a
socket. Here each rank has a bell: its thread polls the bell, and the streams of its peers ring it.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Any

from dask_p2p.errors import SectionError

_PIPE_BYTES = 1 << 20  # limit of unread bytes: a writer of more waits


class Bell:
    """Wakes the thread of one rank, from any other thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = True
        with explain_files():
            self._number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._number

    def ring(self) -> None:
        """Wake the thread, or keep it from going to sleep."""
        with self._lock:  # after closing, the number may be that of another file
            if self._is_open:
                os.eventfd_write(self._number, 1)

    def hush(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._number)

    def close(self) -> None:
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
            size_bytes = self.size_bytes - before
        self._reader.ring()
        return size_bytes

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
        return self._outgoing.write(buffers)

    def send(self, data: Any) -> int:
        return self._outgoing.write((data,))

    def recv_into(self, into: Any) -> int:
        return self._incoming.read(memoryview(into))

    def is_ready(self, events: int) -> bool:
        reads = self._incoming.size_bytes > 0 or self._incoming.is_closed
        writes = self._outgoing.has_room or self._outgoing.is_closed
        return bool((reads and events & select.POLLIN) or (writes and events & select.POLLOUT))

    def close(self) -> None:
        """Close this end. The peer can still read all bytes that were sent."""
        self._incoming.close()
        self._outgoing.close()
        self._peer.ring()


def pair(one: Bell, other_bell: Bell) -> tuple[Stream, Stream]:
    """Return both ends of a stream between two ranks, in the order of their bells."""
    forth, back_pipe = _Pipe(one, other_bell), _Pipe(other_bell, one)
    return Stream(back_pipe, forth, other_bell), Stream(forth, back_pipe, one)


# Open files: each connection to a rank in another process is one open file.
#
# Linux allows 1,024 by default, far below its own bounds. A process may raise this soft limit
# itself, up to the hard limit.

_SPARE = 384  # for all other files that a process opens while ranks run
_TOO_MANY = {errno.EMFILE, errno.ENFILE}
_REMEDY = (
    "Raise the hard limit (ulimit -Hn, LimitNOFILE= of a service, --ulimit nofile= of a "
    "container), or give the section fewer ranks, ranks=."
)
_raising = threading.Lock()


def reserve_files(ranks: int, remote_ranks: int) -> None:
    """Raise the limit of open files for the connections of this process's ranks to others.

    Raises
    ------
    SectionError
        If the hard limit is too low for these connections and the files that are open already.
    """
    with _raising:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft, hard = (inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
        with explain_files():  # another rank's function may have taken all files
            file_count = len(os.listdir("/proc/self/fd")) + ranks * remote_ranks
        if file_count > hard:
            raise SectionError(
                f"expected room for {file_count} open files in a worker's process, where {ranks} "
                f"of {ranks + remote_ranks} ranks run, got a hard limit of {hard}. {_REMEDY}"
            )
        new_limit = min(hard, file_count + _SPARE)
        if soft < new_limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(new_limit), limits[1]))


@contextmanager
def explain_files() -> Iterator[None]:
    """Call `check_files` for system errors."""
    try:
        yield
    except OSError as exc:
        check_files(exc)
        raise


def check_files(exc: OSError) -> None:
    """Raise `SectionError` if a system error means that too many files are open here."""
    if exc.errno in _TOO_MANY:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise SectionError(
            f"expected room for one more open file in a worker's process, got a limit of {soft}: "
            f"{exc}. Close files that the function opens. {_REMEDY}"
        ) from exc
