"""Point-to-point messages between the ranks of one attempt: the data plane of gangs.

Two ranks share one connection: memory in one process, a Unix socket on one host, TCP between hosts.
It is made when they first need it. A socket blocks without spinning, and fails immediately when the
process at its other end dies. The ranks' own threads send and receive messages, without Dask.

Each message has a header with the text of its call, and with the number of the exchange between
these two ranks. So mismatched calls become an error at the first message, instead of a hang. Ranks
without data for each other exchange no message.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from dask_p2p import tuning
from dask_p2p.errors import P2PError, TransferError
from dask_p2p.plans.ranks import tree_neighbours
from dask_p2p.sections.wire.connection import AttemptEndedError, Buffer, Channel, Connection
from dask_p2p.sections.wire.endpoint import RankAddress, Reach, host_of, uses_ucx
from dask_p2p.sections.wire.frames import TEXT_BYTES
from dask_p2p.sections.wire.mailbox import Receive
from dask_p2p.sections.wire.point_to_point import PointToPoint
from dask_p2p.sections.wire.streams import reserve_files
from dask_p2p.transports.ucx_messenger import Messenger

_FINALIZE = "finalize() at the return of its function"


class Connections(PointToPoint):
    """The connections of one rank in one attempt."""

    #: True for the connections of a section's only rank, which has nothing to exchange.
    is_alone = False
    rank_and_size: tuple[int, int]

    def __init__(self, reach: Reach) -> None:
        super().__init__(reach)
        self._background: threading.Thread | None = None
        #: Attempt token and address of this rank, for others.
        self.token, self.endpoint = self._endpoint.token, self._endpoint.text
        self._is_finishing = False
        #: True if the ranks use UCX for large messages between hosts. It is the same on all ranks.
        self.use_ucx = False

    def start(self, rank: int, peers: Sequence[RankAddress]) -> None:
        """Begin an attempt, with the addresses and attempt tokens of all ranks."""
        self._rank, self._peers, self.rank_and_size = rank, peers, (rank, len(peers))
        self._rank_by_token = {peer.token: rank for rank, peer in enumerate(peers)}
        self.hosts = [host_of(peer.endpoint) for peer in peers]
        has_cores = self.hosts.count(self.hosts[rank]) <= len(os.sched_getaffinity(0))
        #: True if other ranks run in this process.
        self.has_company = self._count_here() > 1
        # Ranks of one process share Python's lock, and a rank that polls does not release it.
        self._spin_s = tuning.current.spin_s if has_cores and not self.has_company else 0.0

    def reserve_files(self) -> None:
        """Raise the limit of open files so that each connection fits, or raise `SectionError`."""
        local_count = self._count_here()
        reserve_files(local_count, len(self._peers) - local_count)

    def _count_here(self) -> int:
        return sum(self._endpoint.is_here(peer.endpoint) for peer in self._peers)

    def is_on_other_host(self, rank: int) -> bool:
        return host_of(self._peers[rank].endpoint) != host_of(self.endpoint)

    def carries(self, rank: int, size_bytes: int) -> bool:
        """Return whether messages of this size go by UCX, from and to memory of any kind."""
        return rank in self._connections and self._connections[rank].carries(size_bytes)

    def wake(self) -> None:
        """Make the current exchange, and all later ones, raise `AttemptEndedError`.

        Any thread may call this, until the connections are closed.
        """
        self._is_woken = True
        self._endpoint.bell.ring()

    @property
    def has_ended(self) -> bool:
        return self._is_woken or bool(self._failure)

    def close(self) -> None:
        self.wake()
        self._join()
        self._endpoint.close()
        for connection in (*self._connections.values(), *self._asking):
            connection.close()
        self.lender = None  # which refers to the connections

    def exchange(
        self, call: str, sends: Mapping[int, Buffer], receives: Mapping[int, Buffer | None]
    ) -> dict[int, memoryview]:
        """Send bytes to some ranks and receive bytes from some; return received bytes by rank.

        All ranks that exchange data must name the same call, otherwise `SectionError` is raised.
        `AttemptEndedError` is raised if a rank is lost, or `wake` was called. A receive buffer
        has the size of its message. None: it is allocated when the header arrives.
        """
        return self.begin(call, sends, receives)()

    def gather(self, call: str, data: bytes) -> list[Buffer]:
        """Send bytes to all ranks, the same number on each; return those of all ranks, by rank."""
        rank, size = self.rank_and_size
        peer_ranks = [peer_rank for peer_rank in range(size) if peer_rank != rank]
        receives = {peer_rank: bytearray(len(data)) for peer_rank in peer_ranks}
        received = self.exchange(call, dict.fromkeys(peer_ranks, data), receives)
        return [received.get(source, data) for source in range(size)]

    def finish(self) -> None:
        """Finalize: wait until the functions of all ranks have returned.

        A rank may still wait for another one whose function has returned. It then receives the
        mismatched call, by their connection or by a new one. Otherwise only the connections of a
        tree are made. Raises the errors of `exchange`.
        """
        self.exchange(_FINALIZE, {}, {})  # ends an exchange that was begun
        self._is_finishing = True
        above, below = tree_neighbours(*self.rank_and_size)
        near = {*self._connections, *above, *below}
        self.exchange(_FINALIZE, dict.fromkeys(near, b""), {source: bytearray() for source in near})
        # A rank must answer all its peers before it returns. So each rank, also a leaf, sends a
        # message up the tree after all its peers have answered.
        for to, sources in (([], below), (above, []), ([], above), (below, [])):
            receives = {source: bytearray() for source in sources}
            self.exchange(_FINALIZE, dict.fromkeys(to, b""), receives)
        for peer, connection in self._connections.items():
            connection.mailbox.take_slot()
            connection.mailbox.check_read(self._rank, peer)

    def begin(
        self,
        call: str,
        sends: Mapping[int, Buffer],
        receives: Mapping[int, Buffer | None],
        in_background: bool = False,
    ) -> Callable[[], dict[int, memoryview]]:
        """Begin an exchange; return a function that completes it.

        The next exchange completes it as well. Buffers must stay valid until then. With
        `in_background`, a thread completes the transfers that the sockets do not complete
        immediately.
        """
        if self._payloads is not None or self._failure:
            self.complete()
        self._current.begin(call.encode()[:TEXT_BYTES])
        self._sends, self._receives = {**sends}, {**receives}
        payloads = self._payloads = dict[int, memoryview]()
        self._waiting = {*sends, *receives}
        for rank in sorted(self._waiting):
            self._begin(rank, self._connection_to(rank))
        if in_background and self._waiting:
            self._background = threading.Thread(
                target=self._go_on, name="dask-p2p-halo", daemon=True
            )
            self._background.start()
        return partial(self._end, payloads)

    def state(self) -> dict[str, Any]:
        """Return the newest exchange, and the ranks that it waits for. Thread-safe."""
        return self._current.state(self._waiting or self._awaited)

    def complete(self) -> None:
        if self._failure:  # the user's function may have caught the first error
            raise AttemptEndedError(self._failure)
        if self._payloads is not None:
            self._end(self._payloads)

    def _go_on(self) -> None:
        with suppress(P2PError):  # `_end` raises it again
            self._advance_all()

    def _join(self) -> None:
        if self._background is not None:
            self._background.join()
            self._background = None

    def _end(self, payloads: dict[int, memoryview]) -> dict[int, memoryview]:
        """Complete an exchange; return the received bytes by rank."""
        if payloads is not self._payloads:
            return payloads  # already complete
        self._current.since_s = time.perf_counter()
        if self._background is not None:
            self._join()
        self._advance_all()
        if self._asleep:
            self._wake_up()
        for rank in self._receives:
            connection = self._connections[rank]
            payloads[rank] = connection.payload
            connection.received_bytes += len(payloads[rank])
        self._payloads = None
        return payloads

    def _advance_all(self) -> None:
        since_s = time.perf_counter()
        until_s = since_s + self._spin_s
        is_first = True  # one attempt without blocking costs less than a poll
        while self._waiting:
            is_spinning = is_first or time.perf_counter() < until_s
            ready = list(self._waiting) if is_spinning else self._wait()
            may_poll, is_first = is_spinning and not is_first and len(ready) == 1, False
            for rank in ready:
                connection = self._connections[rank]
                try:
                    if may_poll and not connection.poll_call(until_s):
                        break
                    is_done = connection.advance(self._current.text, self._rank, rank)
                except (OSError, TransferError) as exc:
                    raise self._broken(rank, exc) from exc
                if is_done:
                    self._waiting.discard(rank)
                    now_s = time.perf_counter()
                    waited_s = now_s - max(since_s, self._current.since_s)
                    connection.waited_s += max(0.0, waited_s)
                    since_s = now_s

    def count(self, rank: int, size_bytes: int) -> None:
        self._connections[rank].received_bytes += size_bytes

    @property
    def received(self) -> list[tuple[int, int, float]]:
        """Rank, bytes received and seconds waited of each connection. Thread-safe."""
        connections = self._connections.copy().items()
        return [
            (
                rank,
                connection.received_bytes + connection.mailbox.received_bytes,
                connection.waited_s,
            )
            for rank, connection in connections
        ]

    def _begin(self, rank: int, connection: Connection) -> None:
        connection.number += 1
        try:
            if rank in self._sends:
                # The last messages use the socket, and come after all others there.
                data, may_use_slot = self._sends[rank], not self._is_finishing
                if may_use_slot and connection.may_share_slots:
                    self._share_slots(rank, connection, len(data))
                if connection.begin_to_send(self._current.text, data, may_use_slot):
                    self._wake(rank, connection)
            if rank in self._receives:
                connection.begin_to_receive(self._receives[rank])
            if connection.early or connection.has_call:  # its header has come with a message
                is_done = connection.advance(self._current.text, self._rank, rank)
            else:
                is_done = connection.send() and connection.has_received
            if is_done:
                self._waiting.discard(rank)
        except (OSError, TransferError) as exc:
            raise self._broken(rank, exc) from exc

    def _wait(self) -> list[int]:
        has_messages = self.has_messages and not self._is_finishing
        sender_ranks = self._connections.keys() - self._waiting if has_messages else set()
        ranks = [*self._waiting, *sender_ranks]
        ready = self._poll({rank: self._connections[rank] for rank in ranks}, sender_ranks)
        self._move_some(ready & sender_ranks)
        return [*(ready - sender_ranks)]  # ranks whose connections may be ready

    def _admit_arrivals(self) -> None:
        """Admit the connections that other ranks have made."""
        for token, stream in self._endpoint.arrivals():
            rank = self._rank_by_token.get(token)
            if rank is None:  # of another attempt
                stream.close()
                continue
            connection = self.admit(rank, Connection(stream))
            if self._is_finishing and rank not in self._waiting:
                self._sends[rank], self._receives[rank] = b"", bytearray()
                self._waiting.add(rank)
                self._begin(rank, connection)

    def open_channels(self, started: Callable[[], Messenger | None]) -> None:
        """Send large messages between hosts by UCX, where both ends use it and it starts.

        All ranks must call this at the same time.
        """
        ends = {n: peer.endpoint for n, peer in enumerate(self._peers) if uses_ucx(peer.endpoint)}
        self.use_ucx = len({*map(host_of, ends.values())}) > 1
        if not self.use_ucx:
            return
        far = [rank for rank in ends if self._rank in ends and self.is_on_other_host(rank)]
        messenger = started() if far else None
        address = b"" if messenger is None else messenger.address
        addresses = self.exchange("UCX addresses", dict.fromkeys(far, address), dict.fromkeys(far))
        channels = {
            rank: Channel(messenger, bytes(address), self._timeout_s)
            for rank, address in addresses.items()
            if messenger is not None and len(address)
        }
        offers = {rank: channel.offer for rank, channel in channels.items()}
        received = self.exchange("UCX tags", offers, dict.fromkeys(channels))
        for rank, channel in channels.items():
            try:
                channel.open(received[rank])
            except TransferError as exc:
                raise self._broken(rank, exc) from exc
            self._connections[rank].channel = channel
        for connection in self._connections.values():
            connection.number = 0  # error messages count only the user's own calls


def _of_parent(name: str) -> Any:
    """Return a method of a group: that of all ranks, for one of the group's ranks."""

    def method(group: GroupConnections, rank: int, *arguments: Any) -> Any:
        return getattr(group._parent, name)(group._ranks[rank], *arguments)

    return method


