"""Waits for one of several connections, whose other ends are here."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from math import inf
from types import SimpleNamespace

import pytest

from dask_p2p.sections.wire import point_to_point as module
from dask_p2p.sections.wire.connection import Connection
from dask_p2p.sections.wire.point_to_point import LostConnectionError, Polling
from dask_p2p.sections.wire.streams import Bell
from dask_p2p.transports.ucx_messenger import NAP_S

BRIEF_S = 0.01  # for waits that nothing ends


@pytest.fixture
def bell():
    with closing(Bell()) as bell:
        yield bell


@pytest.fixture
def ends():
    """By rank: a connection that waits for a message, and its other end."""
    with ExitStack() as stack:
        ends = {}
        for rank in (3, 5):
            ours, theirs = map(stack.enter_context, socket.socketpair())
            ends[rank] = Connection(ours), theirs
            ends[rank][0].begin_to_receive(None)
        yield ends


def wait(bell, ends, timeout_s=60.0):
    setup = SimpleNamespace(bell=bell)
    return Polling(setup, timeout_s).wait({rank: own for rank, (own, _) in ends.items()}, None)


def test_a_message_has_come(bell, ends):
    own, theirs = ends[5]
    theirs.send(b"a message")
    assert wait(bell, ends) == ({5}, {own.socket.fileno()})


def test_nothing_has_come_for_some_time(bell, ends):
    assert wait(bell, ends, BRIEF_S) == (set(), set())


def test_a_bell_ends_one_wait(bell, ends):
    bell.ring()
    assert wait(bell, ends) == (set(), {bell.fileno()})
    assert wait(bell, ends, BRIEF_S) == (set(), set())


def test_new_connections_are_polled_if_a_rank_misses_one(bell, ends):
    listener, other = socket.socketpair()
    with listener, other:
        other.send(b"a rank")

        def register(poll, missing):
            assert missing == {7}
            poll.register(listener)
            return inf

        polling = Polling(SimpleNamespace(bell=bell, register=register), 60.0)
        found, ready = polling.wait({3: ends[3][0]}, {7})
        assert (found, ready) == (set(), {listener.fileno()})


def test_a_message_by_ucx_is_looked_for_after_a_nap(bell, ends, monkeypatch):
    own, _ = ends[3]
    own.channel = SimpleNamespace(is_busy=True)
    naps_s = []
    monkeypatch.setattr(module.time, "sleep", naps_s.append)
    assert wait(bell, ends) == ({3}, set())
    assert naps_s == [NAP_S]


def test_a_peer_that_closes_while_a_message_comes_by_ucx(bell, ends):
    own, theirs = ends[3]
    own.channel = SimpleNamespace(is_busy=True)
    theirs.close()
    with pytest.raises(LostConnectionError) as lost:
        wait(bell, ends)
    assert (lost.value.rank, lost.value.why) == (3, "closed by the peer")


def test_a_host_that_is_silent(bell, ends, monkeypatch):
    silent = ends[5][0].socket
    monkeypatch.setattr(module, "is_lost", lambda made, timeout_s: made is silent)
    with pytest.raises(LostConnectionError) as lost:
        wait(bell, ends, BRIEF_S)
    assert (lost.value.rank, lost.value.why) == (5, "no answer for 0.01 s")
