import sys
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.errors import InputError, MissingPackageError, SectionError, UnsupportedArrayError
from dask_p2p.plans.ranks import RankGrid
from tests.backends.test_plain import Quantity
from tests.sections.gangs import run_gang
from tests.support import tune


def test_what_cannot_be_exchanged_is_refused(alone):
    one_of = r"op: expected one of sum, .* Give one of these, or"
    for message, call, *arguments in (
        *((one_of, alone.allreduce, 3, op) for op in ("mean", np.add, ["sum"])),
        ("value: expected numbers, got set", alone.allreduce, {"a": {1}}),
        (r"root: expected a rank below 1, got 1\. Give the", alone.broadcast, 3, 1),
        (r"that 'sum' combines, got datetime64\[s", alone.allreduce, np.datetime64(1, "s")),
        ("a: expected an array of .* of numbers", alone.pad, np.full(3, None), 1),
    ):
        with pytest.raises(InputError, match=message):
            call(*arguments)


@pytest.mark.parametrize(("local_block", "dtype"), [(0.5, "i8"), (1j, "f8"), (2, "?")])
def test_a_local_block_is_not_narrowed(alone, local_block, dtype):
    with pytest.raises(InputError, match=r"local: expected an array that becomes .* Convert it"):
        alone.with_halo(np.full(3, local_block), dtype=dtype)


@pytest.mark.parametrize(
    "call", [lambda ctx, value: ctx.allreduce(value), lambda ctx, value: ctx.state(u=value)]
)
def test_units_and_operators_are_not_lost(alone, call):
    with pytest.raises(UnsupportedArrayError, match=r"whose unit or operators .* np\.asarray"):
        call(alone, np.ones(3).view(Quantity))
    call(alone, np.ones(3).view(np.recarray))


def test_there_is_one_loop_of_steps(alone):
    """The state of one loop would be brought back into the other."""
    assert list(alone.steps(3)) == [0, 1, 2]
    with pytest.raises(InputError, match=r"expected one loop of ctx\.steps, got a second one"):
        list(alone.steps(3))


@pytest.mark.parametrize("state", [[np.zeros(3)], np.zeros(3), {"u": np.zeros(3)}])
def test_steps_need_a_state(alone, state):
    with pytest.raises(InputError, match=r"values from ctx\.state, got .* use s\.u in the loop"):
        list(alone.steps(3, state))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("Get_rank", r"ctx\.rank\."),
        ("Barrier", r"ctx\.barrier\."),
        ("Allgatherv", r"ctx\.allgather\(value, ragged=True\)\."),
        ("Sub", r"ctx\.along\(axis\)\."),
        ("update_halos", r"ctx\.update_halo\."),
    ],
)
def test_names_of_mpi_have_a_hint(name, remedy):
    def function(ctx, x):
        assert not hasattr(ctx, name)
        return getattr(ctx, name)

    y = dask_p2p.spmd(function, da.ones(3))
    with pytest.raises(AttributeError, match=rf"got '{name}'\. Use {remedy}"):
        y.compute(scheduler="sync")


# --- arguments of the context's methods of other types than the declared ones


X = np.ones(3)  # the local block of the only rank
#: Values that Python compares, iterates or hashes in different ways.
OTHERS = [1.5, object(), np.zeros(2), ["x", None], {"a": 1}, lambda: 1, 1j]


def stepped(ctx, **options):
    return [*ctx.steps(1, **options)]


