"""A peer that always fails: a limited number of attempts, then an error that lists them."""

import re

import numpy as np
import pytest
from distributed.comm import CommClosedError

import dask_p2p
from dask_p2p.errors import TransferError
from tests.faults.support import (
    BOUND_S,
    addresses,
    assert_nothing_is_held,
    expected,
    forget,
    slabs,
    wait_until_forgotten,
)

SHAPE = (32, 32)
ATTEMPTS = 3
IMPATIENT = {"p2p.attempts": ATTEMPTS}
CLUSTER = {"n_workers": 2, "options": IMPATIENT}


@pytest.fixture
def client(shared):
    """Two workers that answer well, before a test and after it."""
    yield shared
    shared.run(recover)
    wait_until_forgotten(shared)


def fail(how, dask_worker):
    """Answer no request for a region well, or only the first one badly; count them."""
    dask_worker.failed_requests = 0
    dask_worker.good_answer = dask_worker.handlers["p2p_comm_read"]

    async def send_reply(**request):
        dask_worker.failed_requests += 1
        if how == "refuses":
            return {"status": "error", "message": f"trouble no. {dask_worker.failed_requests}"}
        if how == "lacks the block once" and dask_worker.failed_requests > 1:
            return await dask_worker.good_answer(**request)
        if how.startswith("lacks the block"):
            return {"status": "missing"}
        if how == "crashes":
            raise RuntimeError(f"trouble no. {dask_worker.failed_requests}")
        raise CommClosedError("on purpose")

    dask_worker.handlers["p2p_comm_read"] = send_reply


def recover(dask_worker):
    """Answer well again; return how many requests were not answered well."""
    if hasattr(dask_worker, "failed_requests"):
        dask_worker.handlers["p2p_comm_read"] = dask_worker.good_answer
        return dask_worker.failed_requests
    return 0


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("refuses", r"could not send block .*: trouble no\. {}"),
        ("lacks the block", "is no longer there"),
        ("crashes", r"trouble no\. {}"),
        ("drops the connection", "cannot be reached"),
    ],
)
def test_a_peer_that_always(client, how, cause):
    reader, holder = addresses(client)
    x = slabs(client, SHAPE)
    client.run(fail, how, workers=[holder])
    failed = re.escape(f"failed {ATTEMPTS} times on {reader}")
    future = client.compute(dask_p2p.transpose(x)[:16], workers=[reader])  # one block of each
    with pytest.raises(TransferError, match=failed) as error:
        future.result(timeout=BOUND_S)
    forget(client, future)
    text = str(error.value)
    for words in (holder, f"block ('{x.name}', 1, 0)", "comm: "):
        assert words in text
    for number in range(1, ATTEMPTS + 1) if "{}" in cause else [1]:
        assert re.search(rf"attempts? {number}\b.*: .*{cause.format(number)}", text)
    assert_nothing_is_held(client)
    assert client.run(recover, workers=[holder])[holder] == ATTEMPTS
    result = client.compute(dask_p2p.transpose(x)).result(timeout=BOUND_S)
    np.testing.assert_array_equal(result, expected(SHAPE).T)


def test_a_block_that_was_missing_once_is_asked_for_again(client):
    reader, holder = addresses(client)
    x = slabs(client, SHAPE)
    client.run(fail, "lacks the block once", workers=[holder])
    y = client.compute(dask_p2p.transpose(x)[:16], workers=[reader])
    np.testing.assert_array_equal(y.result(timeout=BOUND_S), expected(SHAPE).T[:16])
    assert client.run(recover, workers=[holder])[holder] == 2
