"""Connection setup with a rank that has returned, and the end of an attempt."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import ExitStack, suppress

import pytest

from dask_p2p.errors import SectionError
from dask_p2p.sections.wire import endpoint
from dask_p2p.sections.wire.connection import AttemptEndedError
from tests.sections.wire.support import TCP, Gang, swap, tls
from tests.support import BOUND_S
from tests.transports.loopback import wait_until

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
    assert any(isinstance(error, SectionError) for error in raised), raised
    for error in raised:
        if isinstance(error, SectionError):
            assert f"finalize() at the return of its function on rank {returns}" in str(error)
            assert f"x on rank {waits}" in str(error)
        else:
            assert isinstance(error, AttemptEndedError)


@pytest.mark.parametrize("gang", ["one process", "one host", "tcp"], indirect=True)
def test_a_rank_returns_only_after_it_has_answered_all_peers(gang, monkeypatch):
    """A peer connects while the rank does not poll, and finalizes before the rank polls again."""
    late, calls = gang.connections[2], itertools.count()
    exchange_late, has_polled = late.exchange, threading.Event()
    root_has_returned = threading.Event()

    def exchange_once(*call):
        payloads = exchange_late(*call)
        if next(calls) == 1:  # the rank and the root have finalized
            has_polled.set()
            root_has_returned.wait(0.3)
        return payloads

    monkeypatch.setattr(late, "exchange", exchange_once)

    def exchange(rank, connections):
        if rank == 1:
            assert has_polled.wait(BOUND_S)
            connections.exchange("x", {2: b"x"}, {})
        connections.finish()
        if rank == 0:
            root_has_returned.set()

    raised = errors_of(gang, exchange)
    assert any(isinstance(error, SectionError) for error in raised), raised


def errors_of(gang, function):
    """Return the errors of the ranks. The first one ends the attempt, as the scheduler does."""
    futures = gang.begin(function)
    wait(futures, BOUND_S, FIRST_EXCEPTION)
    gang.wake()
    raised = [future.exception(BOUND_S) for future in futures]
    return [error for error in raised if error is not None]


@pytest.mark.slow
@pytest.mark.parametrize("host", ["processes", "hosts"])
def test_ranks_connect_among_many_silent_connections(request, host, monkeypatch):
    """The process could not have all of them as open files."""
    monkeypatch.setattr(endpoint, "_SILENT_S", 1.0)  # ranks wait for that twice
    request.getfixturevalue(host)
    with Gang(2) as gang, ExitStack() as closing:
        for at in addresses(gang.connections[1]):
            for _ in range(150):
                closing.enter_context(connected(*at))
        before = len(os.listdir("/proc/self/fd"))

        def exchange(rank, connections):
            return swap(rank, connections), len(os.listdir("/proc/self/fd"))

        for payload, opened in gang.run(exchange):
            assert payload == b"abc"
            assert opened < before + 200


def addresses(connections):
    """Return the addresses of a rank's Unix socket and of its port."""
    *_, name, _, host, port = connections.endpoint.split()
    return (socket.AF_UNIX, bytes.fromhex(name)), (socket.AF_INET, (host, int(port)))


def connected(family, address):
    peer_socket = socket.socket(family)
    peer_socket.connect(address)
    return peer_socket


def is_closed(peer_socket):
    peer_socket.settimeout(BOUND_S)
    with suppress(ConnectionResetError):  # before all was read
        while peer_socket.recv(100):  # with TLS an alert comes first
            pass
    return True


@pytest.mark.parametrize("gang", ["one host", "tcp", "tls"], indirect=True)
def test_connections_without_tokens_of_the_gang_are_closed(gang):
    """Those of other attempts, of no attempt, and silent ones."""
    with ExitStack() as closing:
        for at in addresses(gang.connections[1]):
            for preamble in (
                b"GET / HTTP/1.0\r\n\r\n".ljust(65),
                f"{gang.peers[0].token}{'of another attempt':32}?".encode(),
                b"\xff" * 65,
            ):
                peer_socket = closing.enter_context(connected(*at))
                peer_socket.sendall(preamble)
                closing.enter_context(connected(*at))  # silent
                futures = gang.begin(swap)
                assert [future.result(BOUND_S) for future in futures[:2]] == [b"abc", b"abc"]
                assert is_closed(peer_socket)


@pytest.mark.parametrize("gang", ["one process", "one host", "tcp", "tls"], indirect=True)
def test_two_ranks_that_connect_to_each_other_share_one_connection(gang, monkeypatch):
    """The connection of the higher rank arrives while the lower one connects."""
    lower, higher = gang.connections[:2]
    asked, answered = threading.Event(), threading.Event()
    open_lower, open_higher = lower._endpoint.connect, higher._endpoint.connect

    def connect_lower(peer, asks):
        assert asked.wait(BOUND_S)
        assert answered.wait(BOUND_S)
        return open_lower(peer, asks)

    def connect_higher(peer, asks):
        wait_until(lambda: lower._endpoint._met)
        asked.set()
        connection = open_higher(peer, asks)
        answered.set()
        return connection

    monkeypatch.setattr(lower._endpoint, "connect", connect_lower)
    monkeypatch.setattr(higher._endpoint, "connect", connect_higher)
    assert gang.run(swap)[:2] == [b"abc", b"abc"]
    assert gang.run(swap)[:2] == [b"abc", b"abc"]


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.EHOSTUNREACH])
def test_errors_of_a_peer_keep_no_other_one_out(processes, monkeypatch, number):
    accept, errors = socket.socket.accept, [OSError(number, "")] * 12

    def accept_late(listener):
        try:
            error = errors.pop()
        except IndexError:
            return accept(listener)
        raise error

    monkeypatch.setattr(socket.socket, "accept", accept_late)
    with Gang(2) as gang:
        assert gang.run(swap) == [b"abc", b"abc"]


def test_a_connection_of_another_user_is_closed(processes, monkeypatch):
    with Gang(2) as gang:
        monkeypatch.setattr(endpoint.os, "geteuid", lambda: -1)
        (unix, _) = addresses(gang.connections[1])
        with connected(*unix) as peer_socket:
            assert is_closed(peer_socket)


def test_a_silent_connection_is_closed_after_a_while(processes, monkeypatch):
    monkeypatch.setattr(endpoint, "_SILENT_S", 0.1)
    with Gang(2) as gang:
        for at in addresses(gang.connections[1]):
            with connected(*at) as peer_socket:
                assert is_closed(peer_socket)
