"""Connections between ranks that are threads here."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
import weakref
from contextlib import suppress
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

#: Ranks that have exchanged nothing yet.
UNCONNECTED = pytest.mark.parametrize(
    "gang", ["one process", "one host", "tcp", "tls"], indirect=True
)


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


@UNCONNECTED
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


def rings(bell):
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    return bool(poll.poll(0))


def received(end, most):
    into = bytearray(most)
    return bytes(into[: end.recv_into(into)])


def test_a_full_stream_takes_more_after_bytes_were_received(bells):
    one, far = pair(*bells)
    sent = one.sendmsg([bytes(10_000_000)])
    assert 0 < sent < 10_000_000
    assert not one.is_ready(select.POLLOUT)
    with pytest.raises(BlockingIOError):
        one.sendmsg([b"a"])
    assert len(received(far, 100)) == 100
    assert rings(bells[0])
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
