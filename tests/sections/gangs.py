"""Gangs whose ranks are threads here, with real connections between them."""

import socket
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from dask_p2p.sections import Context
from dask_p2p.sections.exchange.device import HOST
from dask_p2p.sections.wire.connections import ONE_RANK, Connections
from dask_p2p.sections.wire.endpoint import RankAddress, Reach
from dask_p2p.sections.wire.streams import Stream
from tests.support import BOUND_S


def connections_of(owner):
    """Return a rank's connections, from its context, its device or the mover of its regions."""
    return owner._connections


def connection_to(connections, rank):
    """Return the connection to another rank, which exists after their first exchange."""
    return connections._connections[rank]


def has_come(connections, rank):
    """Return whether all data of the exchange with a rank has arrived."""
    return (
        rank in {peer_rank for peer_rank, *_ in connections.received}
        and connection_to(connections, rank).has_received
    )


def is_exchanging(connections):
    """Return whether a rank is in a call of all ranks."""
    return connections._payloads is not None


def is_at_call(connections, rank):
    """Return whether the header of a call of a rank has come."""
    return rank in connections._connections and bool(connection_to(connections, rank).call)


def disconnect(connections, rank):
    """End a connection, as if the process at one of its ends had died."""
    peer_socket = connection_to(connections, rank).socket
    peer_socket.close() if isinstance(peer_socket, Stream) else peer_socket.shutdown(
        socket.SHUT_RDWR
    )


class NoAcceptors(dict):
    """The running acceptors of a process whose ranks do not share them."""

    def __setitem__(self, key, value):
        pass


def stop_listening(connections):
    """Make a rank unreachable for others."""
    connections._endpoint._acceptor.remove(connections._endpoint)


def messenger():
    """Return the messenger of a rank for UCX: None here."""


def run_gang(
    ranks, function, device=lambda _: HOST, checkpoints=lambda *_: None, context=Context, **kwargs
):
    """Call a function of a context on each rank; return the results, or raise a rank's error.

    `device` returns the device of a rank's local blocks, from its connections. `checkpoints`
    returns the object that keeps a rank's states, from the rank, its connections and its device.
    `context` is the class of the ranks' contexts.
    """
    connections = [Connections(Reach()) for _ in range(ranks.size)]
    peers = [RankAddress("worker", ends.token, ends.endpoint) for ends in connections]
    contexts = []
    for rank, rank_connections in enumerate(connections):
        rank_connections.start(rank, peers)
        ctx_connections = rank_connections if ranks.size > 1 else ONE_RANK
        at = device(ctx_connections)
        keeps = checkpoints(rank, ctx_connections, at)
        contexts.append(context(ranks, rank, ctx_connections, keeps, device=at, **kwargs))

    def run(ctx):
        connections[ctx.rank].open_channels(messenger)
        try:
            result = function(ctx)
        finally:
            if isinstance(ctx, Context):
                ctx.close_stores()
        connections[ctx.rank].finish()  # as ranks do
        ctx.device.let_go(is_orderly=True)
        return result

    with ThreadPoolExecutor(ranks.size) as threads:
        futures = [threads.submit(run, ctx) for ctx in contexts]
        finished_futures, _ = wait(futures, BOUND_S, FIRST_EXCEPTION)
        errors = [future.exception() for future in finished_futures if future.exception()]
        for rank_connections in connections:
            rank_connections.wake()  # ends waits of the others, as the scheduler does
        wait(futures, BOUND_S)
    for rank_connections in connections:
        rank_connections.close()
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
