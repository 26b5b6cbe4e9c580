"""Each call of the system, and each RPC, fails once: the result is right, or the error is named."""

import errno
import itertools
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import P2PError
from tests.faults.support import BOUND_S, addresses, assert_nothing_is_held
from tests.support import persisted

pytestmark = pytest.mark.filterwarnings("ignore::dask_p2p.errors.P2PWarning")

SHAPE = (24, 16)
#: What the package calls: its module, the name there, and the function.
IN_PLACE = [
    ("transports.leases", "os", "open"),
    ("transports.leases", "os", "pread"),
    ("transports.leases", "os", "pwrite"),
    ("transports.leases", "fcntl", "fcntl"),
    ("transports.process_memory", "os", "getuid"),
    ("transports.process_memory", "process_memory", "read"),
    ("transports.buffers", "Buffers", "take"),
]
BY_ALL = [
    ("plugins.context", "DaskWorkerContext", "call"),
    ("plugins.context", "DaskWorkerContext", "block"),
]
CALLS = [("cma", *call) for call in IN_PLACE] + [
    (transport, *call) for transport in ("cma", "comm") for call in BY_ALL
]
CLUSTER = {"n_workers": 2}
ERRORS = [OSError(errno.EMFILE, "Too many open files"), MemoryError("nothing left")]


def fail_once(module, name, function, number, error, dask_worker):
    """Make the n-th of these calls fail on a worker."""
    module = import_module(f"dask_p2p.{module}")
    owner = module if module.__name__.endswith(name) else getattr(module, name)
    real, counter = getattr(owner, function), itertools.count(1)
    dask_worker.p2p_failed = 0

    def failing(*args, **kwargs):
        if next(counter) == number:
            dask_worker.p2p_failed += 1
            raise error
        return real(*args, **kwargs)

    patch = dask_worker.p2p_patch = pytest.MonkeyPatch()
    if name in ("os", "fcntl"):  # as this module sees it, and no other one
        names = {key: getattr(owner, key) for key in dir(owner)}
        patch.setattr(module, name, SimpleNamespace(**names | {function: failing}))
    else:
        patch.setattr(owner, function, failing)


def undo(gone_addresses, dask_worker):
    """Undo it, and forget failures of other workers; return the number of calls that failed."""
    dask_worker.p2p_patch.undo()
    for address in gone_addresses:
        dask_worker.plugins[PLUGIN_NAME].context.router.on_worker_left(address)
    return dask_worker.p2p_failed


@pytest.mark.parametrize("call", CALLS, ids=".".join)
def test_a_call_that_fails(shared, call):
    order, *call = call
    x = np.arange(float(np.prod(SHAPE))).reshape(SHAPE)
    failed = 0
    for error, number in itertools.product(ERRORS, (1, 4)):
        a = persisted(shared, da.from_array(x + number, chunks=(4, 16), name=False))
        shared.run(fail_once, *call, number, error)
        try:
            with suppress(P2PError), dask.config.set({"p2p.transports.order": [order]}):
                y = shared.compute(dask_p2p.transpose(a))
                np.testing.assert_array_equal(y.result(timeout=BOUND_S), x.T + number)
        finally:
            failed += sum(shared.run(undo, addresses(shared)).values())
    assert failed, "it was not called at all"
    del a, y
    assert_nothing_is_held(shared)
