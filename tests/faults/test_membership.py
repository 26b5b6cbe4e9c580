"""Workers that are retired, paused, replaced, added and taken away while transposes run."""

import threading

import pytest
from distributed import Status, futures_of, wait

import dask_p2p
from dask_p2p.plugins.registration import workers_of
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
NEVER_BY_MEMORY = {"distributed.worker.memory.pause": False}  # the monitor would undo the tests'
CLUSTER = {"n_workers": 4, "options": NEVER_BY_MEMORY}


def set_status(status, dask_worker):
    dask_worker.status = status


def started(client, gate):
    """Start a transpose; the first worker waits in the middle of its task."""
    workers = addresses(client)[:3]
    x = slabs(client, SHAPE, workers)
    client.run(set_trap, "placed", 1, "wait", gate.path, workers=workers[:1])
    y = one_block_each(client, dask_p2p.transpose(x), workers)
    gate.wait_until_reached()
    wait_until(lambda: sum(row.done() for row in futures_of(y)) == 2, BOUND_S)
    return x, y


def status_of(client, worker):
    return workers_of(client).get(worker, {}).get("status")


@pytest.mark.parametrize("who", [0, 1], ids=["reader", "holder"])
def test_a_worker_is_paused_in_the_middle(client, gate, who):
    x, y = started(client, gate)
    paused = addresses(client)[who]
    client.run(set_status, Status.paused, workers=[paused])
    gate.open()
    check_transposed(client, y, SHAPE)
    # It starts no tasks, but others read the blocks that it holds.
    check_transposed(client, dask_p2p.transpose(x, chunks=(12, -1)), SHAPE)
    assert status_of(client, paused) == "paused"
    client.run(set_status, Status.running, workers=[paused])
    check_transposed(client, dask_p2p.transpose(x, chunks=(6, -1)), SHAPE)


def test_scaled_down_and_up(client, gate):
    x, y = started(client, gate)
    client.cluster.scale(5)
    client.wait_for_workers(5, timeout=BOUND_S)
    gate.open()
    wait(y)
    client.cluster.scale(2)
    z = client.persist(dask_p2p.transpose(x, chunks=(3, -1)))
    wait_until(lambda: len(addresses(client)) == 2, BOUND_S)
    check_transposed(client, y, SHAPE)
    check_transposed(client, z, SHAPE)
    client.cluster.scale(4)
    check_transposed(client, dask_p2p.transpose(x, chunks=(4, -1)), SHAPE)


def test_a_reader_is_retired_in_the_middle_of_its_task(client, gate):
    _, y = started(client, gate)
    reader = addresses(client)[0]
    retiring = threading.Thread(target=client.retire_workers, args=([reader],))
    retiring.start()
    try:
        wait_until(lambda: status_of(client, reader) != "running", BOUND_S)
        gate.open()
        check_transposed(client, y, SHAPE)
    finally:
        retiring.join()
    assert reader not in addresses(client)
