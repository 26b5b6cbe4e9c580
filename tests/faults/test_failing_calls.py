"""Each call of the system, and each RPC, fails once: the result is right, or the error is named."""

from __future__ import annotations

import errno
import itertools
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.errors import P2PError
from dask_p2p.task import PLUGIN_NAME
from tests.faults.support import BOUND_S, assert_nothing_is_held, cluster_of

pytestmark = pytest.mark.filterwarnings("ignore::dask_p2p.errors.P2PWarning")

SHAPE = (24, 16)
#: What the package calls, as (its module, name there, function).
CALLS = [
    *(("table", "os", name) for name in ("open", "pwrite", "posix_fallocate")),
    ("table", "fcntl", "fcntl"),
    ("table", "mmap", "mmap"),
    ("same_host", "os", "getpid"),
    ("process_memory", None, "_read_runs"),
    ("buffers", "np", "empty"),
    ("worker", "DaskWorkerContext", "call"),
    ("worker", "DaskWorkerContext", "block"),
]
ERRORS = [OSError(errno.EMFILE, "Too many open files"), MemoryError("nothing left")]


@pytest.fixture(scope="module")
def client():
    with cluster_of(2) as client:
        yield client


def fail_once(module, name, function, number, error, dask_worker=None):
    """Have the n-th of these calls fail; return what takes that back."""
    module = __import__(f"dask_p2p.{module}", fromlist=["x"])
    owner = module if name is None else getattr(module, name)
    real, counter = getattr(owner, function), itertools.count(1)

    def failing(*args, **kwargs):
        if next(counter) == number:
            raise error
        return real(*args, **kwargs)

    if name in ("os", "fcntl", "np"):  # as this module sees it, and nobody else
        names = {key: getattr(owner, key) for key in dir(owner)}
        setattr(module, name, SimpleNamespace(**names | {function: failing}))
    else:
        setattr(owner, function, failing)
    dask_worker.p2p_undo = lambda: (
        setattr(module, name, owner)
        if name in ("os", "fcntl", "np")
        else setattr(owner, function, real)
    )


def undo(dask_worker):
    """Take it back, and what was learnt of transports that failed."""
    dask_worker.p2p_undo()
    router = dask_worker.plugins[PLUGIN_NAME].context.router
    for holder in {holder for holder, _ in router.failures}:
        router.on_worker_left(holder)


@pytest.mark.parametrize("order", [["cma"], ["comm"]], ids=lambda order: order[0])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}.{call[2]}")
def test_a_call_that_fails(client, call, order):
    module = call[0] if call[0] == "worker" else f"transports.{call[0]}"
    if order == ["comm"] and call[0] != "worker":
        pytest.skip("comm does not call it")
    x = np.arange(float(np.prod(SHAPE))).reshape(SHAPE)
    errors = ERRORS[:1] if call[2] == "close" else ERRORS  # closing takes no memory
    for error, number in itertools.product(errors, (1, 4)):
        a = client.persist(da.from_array(x + number, chunks=(4, 16), name=False))
        client.run(fail_once, module, *call[1:], number, error)
        try:
            with dask.config.set({"p2p.transports.order": order}):
                y = client.compute(dask_p2p.transpose(a))
            np.testing.assert_array_equal(y.result(timeout=BOUND_S), x.T + number)
        except P2PError:
            pass
        finally:
            client.run(undo)
    del a, y
    assert_nothing_is_held(client)
