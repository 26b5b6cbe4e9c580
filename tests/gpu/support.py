"""GPU clusters for tests, and what is asked of them."""

from __future__ import annotations

import time

import dask.array as da

from dask_p2p.engine.task import PLUGIN_NAME

POOL = {"rmm_pool_size": 8 * 2**30}


def on_gpu(x, chunks):
    import cupy

    return da.from_array(x, chunks=chunks).map_blocks(cupy.asarray)


def held(client):
    """Blocks kept by descriptor directories, and mappings that are open, on each worker."""

    def look(dask_worker):
        ipc = dask_worker.plugins[PLUGIN_NAME].context.router.transports["ipc"]
        return len(ipc.directory), len(ipc.mappings)

    return client.run(look)


def forgotten(client, future):
    """Wait until the scheduler has forgotten a task that failed, which would fail again."""
    future.release()
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s and client.run_on_scheduler(
        lambda dask_scheduler: any("p2p-transpose" in str(key) for key in dask_scheduler.tasks)
    ):
        time.sleep(0.05)
