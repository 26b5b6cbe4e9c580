from __future__ import annotations

import dask
import pytest
from distributed import Client, LocalCluster

from dask_p2p.cli import own_cluster, wait_for_worker
from dask_p2p.errors import P2PError


def fail_when_closed(dask_worker):
    async def close(**kwargs):
        closed = await original(**kwargs)
        dask_worker.loop.add_callback(fail)
        return closed

    original, dask_worker.close = dask_worker.close, close


def fail():
    raise RuntimeError("ConnectionPool is closed")


@pytest.mark.cluster
def test_processes_of_an_own_cluster_log_nothing(capfd):
    """A heartbeat that the cluster's end cuts off fails so, when the worker is silent no more."""
    # What is forked off a server of other tests writes where that server writes.
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}),
        own_cluster(1, gpus=False) as client,
    ):
        client.run(fail_when_closed)
    assert capfd.readouterr() == ("", "")


def test_a_scheduler_without_workers(monkeypatch):
    monkeypatch.setattr("dask_p2p.cli.WORKERS_S", 0.2)
    with (
        LocalCluster(n_workers=0, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        pytest.raises(P2PError, match="has no workers"),
    ):
        wait_for_worker(client)
