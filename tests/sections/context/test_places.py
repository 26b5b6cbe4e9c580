from __future__ import annotations

from itertools import cycle

import pytest

from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections import Context
from dask_p2p.sections.wire import endpoint
from tests.sections import gangs
from tests.sections.gangs import run_gang
from tests.sections.wire.support import TCP

GRID = RankGrid(((1, 1), (2, 2)), (2, 2))


def test_place_in_the_array():
    def place(ctx):
        rows, columns = ctx.index
        assert ctx.shape == (2, 4)
        return rows.tolist(), columns.tolist()

    assert run_gang(GRID, place)[1] == ([[0]], [[2, 3]])


@pytest.mark.parametrize(
    ("kernels", "hosts", "local"),
    [("aaaa", (0, 0, 0, 0), [0, 1, 2, 3]), ("abba", (0, 1, 1, 0), [0, 0, 1, 1])],
)
def test_place_on_hosts(monkeypatch, kernels, hosts, local):
    names = cycle(kernels)
    monkeypatch.setattr(endpoint, "_kernel_and_network", lambda: next(names))
    monkeypatch.setattr(gangs, "Reach", lambda: TCP)
    found = run_gang(GRID, lambda ctx: (ctx.hosts, ctx.local_rank))
    assert found == [(hosts, each) for each in local]


def test_a_rank_alone_has_a_host():
    alone = Context(RankGrid(((3,),), (1,)))
    assert (alone.hosts, alone.local_rank) == ((0,), 0)
