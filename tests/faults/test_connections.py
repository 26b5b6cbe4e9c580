"""Connections that drop, delay, duplicate and reorder what they carry.

A transpose always ends within its bound: with right values, or with an error that names the block
that could not be brought, and its holder.
"""

import time
from collections import Counter

import dask
import numpy as np
import pytest

import dask_p2p
from dask_p2p.errors import TransferError
from tests.faults import faulty
from tests.faults.support import BOUND_S, addresses, assert_nothing_is_held, expected, forget, slabs

SHAPE = (48, 60)
CLUSTER = {"n_workers": 3}
DEADLINE_S = 1.5  # those that are well answer within it, on a busy machine too
SETTINGS = {
    "p2p.timeouts.request": f"{DEADLINE_S} s",
    "p2p.attempts": 6,
    # Several parts for each region, so that faults can come between them.
    "p2p.transports.part-bytes": "512 B",
}
BY_UCX = {"p2p.transports.order": ["ucx"]}
POSITIONS = (1, pytest.param(2, marks=pytest.mark.long), pytest.param(7, marks=pytest.mark.slow))
MARKS_OF_SEEDS = [], [pytest.mark.slow], *[[pytest.mark.long]] * 4
SEEDS = [pytest.param(seed, marks=marks) for seed, marks in enumerate(MARKS_OF_SEEDS)]

pytestmark = pytest.mark.filterwarnings("ignore::dask_p2p.errors.P2PWarning")


@pytest.fixture(params=["comm", "ucx"])
def transport(request):
    with dask.config.set(SETTINGS | {"p2p.transports.order": [request.param]}):
        yield request.param


@pytest.fixture
def x(shared):
    return slabs(shared, SHAPE)


@pytest.fixture(scope="module", autouse=True)
def connected(shared):
    """Run once without deadlines: the first run takes long, above all for ucx's context."""
    x = slabs(shared, SHAPE)
    for transport in ("comm", "ucx"):
        with dask.config.set({"p2p.transports.order": [transport]}):
            dask_p2p.transpose(x).compute()


def transposed(client, x, faults, *, seed=0, workers=None, **when):
    """Transpose with faults; return the result or the error, and the number of each fault."""
    client.run(faulty.install, seed, faults, DEADLINE_S, workers=workers, **when)
    start_s = time.monotonic()
    future = client.compute(dask_p2p.transpose(x))
    try:
        end = future.result(timeout=BOUND_S)
    except TransferError as exc:
        end = exc
    took_s = time.monotonic() - start_s
    forget(client, future)
    counts = sum(map(Counter, client.run(faulty.remove).values()), Counter())
    assert took_s < BOUND_S / 2
    return end, counts


def assert_right(end):
    assert not isinstance(end, TransferError), end
    np.testing.assert_array_equal(end, expected(SHAPE).T)


def assert_named(error, client):
    """The error names the block, its holder, the transport, and the number of attempts."""
    text = str(error)
    assert any(holder in text for holder in addresses(client)), text
    for word in ("block (", "failed 6 times", "comm"):
        assert word in text, text


def check_one_fault(client, x, fault, position, options):
    with dask.config.set(SETTINGS | options):
        end, counts = transposed(client, x, [fault], at=[position])
    assert_right(end)
    assert set(counts) == {fault}
    assert_nothing_is_held(client)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("fault", faulty.ANSWERS)
def test_one_fault_in_answers(shared, x, fault, position):
    """One fault for each worker: there are enough attempts for all of them."""
    check_one_fault(shared, x, fault, position, {})


@pytest.mark.parametrize("fault", faulty.ANSWERS)
def test_one_fault_in_the_answers_of_ucx(shared, x, fault):
    check_one_fault(shared, x, fault, 1, BY_UCX)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("fault", faulty.MESSAGES)
def test_one_fault_in_messages_of_ucx(shared, x, fault, position):
    check_one_fault(shared, x, fault, position, BY_UCX)


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_of_all_kinds(shared, transport, x, seed):
    faults = faulty.ANSWERS + faulty.MESSAGES
    share = (0.1, 0.2, 0.4)[seed % 3]
    counts = {}
    for attempt in range(20):  # threads take turns as they like: at times all goes well
        if counts:
            break
        end, counts = transposed(shared, x, faults, seed=seed + 100 * attempt, share=share)
        if isinstance(end, TransferError):
            assert_named(end, shared)
        else:
            assert_right(end)
    assert counts, "no fault happened"
    assert_nothing_is_held(shared)
    assert_right(transposed(shared, x, [])[0])


@pytest.mark.parametrize("fault", ["drop", "lose"])
def test_connections_that_are_always_faulty(shared, x, fault):
    with dask.config.set(SETTINGS):
        end, counts = transposed(shared, x, [fault])
        assert isinstance(end, TransferError)
        assert_named(end, shared)
        assert counts[fault] >= 6
        assert_nothing_is_held(shared)
        assert_right(transposed(shared, x, [])[0])
