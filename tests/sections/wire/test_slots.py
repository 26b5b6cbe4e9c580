"""Slots in shared memory, alone and beside the socket of a connection."""

import random
import socket
import time

import numpy as np
import pytest

from dask_p2p import PerRank, Same, spmd
from dask_p2p.sections.wire.connection import Connection
from dask_p2p.sections.wire.frames import HEADER, small_value, value_message
from dask_p2p.sections.wire.mailbox import HAS_ORDERED_STORES, MOST_BYTES, Receive, Slots
from tests.sections.support import nothing_is_left
from tests.sections.wire.support import inline_header
from tests.support import result_of

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}
on_x86 = pytest.mark.skipif(not HAS_ORDERED_STORES, reason="stores appear in any order")


def header(tag):
    return inline_header(tag, 5, b"of it", b"12345678")


def large(tag, size_bytes):
    """A message with its tag in each byte of its value."""
    data = bytes([tag]) * size_bytes
    return b"".join(value_message(tag, 5, b"of it", [data], has_address=False).buffers)


def call(number, text=b"barrier()", data=b""):
    return HEADER.pack(number, len(data), text) + data


@pytest.fixture
def ends():
    """Both ends of slots."""
    maker, name = Slots.make()
    return maker, Slots.open(name)


@pytest.fixture
def connected(ends):
    """A connection with slots, the peer's socket and the peer's slots."""
    one, far = socket.socketpair()
    one.setblocking(False)
    connection = Connection(one)
    connection.mailbox.slots = ends[0]
    yield connection, far, ends[1]
    one.close()
    far.close()


@pytest.mark.parametrize("in_slots", [(1,), (2,), (4,), (1, 3)])
@pytest.mark.parametrize("is_inline", [True, False])
@pytest.mark.parametrize("size_bytes", [8, 1000, MOST_BYTES])
def test_messages_keep_their_order(connected, in_slots, is_inline, size_bytes):
    """A message in the slot comes between those of the socket by its number."""
    connection, peer, slots = connected
    for number in range(1, 5):
        frame = header(number) if size_bytes == 8 else large(number, size_bytes)
        if number not in in_slots or not slots.write(slots.sent_messages, number, frame):
            peer.send(frame)
    tags = []
    for _ in range(4):
        value = connection.receive_small(0.0) if is_inline else None
        if value is None:
            connection.mailbox.receive(receive := Receive(0, 0))
            connection.receive_messages()
            tags.append(receive.arrival.tag)
            data = receive.arrival.data
        else:
            tag, _, _, data = small_value(value)
            tags.append(tag)
        assert size_bytes == 8 or bytes(data) == bytes([tags[-1]]) * size_bytes
    assert tags == [1, 2, 3, 4]
    assert connection.mailbox.received_bytes == (0 if size_bytes == 8 else 4 * size_bytes)
    assert slots.write(slots.sent_messages, 5, header(5)), "the slot is free again"


@pytest.mark.parametrize("in_slots", [(2,), (4,)])
def test_one_look_receives_all_messages_of_socket_and_slot(connected, in_slots):
    """A rank that sees a later call of its peer looks once for the message that it expects."""
    connection, peer, slots = connected
    for number in range(1, 5):
        if number not in in_slots or not slots.write(slots.sent_messages, number, header(number)):
            peer.send(header(number))
    connection.receive_messages()
    assert [arrival.tag for arrival in connection.mailbox.arrived] == [1, 2, 3, 4]


@pytest.mark.parametrize("later", [header(2), HEADER.pack(1, 0, b"barrier()")])
def test_a_slot_that_is_filled_after_the_look_at_it(connected, later):
    """Its sender has sent a later header when the receiver reads the socket."""
    connection, peer, slots = connected

    class Socket:
        def recv_into(self, memory):
            assert slots.write(slots.sent_messages, 1, header(1))
            peer.send(later)
            return own.recv_into(memory)

    own, connection.socket = connection.socket, Socket()
    assert small_value(connection.receive_small(0.0))[0] == 1
    connection.socket = own
    connection.receive_messages()
    assert connection.call or connection.mailbox.arrived[0].tag == 2


def test_a_later_call_in_the_socket_waits_for_the_one_in_the_slot(connected):
    """Its sender has filled the slot after this rank has looked at it."""
    connection, peer, slots = connected

    class Socket:
        def recv_into(self, memory):
            if slots.sent_calls.last == 0:
                assert slots.write(slots.sent_calls, 1, call(1, data=b"1"))
                peer.send(call(2, data=b"2"))
            return own.recv_into(memory)

    own, connection.socket = connection.socket, Socket()
    for number in (1, 2):
        connection.number = number
        connection.begin_to_receive(None)
        assert connection.advance(b"barrier()", 0, 1)
        assert bytes(connection.payload) == str(number).encode()


def test_nothing_overtakes_bytes_that_have_yet_to_be_sent(connected):
    """A rank that sees a call in the slot has all earlier messages in its socket."""
    connection, _, slots = connected
    connection.number, message = 1, value_message(1, 5, b"of it", [b"1"], has_address=False)
    connection.sending.append(memoryview(b"bytes"))
    assert not connection.begin_to_send(b"barrier()", b"", may_use_slot=True)
    assert not connection.write_to_slot(1, message)
    assert not slots.calls.has(1)
    connection.sending.clear()
    assert connection.begin_to_send(b"barrier()", b"", may_use_slot=True)
    assert connection.write_to_slot(1, message)
    assert slots.calls.has(1)
    assert slots.messages.has(1)


