"""``pinned`` between the workers of a cluster, with NumPy blocks."""

import gc
import os
import signal

import dask
import numpy as np
import pytest
from distributed import wait

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.transports.buffers import FILE_NAME, Segment
from tests.faults.support import (
    BOUND_S,
    addresses,
    as_new,
    cluster_of,
    count_resources,
    expected,
    one_block_each,
    set_trap,
    source,
)
from tests.support import persisted, spread, used
from tests.transports.loopback import wait_until

ORDER = {"p2p.transports.order": ["pinned"], "p2p.transports.part-bytes": "64 kiB"}


@pytest.fixture(autouse=True)
def _by_pinned():
    with dask.config.set(ORDER):
        yield


def own_segments(dask_worker):
    """Inodes of the segments that this worker has made."""
    names = [segment.name for segment in gc.get_objects() if isinstance(segment, Segment)]
    return {name.inode for name in names if name.pid == os.getpid()}


def mapped_segments(dask_worker):
    """Inodes of all segments that this worker has mapped, its own included."""
    with open("/proc/self/maps") as maps:
        return {int(line.split()[4]) for line in maps if f"/memfd:{FILE_NAME}" in line}


def test_values(client):
    a = spread(client, source((1500, 1100), (200, 1100)))
    for _ in range(2):
        y = persisted(client, dask_p2p.transpose(a))
        assert used(client, y) == {"pinned"}
        np.testing.assert_array_equal(y.compute(), expected((1500, 1100)).T)
        del y
    # Seven of a part each, and one by which workers have met.
    owned = client.run(own_segments)
    assert all(len(names) <= 8 for names in owned.values()), owned


@pytest.fixture(scope="module")
def mortal():
    """Workers that tests kill, one after another."""
    with cluster_of(3, ORDER | {"p2p.timeouts.request": "5s"}) as client:
        yield client


@pytest.mark.parametrize("moment", ["serving", "placed"])
def test_a_worker_that_is_killed_leaves_nothing(mortal, moment):
    """While it packs for another one, and while it reads."""
    x = source((1200, 900), (400, 900))
    with as_new(mortal, 3) as client, dask.config.set(ORDER):
        workers = victim, *survivors = addresses(client)
        a = one_block_each(client, x, workers)
        wait(a)
        persisted(client, dask_p2p.transpose(a, chunks=(100, -1)))
        of_victim = client.run(own_segments, workers=[victim])[victim]
        assert of_victim & client.run(mapped_segments)[survivors[0]]
        if moment == "serving":
            client.run(die_while_packing, workers=[victim])
        else:
            client.run(set_trap, "placed", 2, "kill", workers=[victim])
        y = one_block_each(client, dask_p2p.transpose(a), workers)
        result = client.compute(y).result(timeout=BOUND_S)
        np.testing.assert_array_equal(result, expected((1200, 900)).T)
        assert victim not in addresses(client)
        wait_until(lambda: not of_victim & set().union(*client.run(mapped_segments).values()))
        assert all(counts["pinned.requested"] == 0 for counts in count_resources(client).values())


def die_while_packing(dask_worker):
    pinned = dask_worker.plugins[PLUGIN_NAME].context.router.transports["pinned"]
    pinned.pack_all = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
