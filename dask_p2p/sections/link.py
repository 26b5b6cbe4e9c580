"""One socket between two members, what is on its way through it, and who is at the other end."""

from __future__ import annotations

import select
import socket
import struct
from dataclasses import dataclass, field
from typing import TypeAlias

from dask_p2p.errors import P2PError

__all__ = ["HEADER", "TEXT_BYTES", "AttemptEndedError", "Buffer", "Link", "Peer"]

Buffer: TypeAlias = bytes | bytearray | memoryview

TEXT_BYTES = 240
HEADER = struct.Struct(f"<QQ{TEXT_BYTES}s")  # number of the call, bytes that follow, its text


class AttemptEndedError(P2PError):
    """The attempt that a member takes part in cannot go on, or has ended."""


@dataclass(frozen=True)
class Peer:
    """Another member, or this one."""

    worker: str  # address of its worker
    ticket: str  # of its run: nobody else knows it
    endpoint: str  # where its links begin: `Links.endpoint`


@dataclass
class Link:
    """One socket, and what is on its way through it in the current exchange."""

    socket: socket.socket
    sending: list[memoryview] = field(default_factory=list)
    header: memoryview = field(default_factory=lambda: memoryview(bytearray(HEADER.size)))
    receiving: memoryview | None = None  # the part of the header, or the payload, still to come
    payload: memoryview | None = None  # where it goes; None if the sender says how long it is
    is_header: bool = True
    has_received: bool = True
    received_bytes: int = 0  # in all
    waited_s: float = 0.0  # for this member, after all from whom something came before it

    @property
    def events(self) -> int:
        """What to wait for before it can go on."""
        sends: int = getattr(self.socket, "send_event", select.POLLOUT) if self.sending else 0
        return sends | (0 if self.has_received else select.POLLIN)

    def send(self) -> bool:
        """Send what the socket takes; return whether that was all."""
        while self.sending:
            try:
                sent = self.socket.sendmsg(self.sending)
            except BlockingIOError:
                return False
            while self.sending and sent >= len(self.sending[0]):
                sent -= len(self.sending.pop(0))
            if self.sending:
                self.sending[0] = self.sending[0][sent:]
        return True

    def fill(self) -> bool:
        """Receive what has come; return whether `receiving` is full."""
        while self.receiving:
            try:
                count = self.socket.recv_into(self.receiving)
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionResetError("it has ended")
            self.receiving = self.receiving[count:]
        return True
