"""Connection setup with a rank that has returned, and the end of an attempt."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import ExitStack

import pytest

from dask_p2p.errors import SectionError
from dask_p2p.plans.ranks import branch
from dask_p2p.sections.wire.connection import AttemptEndedError
from tests.sections.wire.support import LARGE, TCP, Gang, tls
from tests.support import BOUND_S


def finished(rank, connections):
    connections.finish()
    return sorted(other for other, *_ in connections.received)


@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_the_end_makes_only_the_connections_of_a_tree(size):
    with Gang(size) as gang:
        found = gang.run(finished)
    for rank, ranks in enumerate(found):
        above, below = branch(rank, size)
        assert ranks == [*above, *below]


def test_the_end_waits_for_all_ranks(gang):
    """Also for ranks without a connection to this one."""
    futures = gang.begin(lambda rank, connections: rank == 1 or connections.finish())
    assert not wait(futures[::2], 0.2).done
    gang.threads.submit(gang.connections[1].finish).result(BOUND_S)
    for future in futures[::2]:
        future.result(BOUND_S)


def test_the_end_waits_for_an_exchange_that_has_begun(gang):
    def exchange(rank, connections):
        others = dict.fromkeys({0, 1, 2} - {rank})
        end = connections.begin("x", dict.fromkeys(others, b"x" * LARGE), others)
        connections.finish()
        return [len(data) for data in end().values()]

    assert gang.run(exchange) == [[LARGE, LARGE]] * 3


SIZE = 12  # in a tree, some of these have no connection to each other


@pytest.fixture(params=["one process", "one host", "tcp", "tls"])
def large_gang(request):
    if request.param != "one process":
        request.getfixturevalue("processes" if request.param == "one host" else "hosts")
    with Gang(SIZE, tls() if request.param == "tls" else TCP) as gang:
        yield gang


@pytest.mark.parametrize(("waits", "returns"), [(10, 11), (11, 10), (11, 2), (0, 11), (11, 0)])
@pytest.mark.parametrize("sends", [True, False])
def test_a_rank_that_waits_for_a_rank_that_has_returned(large_gang, waits, returns, sends):
    """They have no connection yet, and none in the tree. The scheduler notices nothing."""

    def exchange(rank, connections):
        if rank == waits:
            connections.exchange("x", {returns: b"x"} if sends else {}, {returns: None})
        connections.finish()

    raised = errors_of(large_gang, exchange)
    assert any(isinstance(each, SectionError) for each in raised), raised
    for each in raised:
        if isinstance(each, SectionError):
            assert f"finalize() at the return of its function on rank {returns}" in str(each)
            assert f"x on rank {waits}" in str(each)
        else:
            assert isinstance(each, AttemptEndedError)


@pytest.mark.parametrize(("sends", "returns"), [(10, 11), (11, 10), (2, 11), (11, 2)])
def test_a_rank_that_sends_to_a_rank_that_has_returned(large_gang, sends, returns):
    """The kernel may accept the message, and all functions return. But the calls differ."""

    def exchange(rank, connections):
        if rank == sends:
            connections.exchange("x", {returns: b"x"}, {})
        connections.finish()

    raised = errors_of(large_gang, exchange)
    assert any(isinstance(each, SectionError) for each in raised), raised


@pytest.mark.parametrize("gang", ["one process", "one host", "tcp"], indirect=True)
def test_a_rank_returns_only_after_it_has_answered_all_peers(gang, monkeypatch):
    """A peer connects while the rank does not poll, and finalizes before the rank polls again."""
    late = gang.connections[2]
    polled, has_polled, root_has_returned = late._wait, threading.Event(), threading.Event()

    def polled_once():
        ranks = polled()
        if 0 in ranks and not has_polled.is_set():
            has_polled.set()
            root_has_returned.wait(0.3)
        return ranks

    monkeypatch.setattr(late, "_wait", polled_once)

    def exchange(rank, connections):
        if rank == 1:
            assert has_polled.wait(BOUND_S)
            connections.exchange("x", {2: b"x"}, {})
        connections.finish()
        if rank == 0:
            root_has_returned.set()

    raised = errors_of(gang, exchange)
    assert any(isinstance(each, SectionError) for each in raised), raised


def errors_of(gang, function):
    """Return the errors of the ranks. The first one ends the attempt, as the scheduler does."""
    futures = gang.begin(function)
    wait(futures, BOUND_S, FIRST_EXCEPTION)
    gang.wake()
    raised = [future.exception(BOUND_S) for future in futures]
    return [each for each in raised if each is not None]


@pytest.mark.parametrize("host", ["processes", "hosts"])
def test_ranks_connect_among_many_silent_strangers(request, host):
    """The process could not have all of them as open files."""
    request.getfixturevalue(host)
    with Gang(2) as gang, ExitStack() as closing:
        *_, name, _, address, port = gang.connections[1].endpoint.split()
        for family, at in (
            (socket.AF_UNIX, bytes.fromhex(name)),
            (socket.AF_INET, (address, int(port))),
        ):
            for _ in range(300):
                made = closing.enter_context(socket.socket(family))
                made.connect(at)
        before = len(os.listdir("/proc/self/fd"))

        def exchange(rank, connections):
            found = connections.exchange("x", {1 - rank: b"abc"}, {1 - rank: None})
            return bytes(found[1 - rank]), len(os.listdir("/proc/self/fd"))

        for found, opened in gang.run(exchange):
            assert found == b"abc"
            assert opened < before + 100
