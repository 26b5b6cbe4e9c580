from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.errors import InputError, SectionError
from dask_p2p.plans.ranks import RankGrid
from tests.sections.gangs import run_gang
from tests.support import tune

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
        assert stacked[0].tolist() == [*range(ranks)]
        assert stacked[1].shape == (ranks, 2)
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
        return True

    assert all(run(ranks, extremes))


@SIZES
def test_prefixes(ranks):
    def prefixes(ctx):
        prefix_sums = ctx.scan((ctx.rank + 1, 2)), ctx.exscan(ctx.rank + 1)
        before = sum(range(ctx.rank + 1))
        assert prefix_sums == (
            (before + ctx.rank + 1, 2 * (ctx.rank + 1)),
            before if ctx.rank else None,
        )
        return True

    assert all(run(ranks, prefixes))


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
        return True

    assert all(run(ranks, rooted))


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "any"])
@SIZES
def test_large_arrays_are_reduced_in_parts_with_the_same_bits(ranks, op, monkeypatch):
    def reduced(ctx):
        addend = np.random.default_rng(ctx.rank).normal(size=(401, 331))
        before = addend.copy()
        total = ctx.allreduce(addend, op)
        tune(monkeypatch, parted_reduction_bytes=1 << 30)
        expected = ctx.allreduce(addend, op)
        assert total.dtype == expected.dtype
        assert total.tobytes() == expected.tobytes()
        assert (addend == before).all()
        total[:] = 0
        return True

    tune(monkeypatch, parted_reduction_bytes=1 << 20)
    assert all(run(ranks, reduced))


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
        assert ctx.allgather([rank, [rank]]) == [
            [peer_rank, [peer_rank]] for peer_rank in range(ranks)
        ]
        assert ctx.allgather([]) == [[]] * ranks
        gathered = ctx.gather({"rank": rank, "text": "a"}, root=last)
        expected = [{"rank": peer_rank, "text": "a"} for peer_rank in range(ranks)]
        assert gathered == (expected if rank == last else None)
        assert ctx.scatter([["part", peer_rank] for peer_rank in range(ranks)]) == ["part", rank]
        assert ctx.alltoall([None, "b", [3]][:ranks]) == [[None, "b", [3]][rank]] * ranks
        assert ctx.sendrecv([rank], (rank + 1) % ranks, (rank - 1) % ranks) == [(rank - 1) % ranks]
        mixed = ctx.allgather(None if rank else 1.5, ragged=True)
        assert mixed == [1.5, None, None][:ranks]
        return True

    assert all(run(ranks, exchanged))


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

    with pytest.raises(
        InputError, match=r"out: expected no array .* of type list\. Leave out out="
    ):
        run(2, received)
