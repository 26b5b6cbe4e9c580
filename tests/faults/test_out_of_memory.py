"""Workers that run out of memory, or never have enough: a named error, and then all works again."""

import itertools
import warnings

import dask
import numpy as np
import pytest

import dask_p2p
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import MemoryLimitError, P2PWarning, TransferError
from dask_p2p.transports import buffers
from tests.faults.support import (
    BOUND_S,
    addresses,
    assert_nothing_is_held,
    attempts,
    check_transposed,
    cluster_of,
    expected,
    forget,
    slabs,
)
from tests.transports.loopback import wait_until

SHAPE = (384, 384)
PARTS = {
    "p2p.transports.part-bytes": "16 kiB",
    "p2p.timeouts.request": "3 s",  # after which a holder gives up a reader that takes nothing
    "p2p.attempts": 2,
}
CLUSTER = {"n_workers": 2, "options": PARTS}


ALLOCATIONS = {"kernel": (NUMPY, "empty"), "buffer": (buffers, "allocate")}


def run_out(allocation, number, dask_worker):
    """Let an allocation fail, from the n-th on."""
    owner, name = ALLOCATIONS[allocation]
    dask_worker.allocate = allocate = getattr(owner, name)
    counter = itertools.count(1)

    def fails(*args):
        if next(counter) >= number:
            raise MemoryError(f"no {args}")
        return allocate(*args)

    setattr(owner, name, fails)


def restore_allocation(allocation, dask_worker):
    setattr(*ALLOCATIONS[allocation], dask_worker.allocate)


def lent_bytes(dask_worker):
    ucx = dask_worker.plugins[PLUGIN_NAME].context.router.transports["ucx"]
    return ucx.packed.reserved_bytes


def check(client, x):
    check_transposed(client, dask_p2p.transpose(x), SHAPE)


@pytest.fixture
def x(shared):
    return slabs(shared, SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allocation", "number", "order"),
    [("kernel", 1, ["comm"]), ("buffer", 1, ["ucx"]), ("buffer", 3, ["ucx"])],
    ids=["the output", "a first part", "a later part"],
)
def test_a_reader_runs_out(shared, x, allocation, number, order):
    if order == ["ucx"]:
        pytest.importorskip("ucxx")
    reader, _ = addresses(shared)
    with dask.config.set({"p2p.transports.order": order}):
        check(shared, x)
        y = dask_p2p.transpose(x)[:192]
        # What is idle would do for a few parts.
        shared.run(forget_buffers)
        shared.run(run_out, allocation, number, workers=[reader])
        future = shared.compute(y, workers=[reader])
        with pytest.raises(MemoryLimitError, match=r"out of memory on worker .*no \(") as caught:
            future.result(timeout=BOUND_S)
        assert reader in str(caught.value)
        assert "chunks=" in str(caught.value)
        assert caught.value.needed_bytes > 192 * 384 * 8
        assert shared.run(attempts, workers=[reader])[reader] == {}, "it is not tried again"
        assert_nothing_is_held(shared)
        shared.run(restore_allocation, allocation, workers=[reader])
        forget(shared, future)
        check(shared, x)


def forget_buffers(dask_worker):
    ucx = dask_worker.plugins[PLUGIN_NAME].context.router.transports["ucx"]
    for pool in ucx.buffers.values():
        pool.clear()


def test_a_holder_that_packs_runs_out(shared, x):
    """After as many attempts as there may be the error names it, and why."""
    reader, holder = addresses(shared)
    shared.run(run_out, "kernel", 1, workers=[holder])
    future = shared.compute(dask_p2p.transpose(x)[:192], workers=[reader])
    expected = f"{holder} could not send .*out of memory while packing"
    with pytest.raises(TransferError, match=expected):
        future.result(timeout=BOUND_S)
    shared.run(restore_allocation, "kernel", workers=[holder])
    forget(shared, future)
    check(shared, x)


def test_a_holder_that_runs_out_for_one_transport_is_read_by_another():
    pytest.importorskip("ucxx")

    def texts():
        every = [str(w.message) for w in caught if issubclass(w.category, P2PWarning)]
        return [text for text in every if "out of memory while packing" in text]

    with (
        cluster_of(2, PARTS | {"p2p.transports.order": ["ucx"]}) as client,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("default")
        reader, holder = addresses(client)
        x = slabs(client, SHAPE)
        check(client, x)
        client.run(forget_buffers)
        client.run(run_out, "buffer", 2, workers=[holder])
        future = client.compute(dask_p2p.transpose(x)[:192], workers=[reader])
        np.testing.assert_array_equal(future.result(timeout=BOUND_S), expected(SHAPE).T[:192])
        wait_until(texts)
        assert_nothing_is_held(client)
        wait_until(lambda: set(client.run(lent_bytes).values()) == {0})
        client.run(restore_allocation, "buffer", workers=[holder])
    assert len(texts()) == 1
