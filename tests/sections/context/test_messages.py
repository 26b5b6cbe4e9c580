import random

import numpy as np
import pytest

from dask_p2p.errors import InputError, SectionError
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.wire import endpoint
from dask_p2p.transports import process_memory
from tests.sections import gangs
from tests.sections.gangs import connections_of, is_at_call, is_exchanging, run_gang
from tests.sections.wire.support import TCP
from tests.transports.loopback import wait_until

LARGE = 700_000  # elements: more than sockets buffer


def grid(ranks):
    return RankGrid.at_most(((1,) * ranks,), ranks)


@pytest.fixture(params=["one process", "one host", "no reads", "hosts"])
def path(request, monkeypatch):
    """The path of messages: by memory, by Unix sockets or reads of memory, by TCP."""
    if request.param != "one process":
        monkeypatch.setattr(endpoint.Acceptor, "_running", gangs.NoAcceptors())
    if request.param == "no reads":
        monkeypatch.setattr(process_memory, "obstacle", lambda *proof: "forbidden")
    if request.param == "hosts":
        kernels = iter(range(100))
        monkeypatch.setattr(endpoint, "_kernel_and_network", lambda: f"kernel-{next(kernels)}")
        monkeypatch.setattr(gangs, "Reach", lambda: TCP)
    return request.param


def ring(ctx):
    return (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 30, LARGE])
def test_values_go_around_a_ring(path, ranks, count):
    """Python's usual first program: all ranks send, and then receive."""

    def around(ctx):
        right, before = ring(ctx)
        message = {"x": np.full(count, ctx.rank), "y": (ctx.rank, 0.5)}
        ctx.send(message, right) if ctx.size > 1 else ctx.isend(message, right)
        received_values = [ctx.recv(before)]
        received_values.append(ctx.sendrecv(message, right, before))
        begun = ctx.isend(message, right)
        received = ctx.irecv(before)
        received_values.append(received.wait())
        begun.wait()
        for received_value in received_values:
            assert (received_value["x"] == before).all()
            assert (received_value["x"].shape, received_value["y"]) == ((count,), (before, 0.5))

    run_gang(grid(ranks), around)


def test_a_header_that_came_with_messages_is_not_waited_for(path):
    """Rank 3 has that of rank 2 before it makes the call, and rank 0 connects after that."""
    connections = {}

    def late(ctx):
        rank_connections = connections[ctx.rank] = connections_of(ctx)
        if ctx.rank in (1, 2):
            ctx.send(0, 3)
        if ctx.rank == 1:
            wait_until(lambda: 3 in connections and is_at_call(connections[3], 2))
            ctx.send(1, 3)
        if ctx.rank == 3:
            assert [ctx.recv(1), ctx.recv(2), ctx.recv(1)] == [0, 0, 1]
        if ctx.rank == 0:
            wait_until(lambda: 3 in connections and is_exchanging(connections[3]))
        ctx.barrier()
        if ctx.rank == 3:
            ctx.send(2, 2)  # until then rank 2 sends no more
        if ctx.rank == 2:
            assert ctx.recv(3) == 2
        return 0 if ctx.rank else len(rank_connections.received)

    assert run_gang(grid(4), late) == [3, 0, 0, 0]


@pytest.mark.parametrize("count", [10, LARGE])
def test_messages_are_received_into_memory(path, count):
    def received(ctx):
        right, before = ring(ctx)
        value, out = np.full((count, 2), ctx.rank), np.empty((count, 2), int)
        assert ctx.sendrecv(value, right, before, out=out) is out
        assert (out == before).all()
        columns = np.zeros((2, count), int).T
        assert ctx.sendrecv(value, right, before, out=columns) is columns
        assert (columns == before).all()
        for number in range(4):
            value[:] = 10 * ctx.rank + number
            assert ctx.sendrecv(value[:3], right, before, out=out[:3]) is not out
            assert ctx.sendrecv(value, right, before, out=out) is out
            assert (out == 10 * before + number).all()

    run_gang(grid(3), received)
    run_gang(grid(1), received)


@pytest.mark.parametrize(
    ("count", "out"), [(3, np.zeros(4)), (3, np.zeros(3, int)), (LARGE, np.zeros(LARGE, int))]
)
def test_memory_of_another_shape_or_dtype_is_refused(path, count, out):
    def other(ctx):
        return ctx.sendrecv(np.zeros(count), *ring(ctx), out=out.copy())

    for ranks in (1, 2):
        with pytest.raises(InputError, match=rf"shape \({count},\) and dtype float64, like"):
            run_gang(grid(ranks), other)


def test_lines_have_ends(path):
    def along(ctx):
        right = ctx.rank + 1 if ctx.rank + 1 < ctx.size else None
        return ctx.sendrecv(ctx.rank, right, ctx.rank - 1 if ctx.rank else None)

    assert run_gang(grid(3), along) == [None, 0, 1]


