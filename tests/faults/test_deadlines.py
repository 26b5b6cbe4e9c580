"""Workers that are halted: who reads from them goes another way, or ends in time; others go on."""

import os
import signal
import time

import dask
import numpy as np
import pytest
from distributed import wait

import dask_p2p
from dask_p2p.errors import TransferError
from tests.faults.support import (
    BOUND_S,
    addresses,
    check_transposed,
    expected,
    halted,
    one_block_each,
    pid_of,
    set_trap,
    slabs,
    source,
)
from tests.faults.test_moved_blocks import read_from, replicate

SHAPE = (64, 64)
LARGE = (2048, 2048)  # a holder sends no part of it before a reader asks, or looks out for it
DEADLINE_S = 2.0
SETTINGS = {
    "p2p.timeouts.request": f"{DEADLINE_S} s",
    "p2p.attempts": 2,
    "p2p.transports.part-bytes": "128 kiB",
    "distributed.scheduler.active-memory-manager.start": False,  # it would drop replicas
}
CLUSTER = {"n_workers": 4, "options": SETTINGS}
#: For workers that are well: on a busy machine they too take longer than the deadline.
PATIENT = {"p2p.timeouts.request": "20 s"}

pytestmark = pytest.mark.filterwarnings("ignore::dask_p2p.errors.P2PWarning")


@pytest.fixture(params=["comm", "ucx"])
def client(client, request):
    with dask.config.set({"p2p.transports.order": [request.param]}):
        yield client


@pytest.fixture
def x(client):
    """One block on each worker; each worker has read from all others."""
    x = one_block_each(client, source(SHAPE, (16, 64)), addresses(client))
    with dask.config.set(PATIENT):
        y = dask_p2p.transpose(x)
    read = [
        client.compute(y[16 * row : 16 * row + 16], workers=[worker])
        for row, worker in enumerate(addresses(client))
    ]
    wait([x, *read])
    return x


def check(client, x, chunks=None, shape=SHAPE):
    """All workers can go on."""
    with dask.config.set(PATIENT):
        y = dask_p2p.transpose(x, chunks=chunks)
    check_transposed(client, y, shape)


@pytest.mark.slow
def test_another_holder_is_asked(client, x):
    reader, holder, _, second_holder = addresses(client)
    replicate(client, x, 1, [holder, second_holder])
    with dask.config.set(PATIENT):
        y = client.persist(dask_p2p.transpose(x)[:16], workers=[reader])
    wait(y)
    assert holder in read_from(client, reader), "it is the first that is asked"
    del y
    with halted(client, holder):
        start_s = time.monotonic()
        with dask.config.set({"p2p.timeouts.request": "5 s"}):  # the others answer within it
            y = dask_p2p.transpose(x, chunks=((16, 48), (64,)))[:16]
        result = client.compute(y, workers=[reader]).result(timeout=BOUND_S)
        took_s = time.monotonic() - start_s
        np.testing.assert_array_equal(result, expected(SHAPE).T[:16])
        assert holder not in read_from(client, reader)
    assert 5 <= took_s < BOUND_S / 2, "one deadline"
    check(client, x)


@pytest.mark.slow
def test_others_go_on_and_the_reader_ends_in_time(client, x):
    reader, *free, holder = addresses(client)
    (used,) = dask.config.get("p2p.transports.order")
    z = one_block_each(client, source(SHAPE, (16, 64)) + 1, [reader, *free, reader])
    wait(z)
    with halted(client, holder), dask.config.set(PATIENT):
        waiting = client.compute(dask_p2p.transpose(x)[:16], workers=[reader])
        futures = client.compute(dask_p2p.transpose(z), workers=free)
        np.testing.assert_array_equal(futures.result(timeout=BOUND_S), expected(SHAPE).T + 1)
        assert not waiting.done()
    np.testing.assert_array_equal(waiting.result(timeout=BOUND_S), expected(SHAPE).T[:16])
    with halted(client, holder):
        start_s = time.monotonic()
        late = client.compute(dask_p2p.transpose(x)[:16], workers=[reader])
        with pytest.raises(TransferError, match=f"failed 2 times on {reader}") as caught:
            late.result(timeout=BOUND_S)
        assert time.monotonic() - start_s < BOUND_S / 2  # two deadlines, on a busy machine
    block = f"block ('{x.name}', 3, 0)"
    for words in (block, f"no answer from {holder}", f"{used}: ", "p2p.timeouts"):
        assert words in str(caught.value)
    del late
    check(client, x, (8, -1))


@pytest.mark.slow
def test_the_time_does_not_grow_with_the_blocks_of_a_halted_holder(client):
    reader, holder, *_ = addresses(client)
    x = source(LARGE, (64, 2048))
    x = client.persist(x, workers=[holder], allow_other_workers=True)
    with dask.config.set(PATIENT):
        y = client.persist(dask_p2p.transpose(x)[:512], workers=[reader], allow_other_workers=True)
    wait([x, y])  # routes are known
    del y
    with halted(client, holder):
        start_s = time.monotonic()
        y = client.compute(dask_p2p.transpose(x, chunks=(512, -1))[:512], workers=[reader])
        with pytest.raises(TransferError, match=f"failed 2 times on {reader}.*no answer from"):
            y.result(timeout=BOUND_S)
        assert time.monotonic() - start_s < 32 * DEADLINE_S, "it is not 32 deadlines twice"
    del y
    check(client, x, shape=LARGE)


@pytest.mark.slow
def test_a_holder_that_is_halted_in_the_middle(client):
    reader, holder, *_ = addresses(client)
    x = slabs(client, LARGE)
    pid = pid_of(client, holder)
    client.run(set_trap, "placed", 2, "halt", pid, workers=[reader])
    try:
        start_s = time.monotonic()
        y = client.compute(dask_p2p.transpose(x)[:512], workers=[reader])
        with pytest.raises(TransferError, match=f"failed 2 times on {reader}.*{holder}"):
            y.result(timeout=BOUND_S)
        assert time.monotonic() - start_s < BOUND_S / 2  # two deadlines, on a busy machine
    finally:
        os.kill(pid, signal.SIGCONT)
    del y
    check(client, x, (256, -1), LARGE)
