"""Messages that lie in their headers, on one connection."""

from __future__ import annotations

import socket

import pytest

from dask_p2p.sections.wire.connection import Connection
from dask_p2p.sections.wire.frames import HEADER, small_value
from dask_p2p.sections.wire.mailbox import Receive
from tests.sections.wire.support import inline_header


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    one.setblocking(False)
    yield Connection(one), other
    one.close()
    other.close()


def header(tag, data=b"12345678"):
    return inline_header(tag, 5, b"of it", data)


def test_the_value_of_a_small_message(ends):
    connection, peer = ends
    peer.send(header(7) + header(8))
    for tag in (7, 8):
        found, communicator, description, data = small_value(connection.receive_small(0.0))
        assert (found, communicator, description, data[:8]) == (tag, 5, b"of it", b"12345678")
    assert connection.receive_small(0.0) is None
    assert connection.mailbox.received == 2


@pytest.mark.parametrize("first", [1, 100, HEADER.size - 1])
def test_a_header_in_two_pieces(ends, first):
    connection, peer = ends
    peer.send(header(7)[:first])
    assert connection.receive_small(0.0) is None
    peer.send(header(7)[first:] + header(8))
    assert connection.receive_small(0.0) is None, "the rest is received as other messages are"
    connection.mailbox.receive(receive := Receive(7, 5))
    connection.receive_messages()
    assert receive.is_complete
    assert receive.arrival.data[:8] == b"12345678"


def test_calls_of_all_ranks_that_were_earlier_come_first(ends):
    connection, peer = ends
    connection.early.append((HEADER.pack(1, 0, b"barrier()"), memoryview(b"")))
    peer.send(header(7))
    assert connection.receive_small(0.0) is None
    assert connection.call == "barrier()"


def test_a_peer_that_has_closed(ends):
    connection, peer = ends
    peer.close()
    with pytest.raises(ConnectionResetError):
        connection.receive_small(0.0)
