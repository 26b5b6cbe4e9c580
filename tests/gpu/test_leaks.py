"""Memory, files and threads that a cluster would lose. Run these by themselves.

The free memory of a GPU is that of all processes: a test beside these would be seen.
"""

from __future__ import annotations

import dask
import pytest

import dask_p2p
from dask_p2p.cli.cluster import indexed_array
from tests.faults.test_soak import measure
from tests.gpu.support import assert_right, gpu_client
from tests.gpu.test_faults import PARTS, SHAPE, assert_flat
from tests.support import persisted

pytestmark = pytest.mark.gpu(2)

RUNS, WARM_UP = 300, 60
MIB = 2**20


def measure_all(dask_worker):
    import cupy

    counts = measure(dask_worker)  # which collects garbage
    free_bytes, total_bytes = cupy.cuda.runtime.memGetInfo()
    return counts | {"device memory": total_bytes - free_bytes}


@pytest.mark.parametrize("order", [["ipc"], ["ucx"]], ids=str)
def test_nothing_grows(order):
    def run(x, number):
        for i in range(number):
            y = client.persist(dask_p2p.transpose(x, chunks=(1000 + i % 50, -1)))
            assert_right(client, y, SHAPE)

    with (
        dask.config.set(PARTS | {"p2p.transports.order": order}),
        # A pool that had to grow would be seen as device memory.
        gpu_client(rmm_pool_size=2**30) as client,
    ):
        dask_p2p.register(client)
        x = persisted(client, indexed_array(SHAPE, (2000, 4000), "f4", kind="cupy"))
        run(x, WARM_UP)
        before = client.run(measure_all)
        run(x, RUNS - WARM_UP)
        after = client.run(measure_all)
        del x
        assert_flat(client)
    for worker in before:
        grown = {
            resource: after[worker][resource] - before[worker][resource]
            for resource in before[worker]
        }
        # Dask's own logs grow; a leak of one block a run would be 32 MB times 240.
        assert grown.pop("memory") < 64 * MIB, grown
        assert grown["device memory"] <= 0, grown
        # Connections of Dask come and go; a file left open by each run would be 240 of them.
        assert grown["files"] < 5, grown
        assert grown["threads"] <= 2, grown
