"""Large messages between ranks by UCX; each rank is on a host of its own here."""

import threading
import time
from unittest import mock

import pytest

from dask_p2p.errors import SectionError
from dask_p2p.sections.wire import connection as module
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.sections.wire.endpoint import Reach
from dask_p2p.transports.ucx_messenger import Messenger
from tests.sections.gangs import connection_to
from tests.sections.wire.support import Gang
from tests.support import BOUND_S, tune
from tests.transports.loopback import wait_until

SILENCE_S = 2.0
LARGE = bytes(range(256)) * (2**22 // 256)


@pytest.fixture
def pair(hosts, messengers):
    with Gang(2, Reach("127.0.0.1"), messengers[:2]) as gang:
        yield gang


@pytest.fixture
def impatient(hosts, messengers):
    with Gang(2, Reach("127.0.0.1", timeout_s=SILENCE_S), messengers[:2]) as gang:
        yield gang


def swap(payload, into=None):
    """Return a function for two ranks that sends bytes both ways."""

    def exchange(rank, connections):
        far = 1 - rank
        return connections.exchange("swap", {far: payload}, {far: into and into[rank]})[far]

    return exchange


def received_bytes(connections):
    return sum(size_bytes for _, size_bytes, _ in connections.received)


def in_transit(messengers):
    return sum(messenger.in_flight for messenger in messengers)


@pytest.mark.parametrize("part_bytes", [2**25, 100_000])
@pytest.mark.parametrize("has_buffer", [False, True])
def test_large_messages_go_by_ucx(pair, monkeypatch, part_bytes, has_buffer):
    tune(monkeypatch, ucx_part_bytes=part_bytes)
    send = mock.create_autospec(Messenger.send, side_effect=Messenger.send)
    monkeypatch.setattr(Messenger, "send", send)
    before = [received_bytes(connections) for connections in pair.connections]
    for _ in range(3):
        into = [bytearray(len(LARGE)), bytearray(len(LARGE))] if has_buffer else None
        assert [*map(bytes, pair.run(swap(LARGE, into)))] == [LARGE, LARGE]
    sizes_bytes = [len(call.args[2]) for call in send.call_args_list]
    assert sum(sizes_bytes) == 2 * 3 * len(LARGE)
    assert max(sizes_bytes) == min(part_bytes, len(LARGE))
    for connections, before_bytes in zip(pair.connections, before, strict=True):
        assert received_bytes(connections) == before_bytes + 3 * len(LARGE)


@pytest.mark.slow
def test_a_rank_that_sends_late_is_waited_for(impatient):
    def exchange(rank, connections):
        if rank:
            time.sleep(2 * SILENCE_S)
        return swap(LARGE)(rank, connections)

    assert impatient.run(exchange) == [LARGE, LARGE]


def test_parts_that_do_not_come_end_the_attempt(impatient, monkeypatch):
    """As over an interrupted connection, which UCX does not report."""
    monkeypatch.setattr(module.Channel, "send", lambda *_: None)
    futures = impatient.begin(swap(LARGE, [bytearray(2**22)] * 2))
    errors = [future.exception(BOUND_S) for future in futures]
    assert {*map(type, errors)} == {AttemptEndedError}
    assert any(f"no bytes within {SILENCE_S:g} s" in str(error) for error in errors)


@pytest.mark.parametrize("end", ["is woken", "has a peer that closes"])
def test_a_rank_that_waits_for_bytes_ends(pair, monkeypatch, end):
    """Long before the time limit for the bytes."""
    monkeypatch.setattr(module.Channel, "send", lambda *_: None)
    monkeypatch.setattr(module.Channel, "expect", lambda _: None)
    is_waiting = threading.Event()

    def exchange(rank, connections):
        if rank == 0:
            return connections.exchange("large", {}, {1: bytearray(len(LARGE))})
        connections.exchange("large", {0: LARGE}, {})
        wait_until(lambda: connection_to(pair.connections[0], 1).receiving is None)
        is_waiting.set()
        if end == "is woken":
            pair.connections[0].wake()
        else:
            connection_to(connections, 1 - rank).close()
        return None

    waiting, _ = pair.begin(exchange)
    assert is_waiting.wait(BOUND_S)
    assert isinstance(waiting.exception(BOUND_S), AttemptEndedError)


@pytest.mark.parametrize("sends", [True, False])
def test_a_worker_that_closes_ends_the_attempt(pair, messengers, sends):
    """Its transports may close before its ranks end: the user's function is not the cause."""
    messengers[0].close()

    def exchange(rank, connections):
        far = 1 - rank
        if sends == (rank == 0):
            return connections.exchange("large", {far: LARGE}, {})
        return connections.exchange("large", {}, {far: bytearray(len(LARGE))})

    closing, _ = pair.begin(exchange)
    error = closing.exception(BOUND_S)
    assert isinstance(error, AttemptEndedError)
    assert "broke: the worker is closing" in str(error)
    pair.wake()


@pytest.mark.slow
@pytest.mark.parametrize("sends", [True, False])
def test_abandoned_messages_are_cancelled(hosts, messengers, monkeypatch, sends):
    """A rank's call differs: no peer sends a matching message, or receives one."""
    monkeypatch.setattr("dask_p2p.transports.ucx_messenger.CLOSE_TIMEOUTS", 1)

    def exchange(rank, connections):
        if rank:
            return connections.exchange("another", {0: b""}, {})
        return connections.exchange("one", {1: LARGE} if sends else {}, {1: bytearray(len(LARGE))})

    with Gang(2, Reach("127.0.0.1", timeout_s=SILENCE_S), messengers[:2]) as gang:
        waiting, _ = gang.begin(exchange)
        assert isinstance(waiting.exception(BOUND_S), SectionError)
        assert in_transit(messengers) == 1 + sends
    wait_until(lambda: in_transit(messengers) == 0)
