"""Connections that have not sent attempt tokens yet."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

import pytest

from dask_p2p.errors import SectionError
from dask_p2p.sections.wire import streams as module
from dask_p2p.sections.wire.streams import MOST_STRANGERS, Strangers
from tests.clock import Clock


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


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_an_error_of_this_process(door, number):
    with pytest.raises(SectionError, match="expected room for one more open file"):
        door.accepted(OSError(number, "too many open files"))


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM, errno.EBADF, errno.EINVAL])
def test_other_errors_that_last_are_not_passed_over(door, number):
    with pytest.raises(SectionError, match="cannot accept connections"):
        door.accepted(OSError(number, ""))


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.EHOSTUNREACH])
def test_errors_of_a_peer_keep_no_other_one_out(door, connections, number):
    here, there = connections()
    there.send(b"abc")
    assert door.accepted(OSError(number, ""), here) == [(b"abc", here)]


def test_one_that_cannot_be_used_keeps_no_other_one_out(connections):
    def prepared(made):
        if made is bad:
            raise OSError(errno.ENOTCONN, "gone")
        return made

    (bad, _), (here, there) = connections(), connections()
    there.send(b"abc")
    assert Door(prepared).accepted(bad, here) == [(b"abc", here)]


def test_a_connection_of_another_user_is_closed(door, connections, monkeypatch):
    here, there = connections()
    there.send(b"abc")
    monkeypatch.setattr(module.os, "geteuid", lambda: -1)
    assert door.accepted(here) == []
    assert is_closed(there)


def test_no_more_than_some_tens_are_taken_and_these_make_room(door, connections, clock):
    made = [connections() for _ in range(2 * MOST_STRANGERS)]
    made[-1][1].send(b"abc")
    assert door.accepted(*(here for here, _ in made)) == []
    assert len(door.listener.results) == MOST_STRANGERS < 100
    clock.now_s += door.strangers.patience_s
    assert door.accepted() == [(b"abc", made[-1][0])]
    assert all(is_closed(there) for _, there in made[:MOST_STRANGERS])


class Encrypted(socket.socket):
    """Must shake hands before it sends."""


def test_encrypted_connections_have_time_for_the_handshake(connections, clock):
    door = Door(lambda made: Encrypted(fileno=made.detach()))
    made = [connections() for _ in range(MOST_STRANGERS)]
    late, sender = connections()
    sender.send(b"abc")
    assert door.accepted(*(here for here, _ in made), late) == []
    assert -1 not in door.strangers.numbers
    clock.now_s += 0.5
    assert door.accepted() == []
    assert not any(is_closed(there) for _, there in made)
    assert 0.1 < door.strangers.patience_s < 1
    clock.now_s += door.strangers.patience_s
    assert door.accepted() == []
    assert all(is_closed(there) for _, there in made)
    assert -1 in door.strangers.numbers
    ((sent, found),) = door.accepted()
    assert sent == b"abc"
    found.close()


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


def test_a_connection_whose_peer_has_closed_it_is_closed(door, connections):
    here, there = connections()
    there.close()
    assert door.accepted(here) == []
    assert here.fileno() == -1
