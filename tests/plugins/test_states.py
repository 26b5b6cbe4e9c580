"""The rewritten message under Dask's own validation of all its state machines."""

from __future__ import annotations

import asyncio
import warnings
from contextlib import asynccontextmanager

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import wait

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from tests.support import in_process, indexed
from tests.transports.loopback import true_later

VALIDATE = {"distributed.scheduler.validate": True, "distributed.worker.validate": True}


@asynccontextmanager
async def four_workers():
    """A client and workers of this process, all of whose states are checked at the end, too."""
    with dask.config.set(VALIDATE):
        async with in_process(4, protocol="tcp://") as (cluster, client):
            workers = [*cluster.workers.values()]
            assert cluster.scheduler.validate
            assert all(worker.state.validate for worker in workers)
            yield client, workers
            cluster.scheduler.validate_state()
            for worker in cluster.workers.values():
                worker.state.validate_state()


def source(shape, chunks):
    return da.fromfunction(lambda i, j: i * shape[1] + j, shape=shape, chunks=chunks, dtype=float)


async def make_blocks(c, shape, chunks):
    """An array whose blocks are in memory, on a cluster that has the plugins."""
    await dask_p2p.register(c)
    x = c.persist(source(shape, chunks))
    await wait(x)
    return x


async def check_transposed(c, y, shape):
    np.testing.assert_array_equal(await c.compute(y), indexed(shape, float).T)


async def test_cancelled_and_wanted_again():
    async with four_workers() as (c, _):
        x = await make_blocks(c, (400, 300), (50, 300))
        for pause_s in (0.0, 0.001, 0.005, 0.01, 0.02):
            y = c.persist(dask_p2p.transpose(x))
            await asyncio.sleep(pause_s)
            await c.cancel(y)
            y = c.persist(dask_p2p.transpose(x))
            await check_transposed(c, y, (400, 300))
            del y


async def test_inputs_released_as_soon_as_the_last_reader_is_done():
    async with four_workers() as (c, workers):
        await dask_p2p.register(c)
        y = c.persist(dask_p2p.transpose(source((40, 30), (10, 30))))
        await wait(y)
        await true_later(lambda: all("p2p" in str(key) for w in workers for key in w.data))
        await check_transposed(c, y, (40, 30))


@pytest.mark.parametrize("graceful", [True, False])
async def test_a_worker_leaves_in_the_middle(graceful):
    async with four_workers() as (c, workers):
        x = await make_blocks(c, (800, 600), (50, 600))
        y = c.persist(dask_p2p.transpose(x))
        await asyncio.sleep(0.01)
        if graceful:
            await c.retire_workers([workers[0].address])
        else:
            await workers[0].close(nanny=False)
        await check_transposed(c, y, (800, 600))


async def test_the_plugin_goes_while_tasks_run():
    async with four_workers() as (c, workers):
        x = await make_blocks(c, (400, 300), (25, 300))
        y = c.persist(dask_p2p.transpose(x))
        await c.unregister_worker_plugin(PLUGIN_NAME)
        for worker in workers:
            assert PLUGIN_NAME not in worker.plugins
            assert "p2p_comm_read" not in worker.handlers
        y2 = c.persist(dask_p2p.transpose(x + 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            np.testing.assert_array_equal(await c.compute(y2), indexed((400, 300), float).T + 1)
        del y
