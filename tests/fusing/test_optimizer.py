from __future__ import annotations

import logging

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.fusing.optimizer import optimizer_for
from tests.fusing.support import generated, stencils_of_dask_p2p
from tests.sections.support import nothing_is_left
from tests.support import BOUND_S

CLUSTER = {"n_workers": 2}


def random_array():
    return da.map_blocks(generated, (48, 48), 3, chunks=((6,) * 8, (48,)), dtype=float)


@pytest.fixture
def warnings():
    """The warnings of the scheduler, which is in this process."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("distributed.scheduler")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@pytest.mark.parametrize("before", ["off", "on"])
def test_tasks_that_the_scheduler_has_keep_their_dependencies(client, before, warnings):
    y = stencils_of_dask_p2p(random_array())
    expected = stencils_of_dask_p2p(random_array()).compute(scheduler="sync")
    with dask.config.set({"p2p.fuse": before}):
        persisted = client.persist(y)
        wait(persisted)
    with dask.config.set({"p2p.fuse": "on"}):
        again = client.persist([y, stencils_of_dask_p2p(y)])
        wait(again, timeout=BOUND_S)
        total = y.sum(axis=0)
        np.testing.assert_array_equal(total.compute(), total.compute(scheduler="sync"))
    np.testing.assert_array_equal(again[0].compute(), expected)
    assert not [text for text in warnings if "run_spec" in text]


def test_outputs_that_the_scheduler_is_about_to_forget(client, warnings):
    y = stencils_of_dask_p2p(random_array())
    expected = y.compute(scheduler="sync")
    for _ in range(5):
        np.testing.assert_array_equal(y.compute(), expected)
        with dask.config.set({"p2p.fuse": "on"}):
            persisted = client.persist(y)
        wait(persisted, timeout=BOUND_S)
        np.testing.assert_array_equal(persisted.compute(), expected)
        del persisted
        nothing_is_left(client)
    assert not [text for text in warnings if "run_spec" in text]


def test_a_scheduler_without_the_plugin(client):
    y = stencils_of_dask_p2p(random_array())
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
        y = stencils_of_dask_p2p(random_array())
        assert "workers without resources" in dask_p2p.explain(y)
        computed = client.compute(y, resources={"GPU": 1}).result(BOUND_S)
    np.testing.assert_array_equal(computed, y.compute(scheduler="sync"))
