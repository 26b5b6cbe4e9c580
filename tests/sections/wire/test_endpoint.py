"""Sockets of ranks. `test_connections` tests how ranks find each other."""

from __future__ import annotations

import select
import socket
from contextlib import closing

import pytest

from dask_p2p.sections.wire.endpoint import TlsSocket
from tests.sections.wire.test_connections import tls


@pytest.fixture
def ends():
    """Make both ends of a new connection between hosts, the client's end first."""
    reach, made = tls(), socket.socketpair()
    for each, context in zip(made, (reach.connecting, reach.listening), strict=True):
        each.setblocking(False)
        context.sslsocket_class = TlsSocket
    client = reach.connecting.wrap_socket(made[0], do_handshake_on_connect=False)
    server = reach.listening.wrap_socket(made[1], server_side=True, do_handshake_on_connect=False)
    with closing(client), closing(server):
        yield client, server


def reads_nothing(end):
    with pytest.raises(BlockingIOError):
        end.recv_into(bytearray(1))


def test_bytes_that_wait_for_a_handshake_are_sent_when_reading_ends_it(ends):
    """The other end may wait for the finalize message of this one."""
    client, server = ends
    with pytest.raises(BlockingIOError):
        client.sendmsg([b"a"])
    assert client.send_event == select.POLLIN
    reads_nothing(client)
    assert client.send_event == select.POLLIN  # still for the handshake
    reads_nothing(server)
    reads_nothing(client)  # which ends it
    assert client.send_event == select.POLLOUT
    assert client.sendmsg([b"a"]) == 1
    found = bytearray(1)
    assert server.recv_into(found) == 1
    assert found == b"a"
