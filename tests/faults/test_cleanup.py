"""Nothing stays behind after a cancellation or a restart; concurrent transposes all end."""

import os
import time
from glob import glob

import numpy as np
from distributed import wait

import dask_p2p
from tests.faults.support import (
    BOUND_S,
    addresses,
    assert_nothing_is_held,
    cluster_of,
    count_resources,
    expected,
    kill,
    one_block_each,
    set_trap,
    slabs,
    source,
    task_count,
)
from tests.support import restart
from tests.transports.loopback import wait_until

SHAPE = (48, 48)
PARTS = {"p2p.transports.part-bytes": 256}
CLUSTER = {"n_workers": 3, "options": PARTS}


def begun(client, gate, x):
    """Start a transpose; all workers wait in the middle of its tasks, and hold something."""
    client.run(set_trap, "placed", 1, "wait", gate.path)
    y = one_block_each(client, dask_p2p.transpose(x), addresses(client))
    gate.wait_until_reached(by=3)
    assert all(counts["comm.opened"] >= 1 for counts in count_resources(client).values())
    return y


def works(client):
    y = dask_p2p.transpose(source(SHAPE, (8, 48)) + 1)
    np.testing.assert_array_equal(client.compute(y).result(timeout=BOUND_S), expected(SHAPE).T + 1)


def folder(dask_worker):
    return dask_worker.local_directory


def directories(client):
    """Folders of the workers' descriptor directories."""
    folders = client.run(folder).values()
    return [directory for path in folders for directory in glob(os.path.join(path, "p2p-*"))]


def test_after_cancelling(client, gate):
    x = slabs(client, SHAPE)
    y = begun(client, gate, x)
    client.cancel([x, y])
    del x, y
    gate.open()
    assert_nothing_is_held(client)
    wait_until(lambda: not any(client.run(lambda dask_worker: len(dask_worker.data)).values()))
    assert task_count(client) == 0
    works(client)


def test_after_a_restart(client, gate):
    x = slabs(client, SHAPE)
    before, folders = set(client.run(os.getpid).values()), directories(client)
    assert len(folders) == 2 * 3  # of ipc, and of cma
    y = begun(client, gate, x)
    gate.open()
    restart(client)
    assert not before & set(client.run(os.getpid).values())
    wait_until(lambda: not any(map(os.path.exists, folders)))
    assert_nothing_is_held(client)
    works(client)
    del y


def test_after_a_workers_end(client):
    works(client)
    folders = directories(client)
    assert len(folders) == 2 * 3  # of ipc, and of cma
    killed, closed, _ = addresses(client)
    (folder_of_closed,) = client.run(folder, workers=[closed]).values()
    client.retire_workers([closed])
    wait_until(lambda: not os.path.exists(folder_of_closed), BOUND_S)
    kill(client, killed)
    works(client)
    assert_nothing_is_held(client)


def test_a_cluster_leaves_no_folder(tmp_path):
    with cluster_of(2, local_directory=str(tmp_path)) as client:
        works(client)
        assert len(directories(client)) == 2 * 2
    wait_until(lambda: not glob(f"{tmp_path}/**/p2p-*", recursive=True))


def test_others_end_while_a_worker_waits_in_the_middle_of_one(client, gate):
    """Its thread is busy, but the others read the blocks that it holds."""
    workers = addresses(client)
    waiting, *free = workers
    xs = [one_block_each(client, source(SHAPE, (16, 48)) + i, workers) for i in range(3)]
    wait(xs)
    client.run(set_trap, "placed", 1, "wait", gate.path, workers=[waiting])
    first = one_block_each(client, dask_p2p.transpose(xs[0]), workers)
    gate.wait_until_reached()
    futures = [
        client.persist(dask_p2p.transpose(x), workers=free, allow_other_workers=False)
        for x in xs[1:]
    ]
    for i, y in enumerate(futures, start=1):
        result = client.compute(y, workers=free).result(timeout=BOUND_S)
        np.testing.assert_array_equal(result, expected(SHAPE).T + i)
    assert not all(future.done() for future in client.futures_of(first))
    gate.open()
    result = client.compute(first).result(timeout=BOUND_S)
    np.testing.assert_array_equal(result, expected(SHAPE).T)
    assert_nothing_is_held(client)


def test_all_at_once_within_a_deadline(client):
    """From nothing, inputs included, each worker with tasks of all of them."""
    xs = [source((60, 40 + i), (6, -1)) for i in range(3)]
    started_s = time.monotonic()
    futures = client.compute([dask_p2p.transpose(x) for x in xs])
    for i, future in enumerate(futures):
        result = future.result(timeout=BOUND_S)
        np.testing.assert_array_equal(result, expected((60, 40 + i)).T)
    assert time.monotonic() - started_s < BOUND_S
    assert_nothing_is_held(client)
