"""Records of tasks that have not ended, on a cluster."""

from __future__ import annotations

import asyncio

import dask
import dask.array as da
import pytest

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.monitoring.records import unpacked
from dask_p2p.plugins.registration import workers_of
from tests.support import indexed, spread

TILE_BYTES = 16 * 16 * 8


@pytest.fixture
def slabs(client):
    """Row slabs of 16 x 64, one on each worker: their workers, and the array."""
    x = spread(client, da.from_array(indexed((64, 64), float), chunks=(16, 64)))
    return sorted(workers_of(client)), x


def read_bytes(record):
    return sum(stage.nbytes for stage in record.stages)


def running(client, worker):

    async def ask(dask_worker):
        return await dask_worker.plugins[PLUGIN_NAME].context.new_records()

    reply = client.run(ask, workers=[worker])[worker]
    return unpacked(reply["under_way"])


def hold_back(dask_worker):
    good = dask_worker.handlers["p2p_comm_read"]
    dask_worker.let_through = asyncio.Event()

    async def reply(**request):
        await dask_worker.let_through.wait()
        return await good(**request)

    dask_worker.handlers["p2p_comm_read"] = reply


def let_through(dask_worker):
    transports = dask_worker.plugins[PLUGIN_NAME].context.router.transports
    dask_worker.handlers.update(transports["comm"].handlers())
    dask_worker.loop.add_callback(dask_worker.let_through.set)


def test_bytes_in_place_by_holder(client, slabs):
    workers, x = slabs
    reader, *other_workers = workers
    last = other_workers[-1]
    dask_p2p.register(client)
    client.run(hold_back, workers=[last])
    with dask.config.set({"p2p.transports.order": ["comm"]}):
        y = client.compute(dask_p2p.transpose(x)[:16], workers=[reader])
    try:
        while not (records := running(client, reader)) or read_bytes(records[0]) < 2 * TILE_BYTES:
            assert not y.done()
        (record,) = records
    finally:
        client.run(let_through, workers=[last])
    assert y.result().shape == (16, 64)
    assert (record.worker, record.wanted_bytes, record.is_made) == (reader, 3 * TILE_BYTES, False)
    assert {s.holder: s.nbytes for s in record.stages} == dict.fromkeys(
        other_workers, TILE_BYTES
    ) | {last: 0}
    assert {s.transport for s in record.stages} == {"comm"}
    assert (record.array_shape, record.blocks) == ((64, 64), (4, 1))
    assert record.start_s < record.stop_s
    (run,) = dask_p2p.last_runs(client, n=1)
    assert (run.least_bytes, run.attempts, run.under_way) == (3 * TILE_BYTES, 1, ())
    assert running(client, reader) == []
