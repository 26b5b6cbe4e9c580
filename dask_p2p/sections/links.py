"""Links: how the members of one attempt bring bytes to each other. The data plane of gangs.

Two members share one stream: memory in one process, a Unix socket on one host, TCP between hosts.
It is made when they first need it. A socket blocks without spinning, and ends at once when the
process at its other end dies. A message is written and read in the members' own threads, past Dask.

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

from dask_p2p.errors import P2PError, TransferError
from dask_p2p.interprocess.messenger import NAP_S, Messenger
from dask_p2p.plans.orders import branch
from dask_p2p.sections.channel import Channel
from dask_p2p.sections.endpoint import Reach, host_of, is_lost, uses_ucx
from dask_p2p.sections.in_process import Stream
from dask_p2p.sections.link import TEXT_BYTES, AttemptEndedError, Buffer, Link, Peer
from dask_p2p.sections.meeting import Meeting

_LOOKS = 4  # at connections that may be lost, in the time after which they are
# How long a member looks for what is to come before it sleeps, which takes as long to end. Only
# where each member of the host has a core: else the others could not go on meanwhile.
_SPIN_S = 50e-6
_NO_MORE = "nothing more: its function has returned"


class Links:
    """The links of one run of a member."""

    def __init__(self, reach: Reach) -> None:  # how its worker and other hosts reach each other
        self._links: dict[int, Link] = {}  # by rank
        self._waiting = set[int]()  # ranks with which something of the exchange is on its way
        self._found: dict[int, memoryview] | None = None  # what has come of it; None: it is over
        self._beside: threading.Thread | None = None
        self._failure = ""  # an exception would keep all frames that it went through
        self._timeout_s, self._look_s = reach.timeout_s, 0.0  # when connections are looked at
        self._meeting = Meeting(reach)
        self.endpoint = self._meeting.endpoint
        self._is_woken = self._is_finishing = False
        #: Whether members use UCX for large messages between hosts: the same for all of them.
        self.use_ucx = False

    def start(self, rank: int, peers: Sequence[Peer]) -> None:
        """Begin an attempt: all members know each other by now."""
        self._rank, self._peers = rank, peers
        self._meeting.start(rank, peers)
        kernels = [host_of(peer.endpoint) for peer in peers]
        has_cores = kernels.count(kernels[rank]) <= len(os.sched_getaffinity(0))
        # Members of one process share a lock, which one that looks does not release.
        self._spin_s = _SPIN_S if has_cores and not self._meeting.has_company else 0.0

    def reserve_files(self) -> None:
        """Let this process open a file for each link that may be made, or raise `SectionError`."""
        self._meeting.reserve_files()

    @property
    def place(self) -> tuple[int, int]:
        """Which member this is, and how many there are."""
        return self._rank, len(self._peers)

    def is_on_other_host(self, rank: int) -> bool:
        """Return whether a member is on another host than this one."""
        return host_of(self._peers[rank].endpoint) != host_of(self.endpoint)

    def carries(self, rank: int, size_bytes: int) -> bool:
        """Return whether messages of so many bytes go by UCX, from and to memory of any kind."""
        return rank in self._links and self._links[rank].carries(size_bytes)

    def wake(self) -> None:
        """End the exchange that waits, and all later ones, with an `AttemptEndedError`.

        Any thread may call this, until the links are closed.
        """
        self._is_woken = True
        self._meeting.bell.ring()

    @property
    def has_ended(self) -> bool:
        """Whether nothing can be exchanged any more."""
        return self._is_woken or bool(self._failure)

    def close(self) -> None:
        """End all links."""
        self.wake()
        self._join()
        self._meeting.close()
        for link in self._links.values():
            link.close()

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

    def finish(self) -> None:
        """Return when all members have called this, which each does when its function has returned.

        One that waits for a member which has returned reads that from its link, or one that is made
        then. No other links are made but those of a tree. It raises what `exchange` raises.
        """
        self.exchange(_NO_MORE, {}, {})  # ends one that has begun
        self._is_finishing = True
        above, below, far_below = branch(*self.place)
        near = {*self._links, *above, *below}
        self.exchange(_NO_MORE, dict.fromkeys(near, b""), {each: bytearray() for each in near})
        of_all_below = above if below else []  # a leaf has sent all by now
        for to, sources in (([], far_below), (of_all_below, []), ([], above), (below, [])):
            receives = {each: bytearray() for each in sources}
            self.exchange(_NO_MORE, dict.fromkeys(to, b""), receives)

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
        if self._failure:  # a function may have caught it when it was raised first
            raise AttemptEndedError(self._failure)
        if self._found is not None:
            self._end(self._found)
        self._text = call.encode()[:TEXT_BYTES]
        self._sends, self._receives = {**sends}, {**receives}
        found = self._found = dict[int, memoryview]()
        self._awaited_s = inf  # not counted as waiting: what is done beside
        self._meeting.begin()
        self._waiting = {*sends, *receives}
        for rank in sorted(self._waiting):
            link = self._links.get(rank)
            if link is None and self._rank < rank:
                link = self._links[rank] = self._connect(rank)
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
            is_done = link.advance(self._text, self._rank, rank)
        except (OSError, TransferError) as exc:
            raise self._broken(rank, exc) from exc
        if is_done:
            self._waiting.discard(rank)

    def _wait(self) -> list[int]:
        """Wait until something can go on; return the ranks with which it may."""
        links = {rank: self._links[rank] for rank in self._waiting & self._links.keys()}
        sockets, others, most_s = dict[int, int](), list[int](), self._timeout_s / _LOOKS
        poll = select.poll()
        poll.register(self._meeting.bell, select.POLLIN)
        for rank, link in links.items():
            if not isinstance(link.socket, Stream):
                sockets[link.socket.fileno()] = rank
                poll.register(link.socket, link.events)
            elif link.socket.is_ready(link.events):
                most_s = 0.0
            if isinstance(link.socket, Stream) or link.uses_channel:
                others.append(rank)
        missing = self._waiting - links.keys()
        meets = self._is_finishing or bool(missing)
        if meets:
            most_s = min(most_s, self._meeting.register(poll, missing))
        ready = self._polled(poll, most_s, sockets)
        found = {*others, *(sockets[number] for number in ready & sockets.keys())}
        return [*found, *(self._called(ready) if meets else [])]

    def _polled(self, poll: select.poll, most_s: float, sockets: Mapping[int, int]) -> set[int]:
        """Wait, not for ever; return the files that are ready. `sockets` are those of ranks."""
        uses_channel = self.use_ucx and any(self._links[r].uses_channel for r in sockets.values())
        polled = poll.poll(0 if uses_channel else most_s * 1000)
        for number, event in polled:
            if event & select.POLLRDHUP:  # of a link that waits for UCX: it reads nothing itself
                raise self._broken(sockets[number], "it has ended")
        if not polled and uses_channel:
            time.sleep(NAP_S)
        if not polled and time.monotonic() >= self._look_s:
            self._check_links(sockets.values())
        self._meeting.bell.hush()
        if self._is_woken:
            self._meeting.bell.ring()  # for whoever waits next
            raise AttemptEndedError("the attempt has ended")
        return {number for number, _ in polled}

    def _check_links(self, ranks: Iterable[int]) -> None:
        """Raise if a connection to another host is cut."""
        self._look_s = time.monotonic() + self._timeout_s / _LOOKS / 2
        for rank in ranks:
            if is_lost(self._links[rank].socket, self._timeout_s):
                raise self._broken(rank, f"no answer for {self._timeout_s:g} s")

    def _broken(self, rank: int, why: object) -> AttemptEndedError:
        self._failure = f"the link to member {rank} on {self._peers[rank].worker} broke: {why}"
        return AttemptEndedError(self._failure)

    def _connect(self, rank: int) -> Link:
        try:
            return self._meeting.connect(rank)
        except OSError as exc:
            raise self._broken(rank, exc) from exc

    def _called(self, ready: set[int]) -> list[int]:
        """Take new links; return the ranks of those that the current exchange has to do with."""
        found = []
        for rank, link in self._meeting.callers(ready):
            if rank in self._links:
                if link is not None:
                    link.close()
                continue
            link = self._links[rank] = link or self._connect(rank)
            if self._is_finishing and rank not in self._waiting:
                self._sends[rank], self._receives[rank] = b"", bytearray()
                self._waiting.add(rank)
            if rank in self._waiting:
                self._begin(rank, link)
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
