"""Connection set-up: the lower rank connects, and sends both attempt tokens.

So two ranks never have two connections. The lower rank does not connect if it calls something else,
or if its function has returned. The higher rank, which waits, then *knocks*: it connects, sends
both tokens, and closes that connection. A knock makes the lower rank connect.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf

from dask_p2p.errors import TransferError
from dask_p2p.sections.wire.connection import Connection
from dask_p2p.sections.wire.endpoint import Endpoint, RankAddress, Reach
from dask_p2p.sections.wire.files import reserve_files
from dask_p2p.sections.wire.in_process import Bell, Stream

_KNOCK_S = 0.5  # time that a rank waits for a lower one before it knocks
_AT_DOOR_S = 1.0  # timeout of a knock's connection


class ConnectionSetup:
    """Makes and accepts the connections of one rank."""

    def __init__(self, reach: Reach) -> None:  # network settings of its worker
        #: Wakes the rank's thread.
        self.bell = Bell()
        try:
            self._endpoint = Endpoint(reach, self.bell)
        except BaseException:
            self.bell.close()
            raise
        self.endpoint = self._endpoint.text
        #: Knocks with tokens still to send, by file descriptor.
        self._knocks: dict[int, Connection] = {}
        self._knocked = set[int]()  # ranks that got a knock in this attempt: one at most
        self._knock_s = inf  # time of the next knock; infinite until a rank is missed

    def start(self, rank: int, peers: Sequence[RankAddress]) -> None:
        """Begin an attempt, with the attempt tokens and addresses of all ranks."""
        self._rank, self._peers, self._own = rank, peers, peers[rank]
        self._ranks = {peer.token: rank for rank, peer in enumerate(peers)}
        self._is_here = [self._endpoint.is_here(peer.endpoint) for peer in peers]

    @property
    def has_company(self) -> bool:
        """True if other ranks run in this process."""
        return sum(self._is_here) > 1

    def reserve_files(self) -> None:
        """Raise the limit of open files for all connections; `SectionError` if not permitted."""
        here = sum(self._is_here)
        reserve_files(here, len(self._is_here) - here)

    def close(self) -> None:
        """Stop listening, and give up knocks."""
        self._endpoint.close()
        for knock in self._knocks.values():
            knock.close()
        self.bell.close()

    def connect(self, rank: int, **most_s: float) -> Connection:
        """Return a connection to a rank. Raises `OSError` if the rank cannot be reached."""
        peer = self._peers[rank]
        tokens = f"{self._own.token}{peer.token}".encode()
        if (stream := self._endpoint.stream_to(peer.endpoint, tokens)) is not None:
            return Connection(stream)
        made = self._endpoint.connect(peer.endpoint, peer.worker, **most_s)
        return Connection(made, [memoryview(tokens)])

    def begin(self) -> None:
        """Forget the time of the next knock, as an exchange begins."""
        self._knock_s = inf

    def register(self, poll: select.poll, missing: Iterable[int]) -> float:
        """Register descriptors to poll for `callers`; return the longest time to poll, in seconds.

        `missing` are ranks without a connection. Lower ones are expected to connect.
        """
        missing = [each for each in missing if each < self._rank and each not in self._knocked]
        left_s = inf
        if missing:
            now_s = time.monotonic()
            self._knock_s = min(self._knock_s, now_s + _KNOCK_S)
            left_s = self._knock_s - now_s
        if left_s <= 0.0:
            for rank in missing:
                self._knock(rank)
            left_s = inf
        for number in self._endpoint.numbers:
            poll.register(number, select.POLLIN)
        for number, knock in self._knocks.items():
            poll.register(number, knock.events)
        return min(left_s, self._endpoint.patience_s)

    def _knock(self, rank: int) -> None:
        self._knocked.add(rank)
        with suppress(OSError):  # the rank is lost, which the scheduler will notice
            knock = self.connect(rank, most_s=_AT_DOOR_S)
            if isinstance(knock.socket, Stream):
                knock.close()  # the tokens have arrived
            else:
                self._knocks[knock.socket.fileno()] = knock

    def _show_tokens(self, ready: set[int]) -> None:
        for number in ready & self._knocks.keys():
            try:
                is_done = self._knocks[number].send()
            except (OSError, TransferError):
                is_done = True  # the rank is lost, as above
            if is_done:
                self._knocks.pop(number).close()

    def callers(self, ready: set[int]) -> list[tuple[int, Connection | None]]:
        """Accept new connections; return their ranks with the connections. A knock has None."""
        self._show_tokens(ready)
        found: list[tuple[int, Connection | None]] = []
        length = len(self._own.token)
        for received, made in self._endpoint.accepted(ready, 2 * length):
            theirs, own = received[:length].decode("latin"), received[length:].decode("latin")
            rank = self._ranks.get(theirs)
            if own == self._own.token and rank is not None and rank < self._rank:
                found.append((rank, Connection(made)))
                continue
            made.close()  # a knock, a rank of another attempt, or no rank at all
            if own == self._own.token and rank is not None and rank > self._rank:
                found.append((rank, None))
        return found
