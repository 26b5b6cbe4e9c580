"""``pinned`` between GPUs: right values, of blocks that CUDA IPC cannot share too, nothing left."""

import os
import signal

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client

import dask_p2p
from dask_p2p.cli.cluster import indexed_array
from tests.faults.support import BOUND_S, addresses
from tests.gpu.support import assert_right, check_transpose, gpu_client
from tests.support import persisted, used
from tests.transports.loopback import wait_until
from tests.transports.packed.test_pinned_cluster import mapped_segments, own_segments

pytestmark = pytest.mark.gpu(2)

SHAPE = (3000, 2000)


@pytest.fixture(autouse=True)
def _by_pinned():
    with dask.config.set({"p2p.transports.order": ["pinned"]}):
        yield


def test_on_and_on_in_small_parts(client):
    a = persisted(client, indexed_array(SHAPE, (300, 2000), "f4", kind="cupy"))
    with dask.config.set({"p2p.transports.part-bytes": "256 kiB"}):
        for _ in range(20):
            check_transpose(client, a, "pinned")


@pytest.mark.parametrize("setting", ["rmm_async", "rmm_managed_memory"])
def test_an_allocator_that_ipc_cannot_share(setting):
    options = {setting: True, "rmm_allocator_external_lib_list": ["cupy"]}
    with dask_p2p.local_cluster(2, gpus=True, **options) as cluster, Client(cluster) as client:
        a = persisted(client, indexed_array(SHAPE, (700, 2000), "f4", kind="cupy"))
        for _ in range(3):
            check_transpose(client, a, "pinned")


def test_numpy_blocks_of_gpu_workers(client):
    x = np.arange(401 * 299.0).reshape(401, 299)
    y = persisted(client, dask_p2p.transpose(da.from_array(x, chunks=(101, 299))))
    np.testing.assert_array_equal(y.compute(), x.T)
    assert used(client, y) == {"pinned"}


def test_a_killed_worker_leaves_nothing():
    with dask.config.set({"distributed.scheduler.work-stealing": False}), gpu_client() as client:
        workers = addresses(client)
        a = persisted(client, indexed_array(SHAPE, (700, 2000), "f4", kind="cupy"))
        y = persisted(client, dask_p2p.transpose(a))
        assert used(client, y) == {"pinned"}
        of_victim = client.run(own_segments, workers=workers[1:])[workers[1]]
        assert of_victim & client.run(mapped_segments)[workers[0]]
        (pid,) = client.run(os.getpid, workers=workers[1:]).values()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: workers[1] not in addresses(client), BOUND_S)
        assert_right(client, y, SHAPE)  # what was lost is made again
        wait_until(
            lambda: not of_victim & client.run(mapped_segments, workers=workers[:1])[workers[0]]
        )
