"""Connections of which nobody knows yet whose they are."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

import pytest

from dask_p2p.errors import SectionError
from dask_p2p.sections import strangers as module
from dask_p2p.sections.strangers import MOST_STRANGERS, Strangers


class Listener:
    """Raises and returns what it has, one after another."""

    def __init__(self, *results):
        self.results = list(results)

    def accept(self):
        result = self.results.pop(0) if self.results else BlockingIOError(errno.EAGAIN, "none")
        if isinstance(result, OSError):
            raise result
        return result, ""


class Clock:
    now_s = 100.0

    def monotonic(self):
        return self.now_s


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


@pytest.fixture
def strangers():
    return Strangers(lambda made: made, tls_s=30.0)


def is_closed(end):
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:  # before all was read
        return True


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_an_error_of_this_process(strangers, number):
    with pytest.raises(SectionError, match="expected room for one more open file"):
        strangers.accept(Listener(OSError(number, "too many open files")))


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM, errno.EBADF, errno.EINVAL])
def test_other_errors_that_last_are_not_passed_over(strangers, number):
    with pytest.raises(SectionError, match="cannot take connections"):
        strangers.accept(Listener(OSError(number, "")))


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.EHOSTUNREACH])
def test_errors_of_a_peer_keep_no_other_one_out(strangers, connections, number):
    here, there = connections()
    there.send(b"abc")
    strangers.accept(Listener(OSError(number, ""), here))
    assert strangers.read(set(), 3) == [(b"abc", here)]


def test_one_that_cannot_be_used_keeps_no_other_one_out(connections):
    def prepared(made):
        if made is bad:
            raise OSError(errno.ENOTCONN, "gone")
        return made

    (bad, _), (here, there) = connections(), connections()
    strangers = Strangers(prepared, 30.0)
    strangers.accept(Listener(bad, here))
    there.send(b"abc")
    assert strangers.read(set(), 3) == [(b"abc", here)]


def test_one_of_another_user_is_closed(strangers, connections, monkeypatch):
    here, there = connections()
    there.send(b"abc")
    monkeypatch.setattr(module.os, "geteuid", lambda: -1)
    strangers.accept(Listener(here))
    assert strangers.read(set(), 3) == []
    assert is_closed(there)


def test_no_more_than_some_tens_are_taken(strangers, connections):
    listener = Listener(*(connections()[0] for _ in range(2 * MOST_STRANGERS)))
    strangers.accept(listener)
    assert strangers.is_full
    assert len(listener.results) == MOST_STRANGERS
    strangers.accept(listener)
    assert len(listener.results) == MOST_STRANGERS
    assert MOST_STRANGERS < 100


def test_one_that_says_nothing_for_long_is_closed(strangers, connections, clock):
    (here, there), (late, says) = connections(), connections()
    strangers.accept(Listener(here, late))
    assert strangers.read(set(), 3) == []
    assert 0 < strangers.patience_s <= 10
    clock.now_s += strangers.patience_s / 2
    says.send(b"a")
    assert strangers.read({late.fileno()}, 3) == []
    clock.now_s += strangers.patience_s + 0.1
    assert strangers.read(set(), 3) == []
    assert is_closed(there)
    assert not is_closed(says)
    says.send(b"bc")
    assert strangers.read({late.fileno()}, 3) == [(b"abc", late)]


def test_one_that_is_new_is_read_however_late_that_is(strangers, connections, clock):
    """Its member may have computed since it took the connection."""
    here, there = connections()
    strangers.accept(Listener(here))
    clock.now_s += 1000
    there.send(b"abc")
    assert strangers.read(set(), 3) == [(b"abc", here)]


def test_one_that_has_gone_is_closed(strangers, connections):
    here, there = connections()
    strangers.accept(Listener(here))
    there.close()
    assert strangers.read(set(), 3) == []
    assert here.fileno() == -1
