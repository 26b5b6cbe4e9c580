"""Channels: large messages between hosts by UCX, where both ends support it.

The socket of a connection still carries all headers. So differing calls and dead peers are detected
as everywhere else. Large payloads go by UCX, from and to memory of the host or of a GPU, over
InfiniBand or any other transport that UCX finds.

A large message is sent in parts. If a connection is lost, no part arrives, and UCX may not report
it. So parts have a deadline, which starts when the header arrives: the time that a peer computes
before it sends does not count.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections import deque
from itertools import count
from typing import Any

from dask_p2p import tuning
from dask_p2p.errors import SilentError
from dask_p2p.interprocess.messenger import Message, Messenger

# The tags of the worker's transport are below: see `Mailboxes`.
_FIRST_TAG = 1 << 62
_OFFER = struct.Struct("<QQ")  # first tag, number of endpoints closed so far


class Channel:
    """The UCX path for large messages between two ranks."""

    def __init__(
        self,
        messenger: Messenger,  # of this process
        address: bytes,  # of the peer's messenger
        timeout_s: float,  # longest wait for the next part
    ) -> None:
        self._messenger, self._address, self._timeout_s = messenger, address, timeout_s
        first = _FIRST_TAG + secrets.randbits(60)
        self.offer = _OFFER.pack(first, messenger.closed(address))
        self._own_tags = count(first)
        self._sending = deque[Message]()
        self._receiving = deque[Message]()
        self._due_s: float | None = None  # deadline of the next part

    def open(self, offer: Any) -> None:
        """Open the channel with the peer's `offer`."""
        first, closed = _OFFER.unpack(offer)
        self._messenger.renew(self._address, closed)
        self._peers_tags = count(first)

    def send(self, payload: Any) -> None:
        """Begin to send bytes, which must not change until `has_sent` returns True."""
        for part in _parts(payload):
            tag = next(self._peers_tags)
            self._sending.append(self._messenger.send(self._address, part, tag, other_host=True))

    def receive(self, payload: Any) -> None:
        """Begin to receive bytes that fill `payload`."""
        for part in _parts(payload):
            self._receiving.append(self._messenger.receive(part, next(self._own_tags)))

    def expect(self) -> None:
        """Start the deadline of the next part: the peer has begun to send."""
        self._due_s = time.monotonic() + self._timeout_s

    @property
    def is_busy(self) -> bool:
        """True if a message is in flight."""
        return bool(self._sending or self._receiving)

    def has_sent(self) -> bool:
        """Return whether all messages were sent; raise `TransferError` if one failed."""
        _drop_done(self._sending)
        return not self._sending

    def has_received(self) -> bool:
        """Return whether all messages have arrived; raise `TransferError` if one failed."""
        if _drop_done(self._receiving):
            self.expect()
        if self._receiving and self._due_s is not None and time.monotonic() > self._due_s:
            raise SilentError(f"no bytes within {self._timeout_s:g} s")
        return not self._receiving

    def close(self) -> None:
        """Give up messages in flight. Their memory is kept until UCX no longer uses it."""
        for message in (*self._sending, *self._receiving):
            message.give_up(self._timeout_s)


def _parts(payload: Any) -> list[Any]:
    size_bytes = tuning.current.ucx_part_bytes
    return [payload[at : at + size_bytes] for at in range(0, len(payload), size_bytes)]


def _drop_done(messages: deque[Message]) -> bool:
    """Drop completed messages, from the first one on; return whether there were any."""
    any_done = False
    while messages and messages[0].done:
        messages.popleft().result(0.0)
        any_done = True
    return any_done
