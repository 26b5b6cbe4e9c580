"""Connection setup with a rank that has returned, and the end of an attempt."""

from __future__ import annotations

import errno
import os
import socket
import threading
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import ExitStack

import pytest

from dask_p2p.errors import SectionError
from dask_p2p.plans.ranks import tree_neighbours
from dask_p2p.sections.wire import streams as module
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.sections.wire.streams import Strangers
from tests.clock import Clock
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
        above, below = tree_neighbours(rank, size)
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


@pytest.fixture(params=["one host", "tls"])
def large_gang(request):
    request.getfixturevalue("processes" if request.param == "one host" else "hosts")
    with Gang(SIZE, tls() if request.param == "tls" else TCP) as gang:
        yield gang


@pytest.mark.parametrize(("waits", "returns"), [(10, 11), (11, 2), (0, 11)])
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


# --- connections that have not sent attempt tokens yet


class Listener:
    """Raises or returns its results, one after another."""

    def __init__(self):
        self.results = []

    def fileno(self):
        return -1

    def accept(self):
        result = self.results.pop(0) if self.results else BlockingIOError(errno.EAGAIN, "none")
        if isinstance(result, OSError):
            raise result
        return result, ""


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def connections():
    """Make both ends of connections."""
    with ExitStack() as closing:

        def made():
            ends = socket.socketpair()
            for each in ends:
                each.setblocking(False)
                closing.enter_context(each)
            return ends

        yield made


def as_it_is(made):
    return made


class Door:
    """Strangers, at a listener."""

    def __init__(self, prepared=as_it_is):
        self.listener = Listener()
        self.strangers = Strangers(self.listener, prepared, tls_s=30.0)

    def accepted(self, *results, ready=()):
        """After results of the listener; three bytes are wanted."""
        self.listener.results += results
        return self.strangers.accepted({-1, *ready}, 3)


@pytest.fixture
def door():
    return Door()


def is_closed(end):
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:  # before all was read
        return True


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.EHOSTUNREACH])
def test_errors_of_a_peer_keep_no_other_one_out(door, connections, number):
    here, there = connections()
    there.send(b"abc")
    assert door.accepted(OSError(number, ""), here) == [(b"abc", here)]


def test_a_connection_of_another_user_is_closed(door, connections, monkeypatch):
    here, there = connections()
    there.send(b"abc")
    monkeypatch.setattr(module.os, "geteuid", lambda: -1)
    assert door.accepted(here) == []
    assert is_closed(there)


def test_a_connection_that_is_silent_for_long_is_closed(door, connections, clock):
    (here, there), (late, sender) = connections(), connections()
    assert door.accepted(here, late) == []
    assert 0 < door.strangers.patience_s <= 10
    clock.now_s += door.strangers.patience_s / 2
    sender.send(b"a")
    assert door.accepted(ready={late.fileno()}) == []
    clock.now_s += door.strangers.patience_s + 0.1
    assert door.accepted() == []
    assert is_closed(there)
    assert not is_closed(sender)
    sender.send(b"bc")
    assert door.accepted(ready={late.fileno()}) == [(b"abc", late)]