@pytest.mark.parametrize("first", [1, 100, HEADER.size - 1])
def test_a_header_in_two_pieces(connected, first):
    connection, peer, _ = connected
    peer.send(header(7)[:first])
    assert connection.receive_small(0.0) is None
    peer.send(header(7)[first:] + header(8))
    assert connection.receive_small(0.0) is None, "the rest is received as other messages are"
    connection.mailbox.receive(receive := Receive(7, 5))
    connection.receive_messages()
    assert receive.is_complete
    assert receive.arrival.data[:8] == b"12345678"


def test_calls_of_all_ranks_that_were_earlier_come_first(connected):
    connection, peer, _ = connected
    connection.early.append((HEADER.pack(1, 0, b"barrier()"), memoryview(b"")))
    peer.send(header(7))
    assert connection.receive_small(0.0) is None
    assert connection.call == "barrier()"


@on_x86
def test_a_rank_that_waits_for_a_message_sees_the_call_in_the_slot(client):
    def program(ctx):
        for _ in range(20):
            ctx.barrier()
        if ctx.rank == 0:
            ctx.barrier()
        else:
            ctx.recv(0)
        return 1.0

    y = spmd(program, outputs=Same(0.0), ranks=2)
    match = r"for recv\(source=0, tag=0\) of rank 1, but rank 0 called bar"
    with pytest.raises(Exception, match=match):
        result_of(client, client.compute(y))


@on_x86
def test_ranks_use_slots_and_sockets_in_any_order(client):
    """Values of all sizes, calls of all ranks, and pauses in which a receiver sleeps."""

    def program(ctx, seed):
        draw, far = random.Random(seed), 1 - ctx.rank
        for number in range(1500):
            sender, kind = draw.randrange(2), draw.randrange(12)
            size, count = draw.choice([1, 1, 20, 200, 10_000]), draw.choice([1, 1, 2, 5])
            pause_s = draw.choice([0, 0, 0, 1e-4, 2e-3]) if draw.random() < 0.2 else 0
            if pause_s and draw.randrange(2) == ctx.rank:
                time.sleep(pause_s)
            if kind == 0:
                assert ctx.allreduce(number) == 2 * number
            elif kind == 1:  # only one rank receives
                array = ctx.broadcast(np.full(size, number if ctx.rank == sender else 0), sender)
                assert (array[0], array[-1]) == (number, number)
            elif kind == 2:
                value = np.full(size, ctx.rank), number  # a tuple
                assert ctx.sendrecv(value, far, far)[1] == number
            elif kind == 3:  # a long description
                assert ctx.sendrecv((number,) * 40, far, far) == (number,) * 40
            elif sender == ctx.rank:
                for n in range(count):
                    ctx.send(np.full(size, number + n), far)
            else:
                for n in range(count):
                    array = ctx.recv(far)
                    assert (len(array), array[0], array[-1]) == (size, *[number + n] * 2)
        slots = ctx._connections._connections[far].mailbox.slots
        return -1 if slots is None else min(slots.sent_messages.last, slots.sent_calls.last)

    for seed in range(2):
        y = spmd(program, outputs=PerRank(0), ranks=2, seed=seed)
        assert (result_of(client, client.compute(y)) > 0).all(), "slots were used"
    nothing_is_left(client)


@on_x86
@pytest.mark.parametrize("is_call", [False, True])
def test_a_receiver_that_begins_to_sleep_is_woken(client, is_call):
    """It does so after the sender has seen that it polls."""

    class Late:
        def __init__(self, slots, slot):
            self.slots, self.memory = slots, slot.frame

        def __setitem__(self, where, value):
            self.memory[where] = value
            self.slots._words[self.slots._peer_sleeps] = 1

    def program(ctx):
        connections, peer, posted = ctx._connections, 1 - ctx.rank, []
        for number in range(100):  # until there are slots
            ctx.sendrecv(number, peer, peer)
        ctx.barrier()
        slots, post = connections._connections[peer].mailbox.slots, connections._post
        slot = slots.sent_calls if is_call else slots.sent_messages
        if ctx.rank == 0:
            ctx.recv(peer)  # so that it has taken the data of the barrier
            slot.frame = Late(slots, slot)
            connections._post = lambda rank, message: (posted.append(message), post(rank, message))
            slots._words[slots._peer_sleeps] = 0
            ctx.broadcast(5) if is_call else ctx.send(5, peer)
            slot.frame = slot.frame.memory
            number = connections._connections[peer].number if is_call else connections._sent[peer]
            assert slot.last == number
            assert len(posted) == 1
        else:
            ctx.send(0, peer)
            assert (ctx.broadcast(0) if is_call else ctx.recv(peer)) == 5
        for number in range(100):
            assert ctx.sendrecv(number, peer, peer) == number
        return 1.0

    y = spmd(program, outputs=Same(0.0), ranks=2)
    assert result_of(client, client.compute(y)) == 1.0
