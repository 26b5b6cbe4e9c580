"""Memory, files and threads that a cluster would lose. Run these by themselves.

The free memory of a GPU is that of all processes: a test beside these would be seen.
"""

import gc

import dask
import numpy as np
import pytest

import dask_p2p
from dask_p2p import iterate, spmd
from dask_p2p.cli.cluster import indexed_array
from tests.backends.support import cupy
from tests.faults.test_soak import measure
from tests.gpu.support import assert_right, gpu_client, on_gpu
from tests.gpu.test_faults import PARTS, SHAPE, assert_flat
from tests.gpu.test_sections import heat, way
from tests.sections.support import nothing_is_left
from tests.support import persisted

__all__ = ["way"]

pytestmark = pytest.mark.gpu(2)

RUNS, WARM_UP = 300, 60
MIB = 2**20


def measure_all(dask_worker):
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


def used_bytes(dask_worker):
    """Return the size of the pool, and the free memory of the GPU."""
    import rmm

    gc.collect()
    resource = rmm.mr.get_current_device_resource()
    while not hasattr(resource, "pool_size"):
        resource = resource.get_upstream()
    cupy.cuda.runtime.deviceSynchronize()
    return resource.pool_size(), cupy.cuda.runtime.memGetInfo()[0]


@pytest.mark.parametrize("program", ["iterate", "redistribute"])
def test_no_memory_of_the_gpu_is_lost(client, way, program):
    def there_and_back(ctx, x):
        for _ in range(5):
            x = ctx.redistribute(ctx.redistribute(x, (1,)), from_partition=(1,))
        return x

    def run():
        if program == "iterate":
            y = persisted(client, iterate(heat, x, 1, 30, checkpoint_every=10))
        else:
            y = persisted(client, spmd(there_and_back, x))
        del y

    x = persisted(client, on_gpu(np.zeros((2048, 2048), "f4"), (512, 2048)))
    for _ in range(3):
        run()
    nothing_is_left(client)
    before = client.run(used_bytes)
    for _ in range(20):
        run()
    nothing_is_left(client)
    after = client.run(used_bytes)
    for worker, (pool_bytes, free_bytes) in after.items():
        assert pool_bytes == before[worker][0]
        assert free_bytes >= before[worker][1] - 2**26
