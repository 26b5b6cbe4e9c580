from __future__ import annotations

from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections import Context
from tests.sections.gangs import run_gang

GRID = RankGrid(((1, 1), (2, 2)), (2, 2))


def test_place_in_the_array():
    def place(ctx):
        rows, columns = ctx.index
        assert ctx.shape == (2, 4)
        return rows.tolist(), columns.tolist()

    assert run_gang(GRID, place)[1] == ([[0]], [[2, 3]])


def test_a_rank_alone_has_a_host():
    alone = Context(RankGrid(((3,),), (1,)))
    assert (alone.hosts, alone.local_rank) == ((0,), 0)
