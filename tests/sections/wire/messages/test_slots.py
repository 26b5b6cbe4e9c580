"""Slots in shared memory, alone and beside the socket of a connection."""

from __future__ import annotations

import random
import socket
import time

import numpy as np
import pytest

from dask_p2p import PerRank, Same, spmd
from dask_p2p.sections.wire.connection import Connection
from dask_p2p.sections.wire.messages.format import HEADER, inline_header
from dask_p2p.sections.wire.messages.mailbox import Receive
from dask_p2p.sections.wire.messages.slots import HAS_ORDERED_STORES, Slots
from tests.sections.support import nothing_is_left
from tests.support import result_of

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}
on_x86 = pytest.mark.skipif(not HAS_ORDERED_STORES, reason="stores appear in any order")


def header(tag):
    return inline_header(tag, 5, b"of it", b"12345678")


@pytest.fixture
def ends():
    """Both ends of slots."""
    maker, name = Slots.made(HEADER.size)
    return maker, Slots.opened(name, HEADER.size)


@pytest.fixture
def connected(ends):
    """A connection with slots, the peer's socket and the peer's slots."""
    one, other = socket.socketpair()
    one.setblocking(False)
    connection = Connection(one)
    connection.mailbox.slots = ends[0]
    yield connection, other, ends[1]
    one.close()
    other.close()


def test_a_slot_has_one_message(ends):
    for one, other in (ends, ends[::-1]):
        assert not other.has(1, looks=3)
        assert one.put(1, header(7))
        assert not one.put(2, header(8)), "the first one has not been taken"
        assert other.has(1)
        assert not other.has(2)
        assert bytes(other.received_header) == header(7)
        other.free(1)
        assert one.put(2, header(8))
        assert other.has(2, looks=3)


def test_an_end_that_sleeps_gets_no_message(ends):
    for one, other in (ends, ends[::-1]):
        other.sleeps = True
        assert one.peer_sleeps
        assert not one.put(1, header(7))
        other.sleeps = False
        assert one.put(1, header(7))


def test_slots_are_used_once_the_peer_has_opened_them():
    maker, name = Slots.made(HEADER.size)
    assert not maker.put(1, header(7))
    opened = Slots.opened(name, HEADER.size)
    assert maker.put(1, header(7))
    assert opened.has(1)


@pytest.mark.parametrize("text", [b"", b"kernel namespace 1 2 3 4", b"a b c d e f", b"\xff"])
def test_other_names_are_not_opened(text):
    assert Slots.opened(text, HEADER.size) is None


@pytest.mark.parametrize("in_slots", [(1,), (2,), (4,), (1, 3)])
@pytest.mark.parametrize("is_inline", [True, False])
def test_messages_keep_their_order(connected, in_slots, is_inline):
    """A message in the slot comes between those of the socket by its number."""
    connection, peer, slots = connected
    for number in range(1, 5):
        if number not in in_slots or not slots.put(number, header(number)):
            peer.send(header(number))
    found = []
    for _ in range(4):
        value = connection.receive_inline(0.0) if is_inline else None
        if value is None:
            connection.mailbox.receive(receive := Receive(0, 0))
            connection.receive_messages()
            found.append(receive.arrival.tag)
        else:
            found.append(value[0])
    assert found == [1, 2, 3, 4]


@pytest.mark.parametrize("later", [header(2), HEADER.pack(1, 0, b"barrier()")])
def test_a_slot_that_is_filled_after_the_look_at_it(connected, later):
    """Its sender has sent a later header when the receiver reads the socket."""
    connection, peer, slots = connected

    class Socket:
        def recv_into(self, memory):
            assert slots.put(1, header(1))
            peer.send(later)
            return own.recv_into(memory)

    own, connection.socket = connection.socket, Socket()
    assert connection.receive_inline(0.0)[0] == 1
    connection.socket = own
    connection.receive_messages()
    assert connection.call or connection.mailbox.arrived[0].tag == 2


def test_a_message_in_the_slot_comes_before_a_later_call(connected):
    connection, peer, slots = connected
    assert slots.put(1, header(1))
    peer.send(HEADER.pack(1, 0, b"barrier()"))
    connection.receive_messages()
    assert connection.call == "barrier()"
    assert [each.tag for each in connection.mailbox.arrived] == [1]


@on_x86
def test_ranks_use_slots_and_sockets_in_any_order(client):
    """Values of all sizes, calls of all ranks, and pauses in which a receiver sleeps."""

    def program(ctx, seed):
        draw, other = random.Random(seed), 1 - ctx.rank
        for number in range(1500):
            sender, kind = draw.randrange(2), draw.randrange(40)
            size, count = draw.choice([1, 1, 1, 20, 10_000]), draw.choice([1, 1, 2, 5])
            pause_s = draw.choice([0, 0, 0, 1e-4, 2e-3]) if draw.random() < 0.2 else 0
            if pause_s and draw.randrange(2) == ctx.rank:
                time.sleep(pause_s)
            if kind == 0:
                assert ctx.allreduce(number) == 2 * number
            elif sender == ctx.rank:
                for each in range(count):
                    ctx.send(np.full(size, number + each), other)
            else:
                for each in range(count):
                    found = ctx.recv(other)
                    assert (len(found), found[0], found[-1]) == (size, *[number + each] * 2)
        slots = ctx._connections._connections[other].mailbox.slots
        return -1 if slots is None else slots._last

    for seed in range(4):
        y = spmd(program, outputs=PerRank(0), ranks=2, seed=seed)
        assert (result_of(client, client.compute(y)) > 0).all(), "slots were used"
    nothing_is_left(client)


@on_x86
def test_a_receiver_that_begins_to_sleep_is_woken(client):
    """It does so after the sender has seen that it polls."""

    class Late:
        def __init__(self, slots):
            self.slots, self.memory = slots, slots._sent_header

        def __setitem__(self, where, value):
            self.memory[where] = value
            self.slots._words[self.slots._peer_sleeps] = 1

    def program(ctx):
        own, other, posted = ctx._connections, 1 - ctx.rank, []
        for number in range(100):  # until there are slots
            ctx.sendrecv(number, other, other)
        ctx.barrier()
        slots, post = own._connections[other].mailbox.slots, own._post
        if ctx.rank == 0:
            slots._sent_header = Late(slots)
            own._post = lambda rank, message: (posted.append(message), post(rank, message))
            slots._words[slots._peer_sleeps] = 0
            ctx.send(5, other)
            slots._sent_header = slots._sent_header.memory
            assert slots._last == own._sent[other]
            assert len(posted) == 1
        else:
            assert ctx.recv(other) == 5
        for number in range(100):
            assert ctx.sendrecv(number, other, other) == number
        return 1.0

    y = spmd(program, outputs=Same(0.0), ranks=2)
    assert result_of(client, client.compute(y)) == 1.0


def test_a_message_in_a_slot_that_is_not_received_is_named(client):
    def program(ctx):
        other = 1 - ctx.rank
        for number in range(100):
            ctx.sendrecv(number, other, other)
        if ctx.rank == 0:
            ctx.send(1, other)
        return 1.0

    y = spmd(program, outputs=Same(0.0), ranks=2)
    with pytest.raises(Exception, match="expected rank 1 to receive all messages"):
        result_of(client, client.compute(y))
