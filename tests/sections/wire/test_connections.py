"""Connections between ranks that are threads here."""

import errno
import gc
import itertools
import os
import select
import socket
import threading
import time
import weakref
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import ExitStack, suppress
from dataclasses import replace

import numpy as np
import pytest

from dask_p2p.errors import SectionError
from dask_p2p.sections.wire import endpoint
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.sections.wire.endpoint import Reach
from dask_p2p.sections.wire.streams import Bell, pair
from tests.sections.gangs import disconnect, has_come, stop_listening
from tests.sections.wire.support import LARGE, TCP, Gang, swap, tls
from tests.support import BOUND_S, tune
from tests.transports.loopback import wait_until


def test_an_exchange_proceeds_in_the_background(gang):
    """Of all with all, also of more data than sockets buffer."""
    arrived = threading.Barrier(3)

    def exchange(rank, connections):
        peer_ranks = dict.fromkeys({0, 1, 2} - {rank})
        data_of = {peer_rank: bytes([10 * rank + peer_rank]) * LARGE for peer_rank in peer_ranks}
        end = connections.begin("x", data_of, peer_ranks, in_background=True)
        arrived.wait(BOUND_S)
        # Before the exchange is completed.
        wait_until(lambda: all(has_come(connections, peer_rank) for peer_rank in peer_ranks))
        return {peer_rank: bytes(data) for peer_rank, data in end().items()}

    for rank, data_of in enumerate(gang.run(exchange)):
        assert data_of == {r: bytes([10 * r + rank]) * LARGE for r in {0, 1, 2} - {rank}}


def test_failed_connections_keep_no_stack_frames(gang):
    """Frames refer to the arrays of the attempt."""
    references, errors = [], []

    def second(connections):
        local_block = np.ones(10)
        references.append(weakref.ref(local_block))
        connections.exchange("second", {}, {1: None})

    def exchange(rank, connections):
        connections.exchange("first", {1 - rank: b"x"}, {1 - rank: None})
        if rank == 1:
            disconnect(connections, 0)
            return
        try:
            second(connections)
        except AttemptEndedError as error:
            errors.append(str(error))

    gc.disable()
    try:
        gang.run(lambda rank, connections: rank < 2 and exchange(rank, connections))
        (text,), (local_block,) = errors, references
        assert "the connection to rank 1 on worker broke" in text
        assert local_block() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("gang", ["one process", "one host", "tcp", "tls"], indirect=True)
def test_a_peer_that_has_gone_cannot_be_reached(gang):
    stop_listening(gang.connections[1])
    future, *_ = gang.begin(lambda rank, connections: rank or swap(rank, connections))
    assert isinstance(future.exception(BOUND_S), AttemptEndedError)


@pytest.mark.slow
@pytest.mark.parametrize("reach", [TCP, pytest.param(None, id="tls")])
def test_a_rank_that_receives_nothing_for_long_is_not_lost(hosts, reach):
    """It computes: its kernel answers."""
    with Gang(2, replace(reach or tls(), timeout_s=1.0)) as gang:

        def exchange(rank, connections):
            connections.exchange("first", {1 - rank: b""}, {1 - rank: None})
            if rank == 0:
                return connections.exchange("second", {1: bytes(LARGE)}, {})
            time.sleep(3)
            return len(connections.exchange("second", {}, {0: None})[0])

        assert gang.run(exchange)[1] == LARGE


def test_a_handshake_that_ends_while_a_rank_reads(hosts, monkeypatch):
    """The bytes that waited for the handshake are sent without another event."""
    received = endpoint.TlsSocket.recv_into

    def late(tls_socket, *args):
        """Read after all bytes that the other end sends by itself have arrived."""
        while not tls_socket.server_side and select.select([tls_socket], [], [], 0.2)[0]:
            with suppress(BlockingIOError):
                return received(tls_socket, *args)
        return received(tls_socket, *args)

    monkeypatch.setattr(endpoint.TlsSocket, "recv_into", late)
    tune(monkeypatch, spin_s=0)
    with Gang(2, tls()) as gang:
        assert gang.run(swap) == [b"abc", b"abc"]


