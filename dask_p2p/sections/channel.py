"""Channels: large messages between hosts by UCX, where both ends have it.

The socket of a link still carries all headers, so calls that differ are found, and a peer that dies
is noticed, as everywhere. What is large goes beside it, from and to memory of the host or of a GPU:
by InfiniBand, or whatever else UCX finds.

Such a message goes in parts. Over a connection that is cut none of them comes, and UCX may not say
so. How long a peer computes before it sends does not count: parts are due once the header is here.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections import deque
from itertools import count
from typing import Any

from dask_p2p.errors import SilentError
from dask_p2p.interprocess.messenger import Message, Messenger

#: Of a message by UCX. Smaller ones are quicker in a socket, together with their header.
LEAST_BYTES = 1 << 16
_PART_BYTES = 1 << 25
# Those of the worker's transport are below: see `Mailboxes`.
_FIRST_TAG = 1 << 62
_OFFER = struct.Struct("<QQ")  # the first tag, and how many endpoints have been closed


class Channel:
    """What of messages between two members goes by UCX."""

    def __init__(
        self,
        messenger: Messenger,  # of this process
        address: bytes,  # of the peer's messenger
        timeout_s: float,  # after which the next part is given up
    ) -> None:
        self._messenger, self._address, self._timeout_s = messenger, address, timeout_s
        first = _FIRST_TAG + secrets.randbits(60)
        self.offer = _OFFER.pack(first, messenger.closed(address))
        self._own_tags = count(first)
        self._sending = deque[Message]()
        self._receiving = deque[Message]()
        self._due_s: float | None = None  # when the next part has to be here

    def open(self, offer: Any) -> None:
        """Begin, with what the peer offers: see `offer`."""
        first, closed = _OFFER.unpack(offer)
        self._messenger.renew(self._address, closed)
        self._peers_tags = count(first)

    def send(self, payload: Any) -> None:
        """Begin to send bytes, which stay as they are until `has_sent`."""
        for part in _parts(payload):
            tag = next(self._peers_tags)
            self._sending.append(self._messenger.send(self._address, part, tag, other_host=True))

    def receive(self, payload: Any) -> None:
        """Begin to receive as many bytes."""
        for part in _parts(payload):
            self._receiving.append(self._messenger.receive(part, next(self._own_tags)))

    def expect(self) -> None:
        """Take note that the peer sends what is to be received."""
        self._due_s = time.monotonic() + self._timeout_s

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way."""
        return bool(self._sending or self._receiving)

    def has_sent(self) -> bool:
        """Return whether all was sent; `TransferError` if something cannot be."""
        _drop_done(self._sending)
        return not self._sending

    def has_received(self) -> bool:
        """Return whether all has come; `TransferError` if something does not."""
        if _drop_done(self._receiving):
            self.expect()
        if self._receiving and self._due_s is not None and time.monotonic() > self._due_s:
            raise SilentError(f"no bytes within {self._timeout_s:g} s")
        return not self._receiving

    def close(self) -> None:
        """Give up what is on its way. As long as UCX is not done with memory, it is kept."""
        for message in (*self._sending, *self._receiving):
            message.give_up(self._timeout_s)


def _parts(payload: Any) -> list[Any]:
    return [payload[at : at + _PART_BYTES] for at in range(0, len(payload), _PART_BYTES)]


def _drop_done(messages: deque[Message]) -> bool:
    """Forget messages that have arrived, from the first one on; return whether there are any."""
    any_done = False
    while messages and messages[0].done:
        messages.popleft().result(0.0)
        any_done = True
    return any_done
