"""Links: how the members of one attempt bring bytes to each other. The data plane of gangs.

Two members share one stream socket: a Unix socket on one host, TCP between hosts. It is made when
they first need it. A socket blocks without spinning, and ends at once when the process at its other
end dies. Nothing of Dask is in the way: a message is written and read in the members' own threads.

Each message begins with the text of the call that sends it, and with its number: of the exchanges
between these two members. So those whose calls differ find that out with the first message, instead
of waiting for each other; and those that have nothing for each other need not say so.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf

from dask_p2p.errors import P2PError, SectionError, TransferError
from dask_p2p.interprocess.messenger import NAP_S, Messenger
from dask_p2p.sections.channel import Channel
from dask_p2p.sections.endpoint import Endpoint, Reach, host_of, is_lost, uses_ucx
from dask_p2p.sections.link import HEADER, TEXT_BYTES, AttemptEndedError, Buffer, Link, Peer

_LOOKS = 4  # at connections that may be lost, in the time after which they are
# How long a member looks for what is to come before it sleeps, which takes as long to end. Only
# where each member of the host has a core: else the others could not go on meanwhile.
_SPIN_S = 50e-6


class Links:
    """The links of one run of a member."""

    def __init__(self, reach: Reach) -> None:  # how its worker and other hosts reach each other
        self._own: Peer | None = None
        self._links: dict[int, Link] = {}  # by rank
        self._waiting = set[int]()  # ranks with which something of the exchange is on its way
        self._found: dict[int, memoryview] | None = None  # what has come of it; None: it is over
        self._beside: threading.Thread | None = None
        self._failure: P2PError | None = None
        self._timeout_s, self._look_s = reach.timeout_s, 0.0  # when connections are looked at
        self._endpoint = Endpoint(reach)
        self.endpoint = self._endpoint.text
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_woken = False
        #: Whether members use UCX for large messages between hosts: the same for all of them.
        self.use_ucx = False

    def start(self, rank: int, peers: Sequence[Peer]) -> None:
        """Begin an attempt: all members know each other by now."""
        self._rank, self._peers, self._own = rank, peers, peers[rank]
        self._ranks = {peer.ticket: rank for rank, peer in enumerate(peers)}
        kernels = [host_of(peer.endpoint) for peer in peers]
        has_cores = kernels.count(kernels[rank]) <= len(os.sched_getaffinity(0))
        self._spin_s = _SPIN_S if has_cores else 0.0

    @property
    def place(self) -> tuple[int, int]:
        """Which member this is, and how many there are."""
        return self._rank, len(self._peers)

    def is_on_other_host(self, rank: int) -> bool:
        """Return whether a member is on another host than this one."""
        return host_of(self._peers[rank].endpoint) != host_of(self.endpoint)

    def carries(self, rank: int, size_bytes: int) -> bool:
        """Return whether messages of so many bytes go by UCX, from and to memory of any kind."""
        link = self._links.get(rank)
        return link is not None and link.carries(size_bytes)

    def wake(self) -> None:
        """End the exchange that waits, and all later ones, with an `AttemptEndedError`.

        Any thread may call this, until the links are closed.
        """
        self._is_woken = True
        os.eventfd_write(self._woken, 1)

    @property
    def has_ended(self) -> bool:
        """Whether nothing can be exchanged any more."""
        return self._is_woken or self._failure is not None

    def close(self) -> None:
        """End all links."""
        self.wake()
        self._join()
        self._endpoint.close()
        for link in self._links.values():
            link.close()
        os.close(self._woken)

    def exchange(
        self, call: str, sends: Mapping[int, Buffer], receives: Mapping[int, Buffer | None]
    ) -> dict[int, memoryview]:
        """Send bytes to some members, and receive bytes from some; return what has come, by rank.

        All that exchange something must name the same call: `SectionError` if they do not.
        `AttemptEndedError` if a member is lost, or `wake` was called.

        Parameters
        ----------
        sends
            What each member gets, by rank.
        receives
            Where that goes which comes from each member, by rank: as many bytes must come. None if
            the sender says how many.
        """
        return self.begin(call, sends, receives)()

    def gather(self, call: str, data: bytes) -> list[Buffer]:
        """Give all members bytes, as many as each of them gives; return all by rank."""
        rank, size = self.place
        others = [each for each in range(size) if each != rank]
        receives = {each: bytearray(len(data)) for each in others}
        found = self.exchange(call, dict.fromkeys(others, data), receives)
        return [found.get(each, data) for each in range(size)]

    def begin(
        self,
        call: str,
        sends: Mapping[int, Buffer],
        receives: Mapping[int, Buffer | None],
        beside: bool = False,
    ) -> Callable[[], dict[int, memoryview]]:
        """Begin an exchange; return what waits for its end, as the next exchange does too.

        Buffers must stay until the end. With `beside` a thread does what sockets do not do at once.
        """
        if self._failure is not None:
            raise self._failure  # a function may have caught it when it was raised first
        if self._found is not None:
            self._end(self._found)
        self._text, self._sends, self._receives = call.encode()[:TEXT_BYTES], sends, receives
        found = self._found = dict[int, memoryview]()
        self._awaited_s = inf  # not counted as waiting: what is done beside
        self._waiting = {*sends, *receives}
        for rank in sorted(self._waiting):
            link = self._links.get(rank)
            if link is None and self._rank < rank:
                link = self._connect(rank)
            if link is not None:
                self._begin(rank, link)
        if beside and self._waiting:
            self._beside = threading.Thread(target=self._go_on, name="dask-p2p-rims", daemon=True)
            self._beside.start()
        return lambda: self._end(found)

    def _go_on(self) -> None:
        with suppress(P2PError):  # whoever waits for the end gets it too
            self._advance_all()

    def _join(self) -> None:
        if self._beside is not None:
            self._beside.join()
            self._beside = None

    def _end(self, found: dict[int, memoryview]) -> dict[int, memoryview]:
        """Wait for the end of an exchange; return what has come."""
        if found is not self._found:
            return found  # it is over: whoever asks again gets the same
        self._awaited_s = time.perf_counter()
        self._join()
        self._advance_all()
        for rank in self._receives:
            link = self._links[rank]
            found[rank] = link.payload
            link.received_bytes += len(found[rank])
        self._found = None
        return found

    def _advance_all(self) -> None:
        """Send and receive all of the exchange."""
        since_s = time.perf_counter()
        until_s = since_s + self._spin_s
        is_first = True  # to look costs less than to wait
        while self._waiting:
            is_spinning = is_first or time.perf_counter() < until_s
            if is_spinning and self._waiting <= self._links.keys():
                ready = list(self._waiting)
            else:
                ready = self._wait()
            is_first = False
            for rank in ready:
                self._advance(rank, self._links[rank])
                if rank not in self._waiting:
                    now_s = time.perf_counter()
                    waited_s = now_s - max(since_s, self._awaited_s)
                    self._links[rank].waited_s += max(0.0, waited_s)
                    since_s = now_s

    def count(self, rank: int, size_bytes: int) -> None:
        """Take note of bytes of a member that came otherwise than by a message."""
        self._links[rank].received_bytes += size_bytes

    @property
    def received(self) -> list[tuple[int, int, float]]:
        """Of each link the rank, bytes that came, and seconds of waiting. Any thread may ask."""
        return [(r, each.received_bytes, each.waited_s) for r, each in self._links.copy().items()]

    def _begin(self, rank: int, link: Link) -> None:
        """Have a link carry what the current exchange has for it."""
        link.number += 1
        try:
            if rank in self._sends:
                link.begin_to_send(self._text, self._sends[rank])
            if rank in self._receives:
                link.begin_to_receive(self._receives[rank])
            if link.send() and link.has_received:
                self._waiting.discard(rank)
        except (OSError, TransferError) as exc:
            raise self._broken(rank, exc) from exc

    def _advance(self, rank: int, link: Link) -> None:
        """Send and receive what is possible now."""
        try:
            has_sent = link.send()
            while not link.has_received and link.fill():
                if link.is_header:
                    link.begin_payload(self._checked_length(rank, link))
                else:
                    link.has_received = True
        except (OSError, TransferError) as exc:
            raise self._broken(rank, exc) from exc
        if has_sent and link.has_received:
            self._waiting.discard(rank)

    def _checked_length(self, rank: int, link: Link) -> int:
        """Return how long the payload is; raise `SectionError` if the peer's call is another."""
        number, count, peers_text = HEADER.unpack(link.header)
        peers_text = peers_text.rstrip(b"\0")
        wanted = count if link.payload is None else len(link.payload)
        if (number, count, peers_text) == (link.number, wanted, self._text):
            return int(count)
        calls = sorted([(self._rank, link.number, self._text), (rank, number, peers_text)])
        named = " and ".join(
            f"member {each} called {what.decode(errors='replace')} as number {at}"
            for each, at, what in calls
        )
        raise SectionError(
            f"expected the same calls of all members in the same order, but {named}. Let no call "
            f"of the context depend on the rank, or on values that differ between members."
        )

    def _wait(self) -> list[int]:
        """Wait until something can go on; return the ranks with which it may."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        ranks, by_channel = {}, list[int]()
        for rank in self._waiting:
            if (link := self._links.get(rank)) is not None:
                ranks[link.socket.fileno()] = rank
                poll.register(link.socket, link.events)
                if link.uses_channel:
                    by_channel.append(rank)
        if len(ranks) < len(self._waiting):
            for number in self._endpoint.numbers:
                poll.register(number, select.POLLIN)
        polled = poll.poll(0 if by_channel else self._timeout_s / _LOOKS * 1000)
        for number, event in polled:
            if event & select.POLLRDHUP:  # of a link that waits for UCX: it reads nothing itself
                raise self._broken(ranks[number], "it has ended")
        ready = [number for number, _ in polled]
        if not ready and by_channel:
            time.sleep(NAP_S)
        if not ready and (not by_channel or time.monotonic() >= self._look_s):
            self._check_links(ranks.values())
        if self._woken in ready:
            raise AttemptEndedError("the attempt has ended")
        found = [ranks[number] for number in ready if number in ranks]
        found += [rank for rank in by_channel if rank not in found]
        for rank in self._accepted(set(ready)):
            if rank in self._waiting:
                self._begin(rank, self._links[rank])
                found.append(rank)
        return found

    def _check_links(self, ranks: Iterable[int]) -> None:
        """Raise if a connection to another host is cut."""
        self._look_s = time.monotonic() + self._timeout_s / _LOOKS
        for rank in ranks:
            if is_lost(self._links[rank].socket, self._timeout_s):
                raise self._broken(rank, f"no answer for {self._timeout_s:g} s")

    def _broken(self, rank: int, why: object) -> AttemptEndedError:
        worker = self._peers[rank].worker
        self._failure = AttemptEndedError(f"the link to member {rank} on {worker} broke: {why}")
        return self._failure

    # --- making links: of two members the one with the lower rank connects, and shows both tickets

    def _connect(self, rank: int) -> Link:
        assert self._own is not None
        peer = self._peers[rank]
        try:
            link = self._links[rank] = Link(self._endpoint.connect(peer.endpoint, peer.worker))
        except OSError as exc:
            raise self._broken(rank, exc) from exc
        link.sending = [memoryview(f"{self._own.ticket}{peer.ticket}".encode())]
        return link

    def _accepted(self, ready: set[int]) -> list[int]:
        """Take new connections; return the ranks of those that are links now."""
        assert self._own is not None
        found, length = [], len(self._own.ticket)
        for said, made in self._endpoint.accepted(ready, 2 * length):
            theirs, own = said[:length].decode("latin"), said[length:].decode("latin")
            rank = self._ranks.get(theirs)
            if own != self._own.ticket or rank is None or rank in self._links:
                made.close()  # of another attempt, or no member at all
                continue
            self._links[rank] = Link(made)
            found.append(rank)
        return found

    def open_channels(self, started: Callable[[], Messenger | None]) -> None:
        """Have UCX carry large messages between hosts, where both ends use it and it starts.

        All members must call this at the same time.
        """
        ends = {n: peer.endpoint for n, peer in enumerate(self._peers) if uses_ucx(peer.endpoint)}
        self.use_ucx = len({*map(host_of, ends.values())}) > 1
        if not self.use_ucx:
            return
        far = [rank for rank in ends if self._rank in ends and self.is_on_other_host(rank)]
        messenger = started() if far else None
        address = b"" if messenger is None else messenger.address
        found = self.exchange("UCX addresses", dict.fromkeys(far, address), dict.fromkeys(far))
        made = {
            rank: Channel(messenger, bytes(address), self._timeout_s)
            for rank, address in found.items()
            if messenger is not None and len(address)
        }
        offers = {rank: channel.offer for rank, channel in made.items()}
        said = self.exchange("UCX tags", offers, dict.fromkeys(made))
        for rank, channel in made.items():
            try:
                channel.open(said[rank])
            except TransferError as exc:
                raise self._broken(rank, exc) from exc
            self._links[rank].channel = channel
        for link in self._links.values():
            link.number = 0  # which users are told: of the calls that are theirs
