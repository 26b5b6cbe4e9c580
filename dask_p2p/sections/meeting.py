"""How two members come to a link: the one with the lower rank connects, and shows both tickets.

So there is never a second one. A member that waits for one with a lower rank may wait in vain, if
that one calls something else, or its function has returned. So after a while it knocks: it
connects, shows both tickets, and leaves. The member with the lower rank makes the link then.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf

from dask_p2p.errors import TransferError
from dask_p2p.sections.endpoint import Endpoint, Reach
from dask_p2p.sections.files import reserve_files
from dask_p2p.sections.in_process import Bell, Stream
from dask_p2p.sections.link import Link, Peer

_KNOCK_S = 0.5  # how long a member waits for one with a lower rank before it knocks
_AT_DOOR_S = 1.0  # how long it may take to reach that one


class Meeting:
    """Where one member meets the others of its gang."""

    def __init__(self, reach: Reach) -> None:  # of its worker
        #: What wakes the member.
        self.bell = Bell()
        try:
            self._endpoint = Endpoint(reach, self.bell)
        except BaseException:
            self.bell.close()
            raise
        self.endpoint = self._endpoint.text
        self._knocks: dict[int, Link] = {}  # by file descriptor: those not shown yet
        self._knocked = set[int]()  # ranks, once for each
        self._knock_s = inf  # when to do that

    def start(self, rank: int, peers: Sequence[Peer]) -> None:
        """Begin an attempt, of members with these tickets and endpoints."""
        self._rank, self._peers, self._own = rank, peers, peers[rank]
        self._ranks = {peer.ticket: rank for rank, peer in enumerate(peers)}
        self._is_here = [self._endpoint.is_here(peer.endpoint) for peer in peers]

    @property
    def has_company(self) -> bool:
        """Return whether other members are in this process."""
        return sum(self._is_here) > 1

    def reserve_files(self) -> None:
        """Let this process open as many files as links may need; `SectionError` if it must not."""
        here = sum(self._is_here)
        reserve_files(here, len(self._is_here) - here)

    def close(self) -> None:
        """Meet nobody any more."""
        self._endpoint.close()
        for knock in self._knocks.values():
            knock.close()
        self.bell.close()

    def connect(self, rank: int, **most_s: float) -> Link:
        """Return a link to a member. `OSError` if that cannot be reached."""
        peer = self._peers[rank]
        tickets = f"{self._own.ticket}{peer.ticket}".encode()
        if (stream := self._endpoint.stream_to(peer.endpoint, tickets)) is not None:
            return Link(stream)
        made = self._endpoint.connect(peer.endpoint, peer.worker, **most_s)
        return Link(made, [memoryview(tickets)])

    def begin(self) -> None:
        """Take note that an exchange begins."""
        self._knock_s = time.monotonic() + _KNOCK_S

    def register(self, poll: select.poll, missing: Iterable[int]) -> float:
        """Add to the files that are polled, for `callers`; return for how many seconds at most.

        Members that are missing are to call, unless they have higher ranks.
        """
        missing = [each for each in missing if each < self._rank and each not in self._knocked]
        left_s = self._knock_s - time.monotonic() if missing else inf
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
        with suppress(OSError):  # it has gone, as the scheduler will find
            knock = self.connect(rank, most_s=_AT_DOOR_S)
            if isinstance(knock.socket, Stream):
                knock.close()  # the tickets are there
            else:
                self._knocks[knock.socket.fileno()] = knock

    def _show_tickets(self, ready: set[int]) -> None:
        for number in ready & self._knocks.keys():
            try:
                is_done = self._knocks[number].send()
            except (OSError, TransferError):
                is_done = True  # as above
            if is_done:
                self._knocks.pop(number).close()

    def callers(self, ready: set[int]) -> list[tuple[int, Link | None]]:
        """Take new connections; return which members want a link, and that unless they knock."""
        self._show_tickets(ready)
        found: list[tuple[int, Link | None]] = []
        length = len(self._own.ticket)
        for said, made in self._endpoint.accepted(ready, 2 * length):
            theirs, own = said[:length].decode("latin"), said[length:].decode("latin")
            rank = self._ranks.get(theirs)
            if own == self._own.ticket and rank is not None and rank < self._rank:
                found.append((rank, Link(made)))
                continue
            made.close()  # of another attempt, or no member at all
            if own == self._own.ticket and rank is not None and rank > self._rank:
                found.append((rank, None))
        return found
