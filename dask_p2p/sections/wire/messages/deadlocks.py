"""Ranks that wait for each other's messages: found by probes along the chain of waits.

A rank that has waited for long for a message sends a probe to the rank that should send it. If that
rank waits for a message as well, it passes the probe on. A probe that comes back, to the wait that
began it, has found ranks that wait in a circle.

A probe has the number of messages that its last sender had received. If the receiver has sent more,
they are in transit, and end that wait. Otherwise that rank waits until the receiver sends, which it
cannot do while it waits itself. So a circle that a probe has found never ends.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from dask_p2p.errors import SectionError

_FIELDS = struct.Struct("<QQQ")


class Probe(NamedTuple):
    """A probe."""

    rank: int  # rank of the first sender
    wait: int  # number of the first sender's wait
    received: int  # messages received so far by the last sender, from the probe's receiver
    path: str  # calls of the waiting ranks

    def packed(self) -> bytes:
        """Return the bytes of a frame."""
        return _FIELDS.pack(*self[:3]) + self.path.encode()

    def passed_on(self, received: int, rank: int, call: str) -> Probe:
        """Return the probe for the next rank."""
        return Probe(self.rank, self.wait, received, f"{self.path}, rank {rank} in {call}")

    def error(self) -> SectionError:
        """Return the error of ranks that wait in a circle."""
        return SectionError(
            f"deadlock: ranks wait for each other: {self.path}. Let one of them send before it "
            f"receives, or call ctx.sendrecv."
        )


def unpacked(frame: bytes) -> Probe:
    """Return the probe in a frame."""
    rank, wait, received = _FIELDS.unpack_from(frame)
    return Probe(rank, wait, received, frame[_FIELDS.size :].decode(errors="replace"))
