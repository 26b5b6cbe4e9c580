from __future__ import annotations

import sys

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster

import dask_p2p
from dask_p2p.plugins.low_latency import INTERVAL_S, shorten


def intervals(client):
    on_scheduler = client.run_on_scheduler(
        lambda dask_scheduler: [
            stream.interval
            for stream in [
                *dask_scheduler.stream_comms.values(),
                *dask_scheduler.client_comms.values(),
            ]
        ]
    )
    on_workers = client.run(lambda dask_worker: dask_worker.batched_stream.interval)
    return {client.scheduler_comm.interval, *on_scheduler, *on_workers.values()}


def test_all_streams_also_later_ones():
    with (
        dask.config.set({"p2p.low-latency": True}),  # which the workers' nannies hand on
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        assert min(intervals(client)) > INTERVAL_S  # only once registered
        dask_p2p.register(client)
        assert intervals(client) == {INTERVAL_S}
        cluster.scale(2)
        client.wait_for_workers(2)
        assert set(client.run(sys.getswitchinterval).values()) == {INTERVAL_S}
        with Client(cluster) as other:
            dask_p2p.register(other)
            assert intervals(other) == {INTERVAL_S}
        x = np.arange(48.0).reshape(8, 6)
        y = dask_p2p.transpose(da.from_array(x, chunks=(2, 6)))
        np.testing.assert_array_equal(y.compute(), x.T)


def test_a_client_decides_for_itself_alone(client):
    dask_p2p.register(client)
    with dask.config.set({"p2p.low-latency": True}):
        dask_p2p.register(client)
    assert client.scheduler_comm.interval == INTERVAL_S
    assert min(client.run(lambda dask_worker: dask_worker.batched_stream.interval).values()) > (
        INTERVAL_S
    )


def test_shorter_ones_and_other_things_are_left_alone():
    class Other:
        interval = 7

    other = Other()
    shorten(other)
    shorten(None)
    assert other.interval == 7
