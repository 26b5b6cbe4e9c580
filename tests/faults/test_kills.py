"""Workers that are killed, or closed, at moments that the tests choose.

Three workers hold one row slab each and make one row slab each of the transpose, every remote
region in four parts. So each worker serves eight parts, and writes eight: four in stage 1 and four
in stage 2. A fourth worker takes no part. By cma there are no requests, but each worker publishes
its block.
"""

import dask
import numpy as np
import pytest
from distributed import wait

import dask_p2p
from tests.faults.support import (
    BOUND_S,
    addresses,
    assert_nothing_is_held,
    check_transposed,
    expected,
    kill,
    pid_of,
    set_trap,
    slabs,
    source,
    wait_until_gone,
)

SHAPE = (48, 48)
PARTS = {"p2p.transports.part-bytes": 16 * 16 * 8 // 4}
CLUSTER = {"n_workers": 4, "options": PARTS}

PUBLISHES = "holder publishes its block"
MOMENTS = {
    "holder asked for the first part": ("asked", 1),
    "holder asked for the last part of one reader or the first of the other": ("asked", 5),
    "holder asked for the last part": ("asked", 8),
    PUBLISHES: ("publishing", 1),
    "reader before its first pull": ("started", 1),
    "reader has the first part of stage 1": ("placed", 1),
    "reader has the first part of stage 2": ("placed", 5),
    "reader has all parts": ("complete", 1),
}
# The same code handles a worker that closes and one that is killed. The code of readers is the same
# for all transports.
CASES = [
    *(("comm", name, "kill") for name in MOMENTS if name != PUBLISHES),
    ("comm", "holder asked for the first part", "close"),
    ("cma", PUBLISHES, "kill"),
    ("cma", PUBLISHES, "close"),
    ("cma", "reader has the first part of stage 1", "kill"),
]


def transposed_while(client, *trap, victim=None):
    """Transpose on three of four workers. The second one has a trap, by default for itself."""
    workers = addresses(client)[:3]
    x = slabs(client, SHAPE, workers)
    client.run(set_trap, *trap, workers=[workers[1]])
    y = client.persist(dask_p2p.transpose(x), workers=workers, allow_other_workers=True)
    np.testing.assert_array_equal(client.compute(y).result(timeout=BOUND_S), expected(SHAPE).T)
    wait_until_gone(client, victim or workers[1])
    # Also if it was in memory when it was lost.
    check_transposed(client, y, SHAPE)
    np.testing.assert_array_equal(client.compute(x).result(timeout=BOUND_S), expected(SHAPE))
    assert_nothing_is_held(client)


@pytest.mark.parametrize(("transport", "moment", "how"), CASES)
def test_a_holder_or_a_reader(client, transport, moment, how):
    with dask.config.set({"p2p.transports.order": [transport]}):
        transposed_while(client, *MOMENTS[moment], how)


@pytest.mark.parametrize("number", [1, 5])
def test_a_bystander(client, number):
    *_, bystander = addresses(client)
    pid = pid_of(client, bystander)
    transposed_while(client, "asked", number, "kill", pid, victim=bystander)


@pytest.mark.parametrize("transport", ["comm", "cma"])
@pytest.mark.parametrize("how", ["kill", "close"])
def test_after_the_result_is_done(client, how, transport):
    with dask.config.set({"p2p.transports.order": [transport]}):
        x = client.persist(source(SHAPE, (12, 48)))
        y = client.persist(dask_p2p.transpose(x))
        wait(y)
        lost = {key: who[0] for key, who in client.who_has(y).items()}
        victim = next(iter(lost.values()))
        if how == "kill":
            kill(client, victim)
        else:
            client.retire_workers([victim])
            wait_until_gone(client, victim)
        check_transposed(client, y, SHAPE)


@pytest.mark.parametrize("when", ["a group is assembled", "blocks are handed out"])
def test_a_worker_that_makes_groups_of_blocks(client, when):
    with dask.config.set({"p2p.groups": 4}):
        x = client.persist(source(SHAPE, (4, 48)))
        wait(x)
        y = dask_p2p.transpose(x)
        assert 4 in map(len, y.dask.layers.values())
        victim = addresses(client)[1]
        if when == "a group is assembled":
            # If Dask chooses freely, a worker on a busy machine may make none of the groups.
            client.run(set_trap, "placed", 1, "kill", workers=[victim])
            y = client.persist(y, workers=[victim], allow_other_workers=True)
        else:
            y = client.persist(y)
            wait(y)
            kill(client, victim)
        wait_until_gone(client, victim)
        check_transposed(client, y, SHAPE)