CALLS = {
    "dest": lambda ctx, argument: ctx.send(1, argument),
    "source": lambda ctx, argument: ctx.recv(argument),
    "tag": lambda ctx, argument: ctx.send(1, None, argument),
    "root of bcast": lambda ctx, argument: ctx.bcast(1, argument),
    "root of gather": lambda ctx, argument: ctx.gather(1, argument),
    "root of reduce": lambda ctx, argument: ctx.reduce(1, root=argument),
    "op": lambda ctx, argument: ctx.allreduce(1, argument),
    "axis": lambda ctx, argument: ctx.along(argument),
    "corners": lambda ctx, argument: ctx.with_halo(X, corners=argument),
    "dtype": lambda ctx, argument: ctx.with_halo(X, dtype=argument),
    "exchange": lambda ctx, argument: ctx.with_halo(X, exchange=argument),
    "grid": lambda ctx, argument: ctx.with_halo(X, grid=argument),
    "copy": lambda ctx, argument: ctx.update_halo(ctx.with_halo(X), copy=argument),
    "zeros": lambda ctx, argument: ctx.grid_of().zeros(argument),
    "factor": lambda ctx, argument: ctx.grid_of().coarser(argument),
    "points": lambda ctx, argument: ctx.points(argument),
    "partition": lambda ctx, argument: ctx.redistribute(X, argument),
    "shape": lambda ctx, argument: ctx.redistribute(X, shape=argument),
    "count": lambda ctx, argument: [*ctx.steps(argument)],
    "state": lambda ctx, argument: stepped(ctx, state=argument),
    "every": lambda ctx, argument: stepped(ctx, every=argument),
    "checkpoint": lambda ctx, argument: stepped(ctx, state=ctx.state(x=X), checkpoint=argument),
    "save": lambda ctx, argument: stepped(ctx, state=ctx.state(x=X), save=argument),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_other_types_are_refused(alone, name):
    for argument in OTHERS:
        with pytest.raises(InputError, match=r"expected .* got "):
            CALLS[name](alone, argument)


GRID = RankGrid(((1, 1), (1, 1, 1)), (2, 3))


def test_lines_of_the_grid():
    def along(ctx):
        row, column = ctx.along(1), ctx.along(-2)
        assert (row.size, column.size) == (3, 2)
        assert row.allgather(ctx.rank).tolist() == [ctx.rank // 3 * 3 + n for n in range(3)]
        assert column.allgather(ctx.rank).tolist() == [ctx.rank % 3, ctx.rank % 3 + 3]
        row_ranks = [ctx.rank // 3 * 3 + n for n in range(3)]
        before, after = (row.rank - 1) % 3, (row.rank + 1) % 3
        assert row.sendrecv(ctx.rank, after, before) == row_ranks[before]
        assert row.alltoall([ctx.rank] * 3) == row_ranks
        assert row.allreduce(np.ones(1 << 18)).sum() == 3 << 18
        row.barrier()
        return row.rank, column.rank, ctx.allreduce(1)

    assert run_gang(GRID, along) == [(n % 3, n // 3, 6) for n in range(6)]


def test_calls_of_different_communicators_are_an_error():
    def mixed(ctx):
        (ctx.along(0) if ctx.rank else ctx).allreduce(1)

    with pytest.raises(SectionError, match=r"of along\(0\), line"):
        run_gang(RankGrid(((1, 1),), (2,)), mixed)


def nccl_ids(ctx):
    return ctx.nccl_id(), ctx.along(1).nccl_id()


@pytest.mark.parametrize("kind", [tuple, bytes])  # of CuPy 13, and of CuPy 14
def test_ranks_get_the_same_new_identifier_of_nccl(monkeypatch, kind):
    new_ids = []

    def new_id():
        start = len(new_ids) if kind is bytes else len(new_ids) - 64
        new_ids.append(kind(range(start, start + 128)))
        return new_ids[-1]

    nccl = SimpleNamespace(available=True, get_unique_id=new_id)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=nccl))
    identifiers = run_gang(RankGrid(((1, 1), (1, 1)), (2, 2)), nccl_ids)
    assert {section_id for section_id, _ in identifiers} == {new_ids[0]}
    row_ids = [row_id for _, row_id in identifiers]
    assert (row_ids[0], row_ids[2]) == (row_ids[1], row_ids[3])
    assert {*row_ids} == {*new_ids[1:]}


@pytest.mark.parametrize("cuda", [None, SimpleNamespace(nccl=SimpleNamespace(available=False))])
def test_an_identifier_of_nccl_needs_cupy(monkeypatch, cuda):
    monkeypatch.setitem(sys.modules, "cupy", None if cuda is None else SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    with pytest.raises(MissingPackageError, match="CuPy with NCCL on the worker of rank 0"):
        run_gang(GRID, nccl_ids)


SIZES = pytest.mark.parametrize("ranks", [1, 2, 3])


def run(ranks, function, **kwargs):
    return run_gang(RankGrid.at_most(((1,) * ranks,), ranks), function, **kwargs)


@SIZES
def test_several_values_are_combined_in_one_message(ranks):
    def combined(ctx):
        calls = []
        gather = ctx._connections.gather
        ctx._connections.gather = lambda *args: calls.append(args) or gather(*args)
        result = ctx.allreduce({"a": np.arange(3.0), "b": (ctx.rank, True)})
        assert result["a"].tolist() == [0, ranks, 2 * ranks]
        assert result["b"] == (sum(range(ranks)), ranks)
        stacked = ctx.allgather((ctx.rank, np.zeros(2)))
        assert (stacked[0].tolist(), stacked[1].shape) == ([*range(ranks)], (ranks, 2))
        return len(calls)

    assert run(ranks, combined) == [2] * ranks


@SIZES
@pytest.mark.parametrize("value", [1.5, np.array([3, -2, 5]), np.array([np.nan, 1.0, 2.0])])
def test_extremes_have_the_first_rank_that_has_them(ranks, value):
    def extremes(ctx):
        addend = value * (1 + ctx.rank // 2)
        every = np.stack([value * (1 + rank // 2) for rank in range(ranks)])
        for op, at in (("maxloc", np.argmax), ("minloc", np.argmin)):
            extreme, where = ctx.allreduce(addend, op)
            expected = at(every, axis=0)
            assert np.array_equal(where, expected)
            assert np.array_equal(extreme, np.choose(expected, every), equal_nan=True)

    run(ranks, extremes)


@SIZES
def test_prefixes(ranks):
    def prefixes(ctx):
        prefix_sums = ctx.scan((ctx.rank + 1, 2)), ctx.exscan(ctx.rank + 1)
        before = sum(range(ctx.rank + 1))
        inclusive = before + ctx.rank + 1, 2 * (ctx.rank + 1)
        assert prefix_sums == (inclusive, before if ctx.rank else None)

    run(ranks, prefixes)


@SIZES
def test_one_rank_gets_or_gives(ranks):
    def rooted(ctx):
        last, rank = ranks - 1, ctx.rank
        assert ctx.reduce(2, root=last) == (2 * ranks if rank == last else None)
        gathered = ctx.gather({"a": rank}, root=last)
        assert gathered is None if rank < last else gathered["a"].tolist() == [*range(ranks)]
        gathered = ctx.gather(np.zeros(rank), ragged=True)
        shapes = None if gathered is None else [array.shape for array in gathered]
        assert shapes == (None if rank else [(n,) for n in range(ranks)])
        lengths = [len(array) for array in ctx.allgather(np.zeros(rank), ragged=True)]
        assert lengths == [*range(ranks)]
        parts = [np.full(n, n) for n in range(ranks)] if rank == last else None
        assert ctx.scatter(parts, root=last).tolist() == [rank] * rank
        rows = np.arange(3.0 * ranks).reshape(ranks, 3)
        assert ctx.scatter(rows if rank == last else None, root=last).tolist() == [*rows[rank]]
        assert ctx.scatter(rows).tolist() == [*rows[rank]]
        value = {"x": np.arange(3), "y": 0.5} if rank == last else None
        gathered = ctx.bcast(value, root=last)
        assert (gathered["x"].tolist(), gathered["y"]) == ([0, 1, 2], 0.5)
        gathered["x"][:] = 0
        assert rank < last or value["x"][1] == 1, "a copy"

    run(ranks, rooted)


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "any"])
@SIZES
def test_large_arrays_are_reduced_in_parts_with_the_same_bits(ranks, op, monkeypatch):
    def reduced(ctx):
        addend = np.random.default_rng(ctx.rank).normal(size=(401, 331))
        before = addend.copy()
        total = ctx.allreduce(addend, op)
        tune(monkeypatch, parted_reduction_bytes=1 << 30)
        expected = ctx.allreduce(addend, op)
        assert (total.dtype, total.tobytes()) == (expected.dtype, expected.tobytes())
        assert (addend == before).all()
        total[:] = 0

    tune(monkeypatch, parted_reduction_bytes=1 << 20)
    run(ranks, reduced)


@pytest.mark.parametrize(
    "call",
    [
        lambda ctx: ctx.allreduce(np.zeros(2 + ctx.rank)),
        lambda ctx: ctx.allreduce(np.zeros(200_000 + ctx.rank)),
        lambda ctx: ctx.allreduce(np.zeros(200_000 if ctx.rank else 2)),
        lambda ctx: ctx.allreduce((1, 2) if ctx.rank else (1, 2.0)),
        lambda ctx: ctx.reduce(1, root=ctx.rank),
        lambda ctx: ctx.alltoall([1, 2]) if ctx.rank else ctx.allreduce(1),
        lambda ctx: ctx.scatter([1, 2]) if ctx.rank else ctx.bcast(1),
        lambda ctx: ctx.bcast(1, root=ctx.rank),
    ],
)
def test_different_calls_are_an_error(call):
    with pytest.raises(SectionError, match=r"rank 0\b.* rank 1\b|rank 1 (called|to receive)"):
        run(2, call)


SETTINGS = {"name": "run-1", "tags": ["a", "b"], "debug": None}


@SIZES
def test_objects_arrive_as_they_are(ranks):
    def exchanged(ctx):
        rank, last = ctx.rank, ranks - 1
        assert ctx.bcast(SETTINGS if rank == last else None, root=last) == SETTINGS
        assert ctx.allgather(f"rank {rank}") == [f"rank {peer_rank}" for peer_rank in range(ranks)]
        assert ctx.allgather([rank, [rank]]) == [[n, [n]] for n in range(ranks)]
        assert ctx.allgather([]) == [[]] * ranks
        gathered = ctx.gather({"rank": rank, "text": "a"}, root=last)
        expected = [{"rank": peer_rank, "text": "a"} for peer_rank in range(ranks)]
        assert gathered == (expected if rank == last else None)
        assert ctx.scatter([["part", peer_rank] for peer_rank in range(ranks)]) == ["part", rank]
        assert ctx.alltoall([None, "b", [3]][:ranks]) == [[None, "b", [3]][rank]] * ranks
        assert ctx.sendrecv([rank], (rank + 1) % ranks, (rank - 1) % ranks) == [(rank - 1) % ranks]
        assert ctx.allgather(None if rank else 1.5, ragged=True) == [1.5, None, None][:ranks]

    run(ranks, exchanged)


@pytest.mark.parametrize("call", ["gather", "allgather"])
def test_values_of_other_shapes_have_a_remedy(call):
    def differing(ctx):
        getattr(ctx, call)(np.zeros(ctx.rank))

    remedy = rf"array of shape \(0,\) on rank 0.* or call ctx\.{call}\(value, ragged=True\)"
    with pytest.raises(SectionError, match=remedy):
        run(2, differing)


def test_an_object_fills_no_array():
    def received(ctx):
        ctx.send(["text"], 1 - ctx.rank)
        ctx.recv(1 - ctx.rank, out=np.zeros(3))

    error = r"out: expected no array .* of type list\. Leave out out="
    with pytest.raises(InputError, match=error):
        run(2, received)
