"""``ucx`` between the workers of a cluster, whose own protocol is another one."""

import os
import signal
import time

import dask
import numpy as np
import pytest

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from tests.faults.support import assert_nothing_is_held, expected, source
from tests.support import BOUND_S, own_client, persisted, spread, tls_client, used
from tests.transports.clusters import transposed


@pytest.fixture(autouse=True)
def _prefer_ucx():
    with dask.config.set({"p2p.transports.order": ["ucx"], "p2p.transports.part-bytes": "64 kiB"}):
        yield


def test_many_parts_on_and_on(client):
    a = spread(client, source((1500, 1100), (200, 1100)))
    for _ in range(3):
        y = persisted(client, dask_p2p.transpose(a))
        assert used(client, y) == {"ucx"}
        np.testing.assert_array_equal(y.compute(), expected((1500, 1100)).T)
        del y
    assert_nothing_is_held(client)


@pytest.mark.parametrize("allowed", [False, True])
def test_where_encryption_is_required_ucx_has_to_be_allowed(allowed):
    x = np.arange(480.0).reshape(40, 12)
    with dask.config.set({"p2p.transports.ucx.allow-unencrypted": allowed}), tls_client() as client:
        assert transposed(client, x, (10, 12)) == ({"ucx"} if allowed else {"comm"})

        def obstacle(dask_worker):
            ucx = dask_worker.plugins[PLUGIN_NAME].context.router.transports["ucx"]
            return ucx.obstacle("anybody", "numpy", np.dtype("f8"))

        for worker_obstacle in client.run(obstacle).values():
            assert worker_obstacle is None if allowed else worker_obstacle.code == "unencrypted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "moment_s"), [(signal.SIGKILL, 0.3), (signal.SIGTERM, 0.0)], ids=str
)
def test_a_killed_worker(how, moment_s):
    shape = (3000, 1500)
    with own_client(3) as client:
        a = spread(client, source(shape, (250, 1500)))
        pid = next(iter(client.run(os.getpid).values()))
        y = client.persist(dask_p2p.transpose(a))
        time.sleep(moment_s)
        os.kill(pid, how)
        np.testing.assert_array_equal(client.compute(y).result(timeout=BOUND_S), expected(shape).T)
