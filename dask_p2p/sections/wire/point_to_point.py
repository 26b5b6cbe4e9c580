"""Messages between two ranks of an attempt: sends, receives, and the waits for them.

A rank that waits for a message receives all messages that arrive. So a send never waits for a rank
that waits as well, in a send or in a receive of another message.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import Any

from dask_p2p.errors import SectionError, TransferError
from dask_p2p.sections.wire.connection import AttemptEndedError, Connection
from dask_p2p.sections.wire.endpoint import TAKEN, Endpoint, RankAddress, Reach, is_lost
from dask_p2p.sections.wire.frames import TEXT_BYTES, SentMessage, slots_message
from dask_p2p.sections.wire.mailbox import HAS_ORDERED_STORES, MOST_BYTES, STORE_S, Receive, Slots
from dask_p2p.sections.wire.streams import Stream
from dask_p2p.transports.ucx_messenger import NAP_S
from dask_p2p.types import Array

_CHECK_EVERY = 16  # attempts to receive from one rank, before one from all ranks
_LOOKS = 4  # checks for lost connections within one timeout


class PointToPoint(ABC):
    """The messages of one rank, over its connections."""

    _rank: int
    _peers: Sequence[RankAddress]
    _spin_s: float

    def __init__(self, reach: Reach) -> None:  # how its worker and other hosts reach each other
        self._connections: dict[int, Connection] = {}  # by rank
        self._asking = list[Connection]()  # without a reply: they close after an error is reported
        self._waiting = set[int]()  # ranks with messages of the current exchange in transit
        self._current = CurrentWait(reach.timeout_s)
        self._payloads: dict[int, memoryview] | None = None  # received so far; None: no exchange
        self._failure = ""  # text only: an exception would keep the frames of its traceback alive
        self._is_woken = False
        self._endpoint = Endpoint(reach)
        self._timeout_s = reach.timeout_s  # longest silence of another host
        self._look_s = 0.0  # time of the next check for lost connections
        self._sent = Counter[int]()  # number of messages, by rank
        #: Whether messages have been sent or received. Calls of all ranks then move them as well.
        self.has_messages = False
        self._asleep: list[Slots] = []  # those that peers may not fill, until a wait ends
        self._awaited: Collection[int] = ()  # rank of the message that this one waits for
        #: Lends this rank's arrays in messages: a `MessageLender`. None: their bytes are sent.
        self.lender: Any = None

    @abstractmethod
    def _admit_arrivals(self) -> None: ...

    @abstractmethod
    def complete(self) -> None:
        """Complete the exchange that was begun, if there is one. Raises the errors of `begin`."""

    def admit(self, rank: int, connection: Connection) -> Connection:
        self._connections[rank] = connection
        connection.mailbox.rank, connection.mailbox.lender = rank, self.lender
        # The lower rank makes slots as soon as it sends a small message.
        polls = self._rank < rank and self._spin_s > 0.0 and HAS_ORDERED_STORES
        connection.may_share_slots = polls and (
            getattr(connection.socket, "family", None) == socket.AF_UNIX
        )
        return connection

    def _connection_to(self, rank: int) -> Connection:
        return self._connections.get(rank) or self._meet(rank)

    def _broken(self, rank: int, why: object) -> AttemptEndedError:
        self._failure = f"the connection to rank {rank} on {self._peers[rank].worker} broke: {why}"
        return AttemptEndedError(self._failure)

    def _meet(self, rank: int) -> Connection:
        """Return a new connection to a rank: the first one that either of the two has made."""
        self._admit_arrivals()
        peer, asks = self._peers[rank], rank < self._rank
        if rank not in self._connections and (asks or self._endpoint.meet(peer.token)):
            try:
                connection = self._endpoint.connect(peer, asks)
                if not asks or self._is_taken(rank, connection):
                    return self.admit(rank, connection)
            except OSError as exc:
                raise self._broken(rank, exc) from exc
        while rank not in self._connections:
            self._poll({})
        return self._connections[rank]

    def _is_taken(self, rank: int, connection: Connection) -> bool:
        """Wait for a lower rank's reply; return whether it takes a connection."""
        reply = bytearray(len(TAKEN))
        connection.receiving, connection.has_received = memoryview(reply), False
        self._asking.append(connection)
        while not (connection.send() and connection.fill()):
            self._poll({rank: connection})
        self._asking.remove(connection)
        connection.receiving, connection.has_received = None, True
        if reply != TAKEN:
            connection.close()
        return reply == TAKEN

    def offer(self, rank: int, arrays: Sequence[Array]) -> bytes | None:
        if self.lender is None:
            return None
        self.complete()  # from now on no other thread moves messages
        offer: bytes | None = self.lender.offer(rank, arrays)
        return offer

    def send_message(self, rank: int, message: SentMessage) -> None:
        self.complete()
        self.has_messages = True
        self._sent[rank] += 1
        connection = self._connection_to(rank)
        if connection.may_share_slots:
            self._share_slots(rank, connection, message.size_bytes)
        if connection.write_to_slot(self._sent[rank], message):
            self._wake(rank, connection)
        else:
            self._post(rank, message)

    def _post(self, rank: int, message: SentMessage) -> None:
        connection = self._connections[rank]
        connection.post(message)
        try:
            connection.send()
        except (OSError, TransferError) as exc:
            raise self._broken(rank, exc) from exc

    def send_small(self, rank: int, frame: bytes) -> bool:
        """Send a message that fits in a slot; return False if anything has to go before it."""
        connection = self._connections.get(rank)
        if connection is None or connection.sending or self._payloads is not None or self._failure:
            return False
        slots = connection.mailbox.slots
        number = self._sent[rank] + 1
        if slots is not None and slots.write(slots.sent_messages, number, frame):
            self.has_messages, self._sent[rank] = True, number
            self._wake(rank, connection)
            return True
        self._share_slots(rank, connection, len(frame))
        if connection.sending:
            return False
        try:
            sent = connection.socket.send(frame)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise self._broken(rank, exc) from exc
        if sent < len(frame):
            connection.sending.append(memoryview(frame)[sent:])
        self.has_messages, self._sent[rank] = True, number
        return True

    def _share_slots(self, rank: int, connection: Connection, size_bytes: int) -> None:
        """Make slots at the first small message or call, and send the peer their name."""
        if not connection.may_share_slots or size_bytes > MOST_BYTES:
            return
        connection.may_share_slots = False
        if (slots := Slots.make()) is not None:
            connection.mailbox.slots, name = slots
            self._post(rank, slots_message(name))

    def _wake(self, rank: int, connection: Connection) -> None:
        slots = connection.mailbox.slots
        if slots is not None and slots.peer_sleeps:
            self._post(rank, slots_message(b""))

    def receive_small(self, rank: int) -> bytes | None:
        """Return the bytes of a rank's next message if it is small, and arrives soon."""
        connection = self._connections.get(rank)
        if connection is None or self._payloads is not None or self._failure:
            return None
        self.has_messages = True
        try:
            return connection.receive_small(self._spin_s)
        except OSError as exc:
            raise self._broken(rank, exc) from exc

    def receive_message(self, rank: int, receive: Receive) -> None:
        self.complete()
        self.has_messages = True
        self._connection_to(rank).mailbox.receive(receive)

    def wait_for_sent(self, rank: int, message: SentMessage) -> None:
        """Wait until a message is sent: its value may change then."""
        connection = self._connections[rank]
        call = f"send() to rank {rank}"
        self._wait_until(rank, lambda: message.is_done(connection.sent_buffers), call)

    def wait_for_message(self, rank: int, receive: Receive, call: str) -> None:
        """Wait until a message is here. `call` is the text of the call that receives it."""
        connection = self._connections[rank]

        def is_done() -> bool:
            if receive.arrival is None and connection.call:
                self._move(rank, connection)  # the rank may have sent it before that call
                if receive.arrival is None:
                    raise SectionError(
                        f"expected a message of rank {rank} for {call} of rank {self._rank}, but "
                        f"rank {rank} called {connection.call}. Let it send first, "
                        f"ctx.send(value, dest={self._rank}), and make the other calls in the "
                        f"same order on all ranks."
                    )
            return receive.is_complete

        self._wait_until(rank, is_done, call)

    def _wait_until(self, rank: int, is_done: Callable[[], bool], call: str) -> None:
        """Send and receive messages until `is_done`, which needs one rank above all."""
        self.complete()
        if is_done():
            return
        self._current.begin(call.encode()[:TEXT_BYTES])
        self._awaited = {rank}
        self._current.since_s = since_s = time.perf_counter()
        until_s, attempts, connection = since_s + self._spin_s, 0, self._connections[rank]
        try:
            while True:
                attempts += 1
                self._move(rank, connection)
                if is_done():
                    break
                if attempts % _CHECK_EVERY == 0 or time.perf_counter() >= until_s:
                    self._move_some([*self._connections])
                    if is_done():
                        break
                    if time.perf_counter() >= until_s:
                        self._poll(self._connections, self._connections.keys())
        finally:
            self._awaited = ()
        connection.waited_s += time.perf_counter() - since_s
        self._wake_up()

    def _move_some(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._move(rank, self._connections[rank])

    def _move(self, rank: int, connection: Connection) -> None:
        """Send and receive messages on a connection, without blocking."""
        try:
            if connection.sending:
                connection.send()
            connection.receive_messages()
            if connection.sending:  # answers
                connection.send()
        except (OSError, TransferError) as exc:
            raise self._broken(rank, exc) from exc

    def _poll(
        self, connections: Mapping[int, Connection], sender_ranks: Collection[int] = ()
    ) -> set[int]:
        """Wait until a message arrives, or can be sent, or a rank connects, or some time is over.

        Return the ranks whose connections may be ready. `sender_ranks` may send messages.
        """
        ready, most_s = set[int](), self._timeout_s / _LOOKS
        sockets, poll, bell = dict[int, int](), select.poll(), self._endpoint.bell
        poll.register(bell, select.POLLIN)
        uses_channel = False
        for rank, connection in connections.items():
            connection.listens = rank in sender_ranks
            slots = connection.mailbox.slots
            if slots is not None and not slots.sleeps:
                # The peer may fill them before it sees that this rank sleeps.
                slots.sleeps, most_s = True, min(most_s, STORE_S)
                self._asleep.append(slots)
                ready.add(rank)
            if isinstance(connection.socket, Stream):
                ready.add(rank)
                if connection.socket.is_ready(connection.events):
                    most_s = 0.0
                continue
            sockets[connection.socket.fileno()] = rank
            poll.register(connection.socket, connection.events)
            if connection.uses_channel:  # which has no descriptor
                ready.add(rank)
                most_s, uses_channel = 0.0, True
        polled = poll.poll(most_s * 1000)
        for number, event in polled:
            if event & select.POLLRDHUP:  # a connection that waits for UCX does not read its socket
                raise self._broken(sockets[number], "closed by the peer")
        if not polled and uses_channel:
            time.sleep(NAP_S)
        if not polled and time.monotonic() >= self._look_s:
            self._look_s = time.monotonic() + self._timeout_s / _LOOKS / 2
            for rank in sockets.values():
                if is_lost(connections[rank].socket, self._timeout_s):
                    raise self._broken(rank, f"no answer for {self._timeout_s:g} s")
        bell.hush()
        self._current.log_if_long(self._rank, len(self._peers), self._waiting or self._awaited)
        if self._is_woken:
            bell.ring()  # so that the next wait ends, too
            raise AttemptEndedError("the attempt has ended")
        self._admit_arrivals()
        return ready | {sockets[number] for number, _ in polled if number in sockets}

    def _wake_up(self) -> None:
        for slots in self._asleep:
            slots.sleeps = False
        self._asleep.clear()


logger = logging.getLogger(__name__)


class CurrentWait:
    """The newest exchange of a rank, and the time since which it waits for it."""

    def __init__(self, timeout_s: float) -> None:  # longest wait without a line in the log
        self._timeout_s = timeout_s
        self.text = b""  # text of the exchange's call
        self.since_s = inf  # when the wait began; infinite while transfers are in the background
        self._number = self._logged = 0  # of the exchange, and of the last one in the log

    def begin(self, text: bytes) -> None:
        self.text, self.since_s = text, inf
        self._number += 1

    def log_if_long(self, rank: int, size: int, waits_for: Collection[int]) -> None:
        waited_s = time.perf_counter() - self.since_s
        if waited_s > self._timeout_s and self._logged != self._number:
            self._logged = self._number
            logger.warning(
                "Rank %d of %d has waited %.0f s for ranks %s in %r. dask_p2p.stalled(client) "
                "returns the calls and stacks of all ranks.",
                *(rank, size, waited_s, sorted(waits_for), self.text.decode(errors="replace")),
            )

    def state(self, waits_for: Collection[int]) -> dict[str, Any]:
        """Return the call, and the ranks that this one waits for. Thread-safe."""
        ranks, waited_s = sorted(waits_for), time.perf_counter() - self.since_s
        waits = bool(ranks) and waited_s >= 0.0
        return {
            "call": self.text.decode(errors="replace"),
            "exchanges": self._number,
            "waits_for": tuple(ranks) if waits else (),
            "waited_s": waited_s if waits else 0.0,
        }
