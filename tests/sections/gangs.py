"""Gangs whose members are threads here, with real links between them."""

from __future__ import annotations

import socket
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from dask_p2p.sections import Context
from dask_p2p.sections.devices import HOST
from dask_p2p.sections.endpoint import Reach
from dask_p2p.sections.in_process import Stream
from dask_p2p.sections.link import RankAddress
from dask_p2p.sections.links import Connections

BOUND_S = 60


def links_of(owner):
    """The links of a member: of its context, its device, or what moves its regions."""
    return owner._links


def link_to(links, rank):
    """What one member has with another, once they have exchanged something."""
    return links._links[rank]


def has_come(links, rank):
    """Whether all of the exchange with another member is here, though nobody waits for it."""
    return rank in {other for other, *_ in links.received} and link_to(links, rank).has_received


def partition(links, rank):
    """Have a link end, as if the process of one of its ends had died."""
    made = link_to(links, rank).socket
    made.close() if isinstance(made, Stream) else made.shutdown(socket.SHUT_RDWR)


def stop_listening(links):
    """Have a member that nobody can reach any more."""
    links._meeting._endpoint.close()


def messenger():
    """Return what a member sends by UCX with; nothing here."""


def no_checkpoints(rank, links, device):
    pass


def run_gang(ranks, function, device=lambda links: HOST, checkpoints=no_checkpoints, **kwargs):
    """Call a function of a context on each member; return the results, or raise what one raised.

    `device` makes of a member's links where its shares lie, `checkpoints` of its rank, its links
    and that what keeps its states.
    """
    links = [Connections(Reach()) for _ in range(ranks.size)]
    peers = [RankAddress("worker", f"{rank:032}", each.endpoint) for rank, each in enumerate(links)]
    contexts = []
    for rank, each in enumerate(links):
        each.start(rank, peers)
        own = each if ranks.size > 1 else None
        at = device(own)
        keeps = checkpoints(rank, own, at)
        contexts.append(Context(ranks, rank, own, keeps, device=at, **kwargs))

    def run(ctx):
        links[ctx.rank].open_channels(messenger)
        result = function(ctx)
        links[ctx.rank].finish()  # as members do
        ctx.device.let_go(is_orderly=True)
        return result

    with ThreadPoolExecutor(ranks.size) as threads:
        futures = [threads.submit(run, ctx) for ctx in contexts]
        done, _ = wait(futures, BOUND_S, FIRST_EXCEPTION)
        first = next((each.exception() for each in done if each.exception()), None)
        for each in links:
            each.wake()  # ends those that wait, as the scheduler does
        wait(futures, BOUND_S)
    for each in links:
        each.close()
    if first is not None:
        raise first
    return [future.result() for future in futures]
