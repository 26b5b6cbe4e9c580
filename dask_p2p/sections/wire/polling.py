"""Waits of a rank's thread until one of its connections is ready, or is lost."""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Mapping
from math import inf

from dask_p2p.interprocess.messenger import NAP_S
from dask_p2p.sections.wire.connection import Connection
from dask_p2p.sections.wire.connection_setup import ConnectionSetup
from dask_p2p.sections.wire.endpoint import is_lost
from dask_p2p.sections.wire.in_process import Stream

_LOOKS = 4  # checks for lost connections within one timeout


class LostConnectionError(Exception):
    """The connection to a rank is lost."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, why


class Polling:
    """Polls the connections of one rank, and the descriptors of new ones."""

    def __init__(self, setup: ConnectionSetup, timeout_s: float) -> None:
        self._setup = setup
        self._timeout_s = timeout_s  # longest silence of another host
        self._look_s = 0.0  # time of the next check for lost connections

    def wait(
        self,
        connections: Mapping[int, Connection],
        missing: Iterable[int] | None,
        most_s: float = inf,
    ) -> tuple[set[int], set[int]]:
        """Wait until one of these connections is ready, or a rank connects, or some time is over.

        Return the ranks whose connections may be ready, and all descriptors that are. `missing` are
        the ranks that may connect; None if the exchange needs none. Raises `LostConnectionError`.
        """
        sockets, others = dict[int, int](), set[int]()
        most_s = min(most_s, self._timeout_s / _LOOKS)
        poll, uses_channel = select.poll(), False
        poll.register(self._setup.bell, select.POLLIN)
        for rank, connection in connections.items():
            if isinstance(connection.socket, Stream):
                others.add(rank)
                if connection.socket.is_ready(connection.events):
                    most_s = 0.0
                continue
            sockets[connection.socket.fileno()] = rank
            poll.register(connection.socket, connection.events)
            if connection.uses_channel:  # which has no descriptor
                others.add(rank)
                most_s, uses_channel = 0.0, True
        if missing is not None:
            most_s = min(most_s, self._setup.register(poll, missing))
        polled = poll.poll(most_s * 1000)
        for number, event in polled:
            if event & select.POLLRDHUP:  # a connection that waits for UCX does not read its socket
                raise LostConnectionError(sockets[number], "closed by the peer")
        if not polled and uses_channel:
            time.sleep(NAP_S)
        if not polled and time.monotonic() >= self._look_s:
            self._check({rank: connections[rank] for rank in sockets.values()})
        self._setup.bell.hush()
        ready = {number for number, _ in polled}
        return {*others, *(sockets[number] for number in ready & sockets.keys())}, ready

    def _check(self, connections: Mapping[int, Connection]) -> None:
        """Raise `LostConnectionError` if a connection to another host is lost."""
        self._look_s = time.monotonic() + self._timeout_s / _LOOKS / 2
        for rank, connection in connections.items():
            if is_lost(connection.socket, self._timeout_s):
                raise LostConnectionError(rank, f"no answer for {self._timeout_s:g} s")
