import dask
import dask.array as da
import dask.bag
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait
from distributed.utils_test import captured_logger

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.fusing.optimizer import optimizer_for
from tests.fusing.support import generated, smoothed
from tests.sections.support import nothing_is_left
from tests.support import BOUND_S

CLUSTER = {"n_workers": 2}


def random_array():
    return da.map_blocks(generated, (48, 48), 3, chunks=((6,) * 8, (48,)), dtype=float)


@pytest.fixture
def log():
    """The warnings of the scheduler, which is in this process."""
    with captured_logger("distributed.scheduler", level="WARNING") as log:
        yield log


@pytest.mark.parametrize("before", ["off", "on"])
def test_tasks_that_the_scheduler_has_keep_their_dependencies(client, before, log):
    y = smoothed(random_array(), 6)
    expected = smoothed(random_array(), 6).compute(scheduler="sync")
    with dask.config.set({"p2p.fuse": before}):
        persisted = client.persist(y)
        wait(persisted)
    with dask.config.set({"p2p.fuse": "on"}):
        again = client.persist([y, smoothed(y, 6)])
        wait(again, timeout=BOUND_S)
        total = y.sum(axis=0)
        np.testing.assert_array_equal(total.compute(), total.compute(scheduler="sync"))
    np.testing.assert_array_equal(again[0].compute(), expected)
    assert "run_spec" not in log.getvalue()


def test_outputs_that_the_scheduler_is_about_to_forget(client, log):
    y = smoothed(random_array(), 6)
    expected = y.compute(scheduler="sync")
    for _ in range(5):
        np.testing.assert_array_equal(y.compute(), expected)
        with dask.config.set({"p2p.fuse": "on"}):
            persisted = client.persist(y)
        wait(persisted, timeout=BOUND_S)
        np.testing.assert_array_equal(persisted.compute(), expected)
        del persisted
        nothing_is_left(client)
    assert "run_spec" not in log.getvalue()


def test_a_scheduler_without_the_plugin(client):
    y = smoothed(random_array(), 6)
    optimizer_for("auto", None)  # registers
    client.unregister_scheduler_plugin(PLUGIN_NAME)
    with dask.config.set({"p2p.fuse": "auto"}):
        assert y.sum().compute() == pytest.approx(y.compute(scheduler="sync").sum())
    with dask.config.set({"p2p.fuse": "on"}), pytest.raises(UnsupportedArrayError, match="plugin"):
        y.sum().compute()


def test_workers_with_resources():
    with (
        LocalCluster(n_workers=1, resources={"GPU": 1}, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        dask.config.set({"p2p.fuse": "auto"}),
    ):
        y = smoothed(random_array(), 6)
        assert "workers without resources" in dask_p2p.explain(y)
        computed = client.compute(y, resources={"GPU": 1}).result(BOUND_S)
    np.testing.assert_array_equal(computed, y.compute(scheduler="sync"))


# --- what `explain` says


def test_explained_programs(client):
    x = da.from_array(np.ones((32, 32)), chunks=(4, 32))
    y = smoothed(x, 6)
    assert dask_p2p.explain(y).startswith("by one gang: ")
    assert dask_p2p.explain(y, y.sum()).endswith("2 ranks, 6 exchanges")
    assert "too small to gain: 0 exchanges" in dask_p2p.explain(x + 1)
    assert "all tasks stay" in dask_p2p.explain(client.persist(x))
    with dask.annotate(priority=3):
        assert "no annotations of priority" in dask_p2p.explain(y)
    p2p = x.rechunk((32, 4), method="p2p")
    assert dask_p2p.explain(smoothed(p2p, 6)).startswith("by one gang: ")


def test_explained_collections(client):
    y = smoothed(da.from_array(np.ones((32, 32)), chunks=(4, 32)), 6)
    lazy = dask.delayed(sum)([1, 2])
    assert "collections of them, got none" in dask_p2p.explain(lazy)
    assert "collections of them, got none" in dask_p2p.explain(dask.bag.from_sequence([1]))
    assert dask_p2p.explain(lazy, y) == dask_p2p.explain(y)


def of_delayed():
    shape = (512, 1024)
    read = dask.delayed(lambda: np.ones(shape))
    return da.concatenate([da.from_delayed(read(), shape, float) for _ in range(64)])


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


def test_no_collection():
    with pytest.raises(InputError, match="at least one Dask collection"):
        dask_p2p.explain(np.ones(3))
