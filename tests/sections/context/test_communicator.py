from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.errors import InputError, MissingPackageError, SectionError
from dask_p2p.plans.ranks import RankGrid
from tests.sections.gangs import run_gang

GRID = RankGrid(((1, 1), (1, 1, 1)), (2, 3))


def test_ranks_of_a_color_have_a_communicator():
    def split(ctx):
        comm = ctx.split(ctx.rank % 2, key=-ctx.rank)
        wanted = [rank for rank in range(5, -1, -1) if rank % 2 == ctx.rank % 2]
        assert comm.size == 3
        assert comm.allgather(ctx.rank).tolist() == wanted
        assert wanted[comm.rank] == ctx.rank
        left, right = (comm.rank - 1) % 3, (comm.rank + 1) % 3
        assert comm.sendrecv(ctx.rank, right, left) == wanted[left]
        assert comm.alltoall([ctx.rank] * 3) == wanted
        assert comm.allreduce(np.ones(1 << 18)).sum() == 3 << 18
        comm.barrier()
        inner = comm.split(comm.rank // 2)
        assert inner.allreduce(1) == (1 if comm.rank == 2 else 2)
        return ctx.allreduce(1)

    assert run_gang(GRID, split) == [6] * 6


def test_ranks_without_a_color_are_in_none():
    def split(ctx):
        comm = ctx.split(None if ctx.rank else 7)
        return None if comm is None else comm.allreduce(3)

    assert run_gang(RankGrid(((1, 1),), (2,)), split) == [3, None]


def test_lines_of_the_grid():
    def along(ctx):
        row, column = ctx.along(1), ctx.along(-2)
        assert (row.size, column.size) == (3, 2)
        assert row.allgather(ctx.rank).tolist() == [ctx.rank // 3 * 3 + n for n in range(3)]
        assert column.allgather(ctx.rank).tolist() == [ctx.rank % 3, ctx.rank % 3 + 3]
        return row.rank, column.rank

    assert run_gang(GRID, along) == [(n % 3, n // 3) for n in range(6)]


def test_only_the_ranks_of_a_communicator_make_its_calls():
    def some(ctx):
        comm = ctx.split(ctx.rank < 2)
        if ctx.rank < 2:
            assert comm.sendrecv(ctx.rank, 1 - comm.rank, 1 - comm.rank) == 1 - ctx.rank
            return comm.allreduce(1)
        return 0

    assert run_gang(RankGrid(((1,) * 3,), (3,)), some) == [2, 2, 0]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda ctx, comm: (comm if ctx.rank else ctx).allreduce(1), "of split 1, color 0"),
        (
            lambda ctx, comm: (
                ctx.send(1, 1) if ctx.rank == 0 else comm.recv(0) if ctx.rank == 1 else 0
            ),
            "of another communicator. Send and receive by the same one",
        ),
    ],
)
def test_calls_of_different_communicators_are_an_error(call, error):
    with pytest.raises(SectionError, match=error):
        run_gang(RankGrid(((1, 1),), (2,)), lambda ctx: call(ctx, ctx.split(0)))


@pytest.mark.parametrize(("color", "key"), [("a", 0), (0.5, 0), (0, None)])
def test_colors_are_integers(color, key):
    def split(ctx):
        with pytest.raises(InputError, match="expected integers as color and key"):
            ctx.split(color, key)

    run_gang(RankGrid(((1,),), (1,)), split)


@pytest.mark.parametrize("axis", [1, -2, "a", 0.5])
def test_lines_are_along_axes_of_the_grid(axis):
    def along(ctx):
        with pytest.raises(InputError, match="axis: expected an axis of 1 dimensions"):
            ctx.along(axis)

    run_gang(RankGrid(((1,),), (1,)), along)


def nccl_ids(ctx):
    whole, half = ctx.nccl_id(), ctx.split(ctx.rank % 2).nccl_id()
    return whole, half


@pytest.mark.parametrize("kind", [tuple, bytes])  # of CuPy 13, and of CuPy 14
def test_ranks_get_the_same_new_identifier_of_nccl(monkeypatch, kind):
    made = []

    def new_id():
        start = len(made) if kind is bytes else len(made) - 64
        made.append(kind(range(start, start + 128)))
        return made[-1]

    nccl = SimpleNamespace(available=True, get_unique_id=new_id)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=nccl))
    found = run_gang(RankGrid(((1,) * 4,), (4,)), nccl_ids)
    assert {whole for whole, _ in found} == {made[0]}
    halves = [half for _, half in found]
    assert halves[:2] == halves[2:]
    assert {*halves} == {*made[1:]}


@pytest.mark.parametrize("cuda", [None, SimpleNamespace(nccl=SimpleNamespace(available=False))])
def test_an_identifier_of_nccl_needs_cupy(monkeypatch, cuda):
    monkeypatch.setitem(sys.modules, "cupy", None if cuda is None else SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    with pytest.raises(MissingPackageError, match="CuPy with NCCL on the worker of rank 0"):
        run_gang(RankGrid(((1, 1),), (2,)), nccl_ids)
