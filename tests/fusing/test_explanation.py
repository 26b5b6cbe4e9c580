from __future__ import annotations

import dask
import dask.array as da
import dask.bag
import numpy as np
import pytest
from distributed import Client, LocalCluster

import dask_p2p
from dask_p2p.errors import InputError
from tests.fusing.support import stencils_of_dask_p2p

CLUSTER = {"n_workers": 2}


def test_programs(client):
    x = da.from_array(np.ones((32, 32)), chunks=(4, 32))
    y = stencils_of_dask_p2p(x)
    assert dask_p2p.explain(y).startswith("by one gang: ")
    assert dask_p2p.explain(y, y.sum()).endswith("2 ranks, 6 exchanges")
    assert "too small to gain: at most 1 exchange" in dask_p2p.explain(x + 1)
    assert "all tasks stay" in dask_p2p.explain(client.persist(x))
    with dask.annotate(priority=3):
        assert "no annotations of priority" in dask_p2p.explain(y)
    p2p = x.rechunk((32, 4), method="p2p")
    assert dask_p2p.explain(stencils_of_dask_p2p(p2p)).startswith("by one gang: ")


def test_other_collections(client):
    y = stencils_of_dask_p2p(da.from_array(np.ones((32, 32)), chunks=(4, 32)))
    lazy = dask.delayed(sum)([1, 2])
    assert "collections of them, got none" in dask_p2p.explain(lazy)
    assert "collections of them, got none" in dask_p2p.explain(dask.bag.from_sequence([1]))
    assert dask_p2p.explain(lazy, y) == dask_p2p.explain(y)
    assert dask_p2p.explain(y).startswith("by one gang: ")


def read(shape):
    return np.ones(shape)


def of_delayed():
    shape = (512, 1024)
    return da.concatenate(
        [da.from_delayed(dask.delayed(read)(shape), shape, float) for _ in range(64)]
    )


def outer():
    x = da.random.default_rng(0).random(8192, chunks=1024)
    return abs(x[:, None] - x[None, :])


def counted():
    return da.arange(2**25, chunks=2**19, dtype=float)


@pytest.fixture(scope="module")
def small_workers():
    """Workers of 256 MiB."""
    options = {"processes": False, "memory_limit": "256 MiB", "dashboard_address": ":0"}
    with (
        dask.config.set({"distributed.worker.memory.pause": False}),  # this process is larger
        LocalCluster(n_workers=2, **options) as cluster,
    ):
        yield cluster


@pytest.fixture
def of_small_workers(small_workers):
    with Client(small_workers) as client:
        yield client


@pytest.mark.parametrize("make_array", [of_delayed, outer, counted])
@pytest.mark.filterwarnings("ignore:Increasing number of chunks")
def test_arrays_that_dask_would_spill(of_small_workers, make_array):
    """All of these have 256 MiB, and each program needs them twice."""
    y = make_array()
    for _ in range(3):
        y = y / (1 + y.mean(axis=0))
    for collection in (y, y.sum(axis=0), *dask.optimize(y)):
        reason = dask_p2p.explain(collection)
        assert "in the memory of a worker" in reason or "of unknown size" in reason, reason


@pytest.mark.parametrize("make_array", [of_delayed, counted])
def test_large_arrays_that_are_reduced_first(of_small_workers, make_array):
    """Ranks read their inputs as a whole, but drop values that they make."""
    y = make_array()
    for number in range(3):
        y = abs(y - number)
    y = y.sum(axis=0) * 2 - 1
    is_made = make_array is counted
    assert dask_p2p.explain(y).startswith("by one gang: " if is_made else "by Dask's tasks")


def test_without_a_client():
    assert "synchronous client" in dask_p2p.explain(da.ones(3))


def test_no_collection():
    with pytest.raises(InputError, match="at least one Dask collection"):
        dask_p2p.explain(np.ones(3))
