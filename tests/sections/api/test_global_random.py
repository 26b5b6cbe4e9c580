"""Functions that draw NumPy's global random numbers in ranks that share them."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from dask_p2p import PerRank, iterate, spmd
from dask_p2p.errors import P2PWarning

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
MATCH = r"drew NumPy's global random numbers .*default_rng\(\(seed, ctx.rank\)\)"


def seeded(ctx):
    np.random.seed(ctx.rank)
    ctx.barrier()
    return np.random.rand()


def drawn(ctx):
    return np.random.rand()


def by_state(ctx):
    return np.random.RandomState(ctx.rank).rand()


def by_generator(ctx):
    return np.random.default_rng((0, ctx.rank)).random()


def warned(recwarn):
    return [each for each in recwarn if issubclass(each.category, P2PWarning)]


@pytest.mark.parametrize("function", [seeded, drawn])
def test_ranks_in_threads_of_one_worker_are_warned(client, function):
    with pytest.warns(P2PWarning, match=MATCH):
        spmd(function, outputs=PerRank(0.0), ranks=4).compute()


def test_functions_of_iterate_are_warned(client):
    def noisy(u):
        return u[1:-1] + np.random.rand(len(u) - 2)

    with pytest.warns(P2PWarning, match=MATCH):
        iterate(noisy, da.zeros(40, chunks=10), 1, 3, ranks=4).compute()


@pytest.mark.parametrize(("function", "ranks"), [(seeded, 2), (drawn, 1), (seeded, 1)])
def test_ranks_in_processes_of_their_own_have_their_own_numbers(client, recwarn, function, ranks):
    found = spmd(function, outputs=PerRank(0.0), ranks=ranks).compute()
    wanted = [np.random.RandomState(rank).rand() for rank in range(ranks)]
    assert function is drawn or found.tolist() == wanted
    assert not warned(recwarn)


@pytest.mark.parametrize("function", [by_state, by_generator])
def test_generators_of_ranks_draw_without_a_word(client, recwarn, function):
    found = spmd(function, outputs=PerRank(0.0), ranks=4).compute()
    wanted = [function(type("Ctx", (), {"rank": rank})) for rank in range(4)]
    assert found.tolist() == wanted
    assert not warned(recwarn)


def test_a_function_that_raises_keeps_its_error(client):
    def failing(ctx):
        np.random.rand()
        raise ValueError("of the function")

    with pytest.raises(ValueError, match="of the function"):
        spmd(failing, outputs=PerRank(0.0), ranks=4).compute()
