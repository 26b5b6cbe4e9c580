"""Blocks that move, or go, between a task's assignment and its pull.

One reader waits before its first pull; its addresses of the blocks' holders are old when it
goes on.
"""

import pytest
from distributed import futures_of, wait

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from tests.faults.support import (
    BOUND_S,
    addresses,
    check_transposed,
    one_block_each,
    set_trap,
    slabs,
)
from tests.transports.loopback import wait_until

SHAPE = (48, 48)
# It would drop replicas that a test has just made.
NO_MANAGER = {"distributed.scheduler.active-memory-manager.start": False}
CLUSTER = {"n_workers": 4, "options": NO_MANAGER}


def holders(client, x, row):
    return set(client.who_has(x)[x.name, row, 0])


def replicate(client, x, row, workers):
    (block,) = [future for future in futures_of(x) if future.key == (x.name, row, 0)]
    client.replicate([block], n=len(workers), workers=workers)
    assert holders(client, x, row) == set(workers)


def drop(client, worker, x, row):
    """Drop a worker's replica of a block, as rebalancing does."""

    async def delete(dask_scheduler):
        await dask_scheduler.delete_worker_data(worker, [key], "test")

    key = (x.name, row, 0)
    client.run_on_scheduler(delete)


def read_from(client, reader):
    """Return the workers that the reader's last task read its remote blocks from."""

    def stages(dask_worker):
        *_, record = dask_worker.plugins[PLUGIN_NAME].context.records
        return [stage.holder for stage in record.stages]

    return client.run(stages, workers=[reader])[reader]


def start(client, gate, x, reader):
    """Start a transpose; return its rows when the reader has received the holders of the blocks.

    The others are done by then: a task that is about to run fails in Dask if its input is dropped.
    """
    client.run(set_trap, "started", 1, "wait", gate.path, workers=[reader])
    workers = addresses(client)[:3]
    rows = one_block_each(client, dask_p2p.transpose(x, chunks=(16, -1)), workers)
    gate.wait_until_reached()
    wait(
        [future for future in futures_of(rows) if workers[future.key[1]] != reader], timeout=BOUND_S
    )
    return rows


def finish(client, gate, y):
    gate.open()
    check_transposed(client, y, SHAPE)


def test_a_block_of_the_readers_own_that_moved(client, gate):
    """It is a reference as well: the task is sent again, with the block's new holder."""
    reader, *_, second_holder = addresses(client)
    x = slabs(client, SHAPE, addresses(client)[:3])
    rows = start(client, gate, x, reader)
    replicate(client, x, 0, [reader, second_holder])
    drop(client, reader, x, 0)
    wait_until(lambda: holders(client, x, 0) == {second_holder})
    finish(client, gate, rows)


@pytest.mark.parametrize("replicated", ["before", "later", "never"])
def test_a_block_that_its_holder_drops(client, gate, replicated):
    """It has another holder then, or Dask computes it again."""
    reader, holder, _, second_holder = addresses(client)
    x = slabs(client, SHAPE, addresses(client)[:3])
    assert holders(client, x, 1) == {holder}
    if replicated == "before":
        replicate(client, x, 1, [holder, second_holder])
    y = start(client, gate, x, reader)
    if replicated == "later":
        replicate(client, x, 1, [holder, second_holder])
    drop(client, holder, x, 1)
    finish(client, gate, y)
    if replicated != "never":
        assert second_holder in read_from(client, reader)
    if replicated == "before":
        assert holder not in read_from(client, reader)


def test_a_holder_that_is_retired(client, gate):
    reader, holder, *_ = addresses(client)
    x = slabs(client, SHAPE, addresses(client)[:3])
    y = start(client, gate, x, reader)
    client.retire_workers([holder])
    assert holder not in addresses(client)
    finish(client, gate, y)
    assert holder not in read_from(client, reader)
