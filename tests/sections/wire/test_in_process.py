"""Streams between ranks of one process. `test_connections` tests ranks that use them."""

from __future__ import annotations

import os
import select
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.sections.wire.streams import Bell, pair


@pytest.fixture
def bells():
    made = Bell(), Bell()
    yield made
    for each in made:
        each.close()


def rings(bell):
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    return bool(poll.poll(0))


def received(end, most):
    into = bytearray(most)
    return bytes(into[: end.recv_into(into)])


def test_bytes_wake_the_other_end_which_receives_them(bells):
    one, other = pair(*bells)
    assert one.sendmsg([memoryview(b"ab"), b"", memoryview(b"cde")]) == 5
    assert [rings(bell) for bell in bells] == [False, True]
    bells[1].hush()
    assert not rings(bells[1])
    assert other.is_ready(select.POLLIN)
    assert not one.is_ready(select.POLLIN)
    assert received(other, 3) == b"abc"
    assert received(other, 3) == b"de"
    with pytest.raises(BlockingIOError):
        received(other, 3)


def test_a_full_stream_takes_more_after_bytes_were_received(bells):
    one, other = pair(*bells)
    sent = one.sendmsg([bytes(10_000_000)])
    assert 0 < sent < 10_000_000
    assert not one.is_ready(select.POLLOUT)
    with pytest.raises(BlockingIOError):
        one.sendmsg([b"a"])
    assert len(received(other, 100)) == 100
    assert rings(bells[0])
    assert one.is_ready(select.POLLOUT)
    assert one.sendmsg([bytes(1000)]) == 100


def test_bytes_that_were_sent_before_the_end_are_received(bells):
    one, other = pair(*bells)
    one.sendmsg([b"abc"])
    bells[1].hush()
    one.close()
    assert rings(bells[1])
    assert other.is_ready(select.POLLIN)
    assert other.is_ready(select.POLLOUT)
    assert received(other, 5) == b"abc"
    assert received(other, 5) == b""
    with pytest.raises(BrokenPipeError):
        other.sendmsg([b"a"])


def test_a_closed_bell_writes_to_no_file():
    bell, other = Bell(), Bell()
    one, _ = pair(bell, other)
    number = other.fileno()
    other.close()
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        if writer.fileno() != number and reader.fileno() != number:
            os.dup2(writer.fileno(), number)
        one.sendmsg([b"a"])
        one.close()
        other.ring()
        for end in (reader, writer):
            end.setblocking(False)
            with pytest.raises(BlockingIOError):
                end.recv(8)
        if writer.fileno() != number and reader.fileno() != number:
            os.close(number)
    bell.close()


@given(parts=st.lists(st.binary(max_size=9)), sizes=st.lists(st.integers(1, 9), min_size=1))
def test_bytes_come_in_order_however_they_are_divided(parts, sizes):
    bells = Bell(), Bell()
    one, other = pair(*bells)
    one.sendmsg(parts)
    one.close()
    found, numbers = b"", iter(sizes * 1000)
    while got := received(other, next(numbers)):
        found += got
    assert found == b"".join(parts)
    for each in bells:
        each.close()
