"""Several concurrent transposes on workers of one thread: none waits for another, all end.

A task that waited for another *task*, on a worker whose only thread is taken, would never end.
"""

from __future__ import annotations

import time

import numpy as np
from distributed import wait

import dask_p2p
from tests.faults.support import (
    BOUND_S,
    addresses,
    assert_nothing_is_held,
    expected,
    one_block_each,
    set_trap,
    source,
)

SHAPE = (48, 48)
PARTS = {"p2p.transports.part-bytes": 256}
CLUSTER = {"n_workers": 3, "options": PARTS}


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
