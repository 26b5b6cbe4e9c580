"""Gangs of connections whose ranks are threads here, and the settings of their hosts."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

from distributed import Security

from dask_p2p.sections.wire.connections import Connections
from dask_p2p.sections.wire.endpoint import RankAddress, Reach
from dask_p2p.sections.wire.frames import HEADER, inline_start
from tests.support import BOUND_S

LARGE = 5_000_000  # bytes: more than the buffers of a socket


TCP = Reach("127.0.0.1")


def inline_header(tag, communicator, description, data):
    """Return the header of a message with a value in it."""
    return (inline_start(tag, communicator, description) + data).ljust(HEADER.size, b"\0")


@cache
def tls():
    """Return the reach of a worker with a certificate that only one cluster has."""
    security = Security.temporary()
    listening = security.get_listen_args("worker")["ssl_context"]
    connecting = security.get_connection_args("worker")["ssl_context"]
    return Reach("127.0.0.1", listening, connecting)


class Gang:
    """Ranks that have started, each with a thread."""

    def __init__(self, size, reach=TCP, messengers=None, first=None):
        """`first` is the reach of the first rank, if it differs from that of the others."""
        of_all = (
            [first or reach, *[reach] * (size - 1)]
            if messengers is None
            else [replace(reach, uses_ucx=each is not None) for each in messengers]
        )
        self.connections = [Connections(each) for each in of_all]
        self.peers = [
            RankAddress("worker", connections.token, connections.endpoint)
            for connections in self.connections
        ]
        for rank, connections in enumerate(self.connections):
            connections.start(rank, self.peers)
        self.threads = ThreadPoolExecutor(size)
        if messengers is not None:
            self.run(lambda rank, connections: connections.open_channels(lambda: messengers[rank]))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.wake()  # ends the ranks that still wait after a failed test
        self.threads.shutdown()
        for connections in self.connections:
            connections.close()

    def wake(self):
        for connections in self.connections:
            connections.wake()

    def begin(self, function):
        """Call a function on each rank; return futures, by rank."""
        return [
            self.threads.submit(function, rank, connections)
            for rank, connections in enumerate(self.connections)
        ]

    def run(self, function):
        return [future.result(BOUND_S) for future in self.begin(function)]


def swap(rank, connections):
    """Exchange bytes between the first two ranks; return those of the other one."""
    if rank < 2:
        return bytes(connections.exchange("x", {1 - rank: b"abc"}, {1 - rank: None})[1 - rank])
    return None