class GroupConnections(Connections):
    """Connections to a group of ranks, which are those of all ranks."""

    def __init__(
        self,
        connections: Connections,  # of all ranks, or of the group that this one is a part of
        ranks: Sequence[int],  # the group's ranks there, in order
        name: str,  # of the group, the same on its ranks
    ) -> None:
        self._parent, self._ranks, self._name = connections, [*ranks], name
        own_rank, _ = connections.rank_and_size
        self.rank_and_size = self._ranks.index(own_rank), len(self._ranks)
        self.is_alone = len(self._ranks) == 1

    is_on_other_host = _of_parent("is_on_other_host")
    carries = _of_parent("carries")
    count = _of_parent("count")
    offer = _of_parent("offer")
    send_message = _of_parent("send_message")
    send_small = _of_parent("send_small")
    receive_small = _of_parent("receive_small")
    receive_message = _of_parent("receive_message")
    wait_for_sent = _of_parent("wait_for_sent")

    @property
    def has_ended(self) -> bool:
        return self._parent.has_ended

    def begin(
        self,
        call: str,
        sends: Mapping[int, Buffer],
        receives: Mapping[int, Buffer | None],
        in_background: bool = False,
    ) -> Callable[[], dict[int, memoryview]]:
        ranks = self._ranks
        end = self._parent.begin(
            f"{call} of {self._name}",
            {ranks[rank]: data for rank, data in sends.items()},
            {ranks[rank]: into for rank, into in receives.items()},
            in_background,
        )
        rank_in_group = {rank: number for number, rank in enumerate(ranks)}
        return lambda: {rank_in_group[rank]: data for rank, data in end().items()}

    def wait_for_message(self, rank: int, receive: Receive, call: str) -> None:
        self._parent.wait_for_message(self._ranks[rank], receive, f"{call} of {self._name}")


class OneRank(Connections):
    """The connections of a rank without other ranks. It has no endpoint."""

    is_alone, has_company = True, False
    rank_and_size = 0, 1
    hosts = [""]  # noqa: RUF012

    def __init__(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        self._connections, self._payloads, self._is_cancelled = {}, None, is_cancelled
        self._is_woken, self._failure, self.use_ucx = False, "", False

    @property
    def has_ended(self) -> bool:
        # It stays so: Dask may request a cancelled task again before the task ends.
        self._is_woken = self._is_woken or self._is_cancelled()
        return self._is_woken

    def begin(self, *call: Any, **kwargs: Any) -> Callable[[], dict[int, memoryview]]:
        return dict


#: The connections of sections with one rank whose task is on no worker.
ONE_RANK = OneRank()
