"""Blocks that are on disk, or go there while they are read."""

import dask
import numpy as np
import pytest
from distributed import wait
from distributed.spill import SpillBuffer

import dask_p2p
from dask_p2p.config import options
from dask_p2p.plugins import context
from dask_p2p.plugins import storage as spilling
from dask_p2p.plugins.context import DaskWorkerContext
from tests.faults.support import (
    BOUND_S,
    addresses,
    check_transposed,
    cluster_of,
    expected,
    one_block_each,
    set_trap,
    slabs,
    source,
)
from tests.plugins.test_context import DeafWorker
from tests.transports.loopback import EventLoop, wait_until
from tests.usage import usage_of_worker

SHAPE = (384, 384)  # 1.1 MiB
LIMIT_BYTES = 2**30
PARTS = {"p2p.transports.part-bytes": "16 kiB"}
CLUSTER = {"n_workers": 3, "options": PARTS}


def on_disk(client):
    return sum(client.run(lambda dask_worker: len(dask_worker.data.disk)).values())


@pytest.mark.parametrize("transport", ["comm", "cma"])
@pytest.mark.parametrize("when", ["before the first pull", "in the middle"])
def test_blocks_go_to_disk_while_they_are_read(client, gate, when, transport):
    x = slabs(client, SHAPE)
    moment = ("started", 1) if when == "before the first pull" else ("placed", 3)
    client.run(set_trap, *moment, "wait", gate.path)
    with dask.config.set({"p2p.transports.order": [transport]}):
        y = one_block_each(client, dask_p2p.transpose(x), addresses(client))
    gate.wait_until_reached(by=3)
    client.run(lambda dask_worker: dask_worker.data.fast.evict_until_below_target(0))
    assert on_disk(client) >= 3, "the blocks of x"
    gate.open()
    check_transposed(client, y, SHAPE)


@pytest.mark.parametrize("transport", ["comm", "cma"])
def test_less_memory_than_the_blocks_take(transport):
    """A fifth of what inputs and outputs take: they go to disk and come back all the time."""
    kept_bytes = 2 * expected(SHAPE).nbytes / 2 / 5  # of each of two workers
    options = PARTS | {"p2p.transports.order": [transport]}
    options |= {"distributed.worker.memory.target": kept_bytes / LIMIT_BYTES}
    with cluster_of(2, options, memory_limit=LIMIT_BYTES) as client:
        x = client.persist(source(SHAPE, (48, 384)))
        wait(x)
        assert on_disk(client) >= 3
        y = client.persist(dask_p2p.transpose(x, chunks=(32, -1)))
        wait(y)
        assert on_disk(client) >= 10
        check_transposed(client, y, SHAPE)
        check_transposed(client, dask_p2p.transpose(x, chunks=(24, -1)), SHAPE)
        np.testing.assert_array_equal(client.compute(x).result(timeout=BOUND_S), expected(SHAPE))


@pytest.fixture
def spilled(tmp_path):
    """A worker's side of the transports, and its buffer with one block that is on disk."""

    async def make():
        worker = DeafWorker()
        worker.data = buffer
        return DaskWorkerContext(worker, options())

    events = EventLoop()
    buffer = SpillBuffer(str(tmp_path), target=2 * expected(SHAPE).nbytes)
    buffer["x"] = expected(SHAPE)
    buffer.evict()
    assert list(buffer.disk) == ["x"]
    host = events.run(make())
    yield host, buffer
    host.close()
    events.close()


def test_a_block_that_has_to_be_read_is_not_read_for_each_region(spilled, monkeypatch):
    """A block that Dask has compressed."""
    host, buffer = spilled
    files, read = buffer.disk.data, []
    load = files.load
    monkeypatch.setattr(files, "load", lambda content: read.append(1) or load(content).copy())
    monkeypatch.setattr(context, "_KEEP_S", BOUND_S)
    for _ in range(5):
        host.block("x")
    assert len(read) == 1
    assert list(buffer.disk) == ["x"]
    assert usage_of_worker(host)["from disk"] == 1
    monkeypatch.setattr(context, "_KEEP_S", 0.0)
    buffer["y"] = expected(SHAPE)
    buffer.evict()
    for number in (2, 3):
        host.block("y")
        assert len(read) == number, "the first one is not in memory any more"
        wait_until(lambda: usage_of_worker(host)["from disk"] == 1)


def test_a_block_that_comes_back_just_when_it_is_looked_for(spilled, monkeypatch):
    host, buffer = spilled

    def moved(path, mode):
        monkeypatch.undo()
        assert buffer["x"].size
        return open(path, mode)

    monkeypatch.setattr(spilling, "open", moved, raising=False)
    assert host.block("x").tobytes() == expected(SHAPE).tobytes()
    assert list(buffer.memory) == ["x"]