def test_another_tag_is_refused():
    def tagged(ctx):
        out, other = np.zeros(3), 1 - ctx.rank
        for _ in range(3):
            ctx.sendrecv(np.ones(3), other, other, tag=5, out=out)
        if ctx.rank == 0:
            ctx.send(out, 1, tag=5)
        else:
            ctx.recv(0, out=out)  # filled by the message before, too

    error = r"rank 1 called recv\(source=0, tag=0\) for send\(dest=1, tag=5\) of rank 0\. Rec"
    with pytest.raises(SectionError, match=error):
        run_gang(grid(2), tagged)


@pytest.mark.parametrize("count", [1, LARGE])
def test_a_message_of_another_communicator_is_refused(path, count):
    def mixed(ctx):
        column = ctx.along(0)
        ctx.isend(np.zeros(count), 1) if ctx.rank == 0 else column.recv(0)

    error = r"got one of another communicator\. Send and receive by the same one"
    with pytest.raises(SectionError, match=error):
        run_gang(grid(2), mixed)


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 0), (3, 2)])
def test_a_begun_message_that_nobody_receives_is_refused(sender, receiver):
    def lost(ctx):
        if ctx.rank == sender:
            ctx.isend(1, receiver, tag=4)

    with pytest.raises(SectionError, match=f"expected rank {receiver} to receive all messages"):
        run_gang(grid(4), lost)


@pytest.mark.parametrize(("source", "waits"), [(0, 1), (1, 0), (2, 0), (0, 2)])
def test_a_rank_that_waits_for_one_that_has_returned_gets_an_error(source, waits):
    def returning(ctx):
        if ctx.rank == waits:
            ctx.recv(source)

    error = rf"for recv\(source={source}, tag=0\) of rank {waits}, but rank {source} called final"
    remedy = rf"Let it send first, ctx\.send\(value, dest={waits}\)"
    with pytest.raises(SectionError, match=f"{error}.*{remedy}"):
        run_gang(grid(3), returning)


def steps_of(seed, ranks):
    """Return the calls of a random program: all ranks make the same ones."""
    rng = random.Random(seed)
    for number in range(60):
        kind = rng.choice(["message"] * 5 + ["allreduce", "ring", "alltoall", "halo"])
        source, dest = rng.randrange(ranks), rng.randrange(ranks)
        yield number, kind, source, dest, rng.choice([0, 1, 20, 3000, 9000, 200_000])


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_random_programs(path, ranks, seed):
    """Messages that are waited for late, between other calls, all of them without a deadlock."""

    def program(ctx):
        rng, waits = random.Random(f"{seed} {ctx.rank}"), []
        halo = ctx.with_halo(np.full(1, float(ctx.rank)), 1, "periodic")
        right, before = ring(ctx)
        for number, kind, source, dest, count in steps_of(seed, ranks):
            value = np.full(count, number)
            if kind == "message" and ctx.rank == source:
                waits.append((ctx.isend(value, dest, number), None))
            if kind == "message" and ctx.rank == dest:
                waits.append((ctx.irecv(source, number), value))
            if kind == "allreduce":
                assert (ctx.allreduce(np.ones(count)) == ranks).all()
            if kind == "ring":
                assert (ctx.sendrecv(value + ctx.rank, right, before) == number + before).all()
            if kind == "alltoall":
                parts = ctx.alltoall([value + ctx.rank] * ranks)
                assert all((part == number + rank).all() for rank, part in enumerate(parts))
            if kind == "halo":
                assert ctx.update_halo(halo).tolist() == [before, ctx.rank, right]
            while waits and rng.random() < 0.3:
                check(*waits.pop(rng.randrange(len(waits))))
        for transfer in waits:
            check(*transfer)

    def check(transfer, value):
        received = transfer.wait()
        assert value is None or (received == value).all()

    run_gang(grid(ranks), program)


def test_a_rank_sends_to_itself(alone):
    value = np.zeros(2)
    alone.send(value, 0)
    value[:] = 1
    assert alone.recv(0).tolist() == [0, 0]
    first, second = alone.irecv(0), alone.irecv(0)
    alone.send(1, 0)
    alone.send(2, 0)
    assert (second.wait(), first.wait(), first.wait()) == (2, 1, 1)
    with pytest.raises(SectionError, match="expected a message of rank 0 to itself, got none"):
        alone.recv(0)
    alone.send(1, 0, tag=2)
    with pytest.raises(SectionError, match="Receive messages in the order of"):
        alone.recv(0)


@pytest.mark.parametrize("parts", [[], [1, 2], {0: 1}, 3])
def test_each_rank_gets_a_part(alone, parts):
    with pytest.raises(InputError, match="parts: expected a list with a value for each of 1 ranks"):
        alone.alltoall(parts)