def test_connections_leave_no_descriptor():
    def exchange(rank, connections):
        others = dict.fromkeys({0, 1, 2} - {rank})
        return connections.exchange("x", dict.fromkeys(others, b"x"), others)

    with Gang(3) as gang:
        gang.run(exchange)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with Gang(3) as gang:
            gang.run(exchange)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)


@pytest.mark.parametrize("can_encrypt", ["no rank", "one rank"])
def test_ranks_that_must_encrypt_and_cannot_have_no_connections_between_hosts(hosts, can_encrypt):
    if can_encrypt == "no rank":
        gang, words = Gang(2, Reach()), "none here and none"
    else:
        gang, words = Gang(2, tls(), first=TCP), "tcp here and tls"
    with gang:
        future, _ = gang.begin(lambda rank, connections: rank or swap(rank, connections))
        with pytest.raises(SectionError, match=f"got {words} on worker"):
            future.result(BOUND_S)


def test_ranks_without_a_certificate_of_the_cluster_are_disconnected(hosts):
    with Gang(2, tls(), first=tls.__wrapped__()) as gang:  # of another cluster
        for future in gang.begin(swap):
            assert isinstance(future.exception(BOUND_S), AttemptEndedError)


# --- streams between ranks of one process


@pytest.fixture
def bells():
    pair_of_bells = Bell(), Bell()
    yield pair_of_bells
    for bell in pair_of_bells:
        bell.close()


def test_a_full_stream_takes_more_after_bytes_were_received(bells):
    one, far = pair(*bells)
    sent = one.sendmsg([bytes(10_000_000)])
    assert 0 < sent < 10_000_000
    assert not one.is_ready(select.POLLOUT)
    with pytest.raises(BlockingIOError):
        one.sendmsg([b"a"])
    assert far.recv_into(bytearray(100)) == 100
    assert os.eventfd_read(bells[0].fileno()), "it rings"
    assert one.is_ready(select.POLLOUT)
    assert one.sendmsg([bytes(1000)]) == 100


def test_a_closed_bell_writes_to_no_file(tmp_path):
    """Another file may have its number."""
    bell, far = Bell(), Bell()
    one, _ = pair(bell, far)
    number = far.fileno()
    far.close()
    with open(tmp_path / "file", "wb") as file:
        os.dup2(file.fileno(), number)
        one.sendmsg([b"a"])
        one.close()
        far.ring()
        bell.close()
        if file.fileno() != number:
            os.close(number)
    assert not (tmp_path / "file").stat().st_size


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
    is_requested, is_replied = threading.Event(), threading.Event()
    open_lower, open_higher = lower._endpoint.connect, higher._endpoint.connect

    def connect_lower(peer, asks):
        assert is_requested.wait(BOUND_S)
        assert is_replied.wait(BOUND_S)
        return open_lower(peer, asks)

    def connect_higher(peer, asks):
        wait_until(lambda: lower._endpoint._met)
        is_requested.set()
        connection = open_higher(peer, asks)
        is_replied.set()
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


@pytest.mark.parametrize(
    ("number", "text"), [(errno.EMFILE, "one more open file"), (errno.ENOMEM, "cannot accept")]
)
def test_the_error_of_a_rank_that_cannot_accept(processes, monkeypatch, number, text):
    """Its peer does not see it leave before: it would report a lost rank."""
    with Gang(2) as gang:
        (lower, higher), streams = gang.connections, []
        monkeypatch.setattr(lower._endpoint, "take", lambda _, stream, asks: streams.append(stream))
        future = gang.threads.submit(swap, 1, higher)
        wait_until(lambda: streams)
        higher._endpoint.fail(OSError(number, ""))
        with pytest.raises(SectionError, match=text):
            future.result(BOUND_S)
        streams[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            streams[0].recv(1)
    with streams[0] as stream:
        assert is_closed(stream)


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
