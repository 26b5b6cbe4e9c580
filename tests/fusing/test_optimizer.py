from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.fusing.optimizer import AtScheduler, _known, cluster_of, optimizer_for
from dask_p2p.fusing.planning.owners import Locations
from dask_p2p.monitoring.metrics import DEVICE_METRIC
from tests.fusing.support import generated, stencils_of_dask_p2p
from tests.sections.support import nothing_is_left
from tests.support import BOUND_S

CLUSTER = {"n_workers": 2}


def made():
    return da.map_blocks(generated, (48, 48), 3, chunks=((6,) * 8, (48,)), dtype=float)


@pytest.fixture
def warnings():
    """The warnings of the scheduler, which is in this process."""
    seen = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger("distributed.scheduler")
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)


@pytest.mark.parametrize("before", ["off", "on"])
def test_tasks_that_the_scheduler_has_keep_their_dependencies(client, before, warnings):
    y = stencils_of_dask_p2p(made())
    expected = stencils_of_dask_p2p(made()).compute(scheduler="sync")
    with dask.config.set({"p2p.fuse": before}):
        known = client.persist(y)
        wait(known)
    with dask.config.set({"p2p.fuse": "on"}):
        again = client.persist([y, stencils_of_dask_p2p(y)])
        wait(again, timeout=BOUND_S)
        total = y.sum(axis=0)
        np.testing.assert_array_equal(total.compute(), total.compute(scheduler="sync"))
    np.testing.assert_array_equal(again[0].compute(), expected)
    assert not [text for text in warnings if "run_spec" in text]


def test_outputs_that_the_scheduler_is_about_to_forget(client, warnings):
    y = stencils_of_dask_p2p(made())
    expected = y.compute(scheduler="sync")
    for _ in range(5):
        np.testing.assert_array_equal(y.compute(), expected)
        with dask.config.set({"p2p.fuse": "on"}):
            got = client.persist(y)
        wait(got, timeout=BOUND_S)
        np.testing.assert_array_equal(got.compute(), expected)
        del got
        nothing_is_left(client)
    assert not [text for text in warnings if "run_spec" in text]


@pytest.mark.parametrize(("state", "known"), [("released", "b"), ("memory", "ab")])
def test_tasks_that_count_as_known(state, known):
    tasks = {
        key: SimpleNamespace(
            key=key, run_spec=key.upper(), state=state, dependencies=(), nbytes=8, who_has=held
        )
        for key, held in {"a": [SimpleNamespace(address="tcp://one")], "b": None}.items()
    }
    scheduler = SimpleNamespace(tasks=tasks, workers={"tcp://one": None, "tcp://other": None})
    found = _known({"a": 1, "b": 2, "c": 3}, {"b"}, scheduler)
    assert found.tasks == {key: key.upper() for key in known}
    assert found.sizes_bytes == {"a": 8, "b": 8}
    assert found.locations == Locations({"a": ["tcp://one"]}, workers=2)


def test_one_function_for_all_arrays(client):
    first, second = optimizer_for("auto", da.ones(3)), optimizer_for("auto", da.ones((2, 2)))
    assert first == second
    assert hash(first) == hash(second)
    assert first != optimizer_for("on", None)
    sent = pickle.loads(pickle.dumps(first))
    assert type(sent) is AtScheduler
    assert sent.options == first.options


def test_an_obstacle_counts_for_one_call(client):
    masked = da.ma.masked_less(da.ones(3), 0)
    first, second = optimizer_for("auto", masked), optimizer_for("auto", da.ones(3))
    assert first is second
    assert "MaskedArray" in pickle.loads(pickle.dumps(second)).obstacle
    del first, second
    assert not pickle.loads(pickle.dumps(optimizer_for("auto", da.ones(3)))).obstacle
    assert not optimizer_for("on", masked).obstacles


def test_a_scheduler_without_the_plugin(client):
    y = stencils_of_dask_p2p(made())
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
        y = stencils_of_dask_p2p(made())
        assert "workers without resources" in dask_p2p.explain(y)
        got = client.compute(y, resources={"GPU": 1}).result(BOUND_S)
    np.testing.assert_array_equal(got, y.compute(scheduler="sync"))


def test_clusters():
    worker = {
        "status": "running", "memory_limit": 8, "nthreads": 2, "resources": {}, "metrics": {}
    }  # fmt: skip
    paused = {**worker, "status": "paused", "metrics": {DEVICE_METRIC: 1}}
    metrics = {DEVICE_METRIC: 32}
    other = {**worker, "memory_limit": None, "resources": {"GPU": 1}, "metrics": metrics}
    found = cluster_of([worker, paused, other])
    assert (found.workers, found.threads, found.memory_bytes) == (2, 4, 8)
    assert found.has_resources
    assert found.device_bytes == 32
    assert not cluster_of([worker]).has_resources
    assert cluster_of([paused, paused]) == replace(cluster_of([worker, worker]), device_bytes=1)
    assert cluster_of([worker, {**paused, "memory_limit": 4}]).memory_bytes == 4
