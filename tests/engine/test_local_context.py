"""Tasks without the plugin: on a thread scheduler, or on a worker that the plugin has left."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from distributed import Reschedule

from dask_p2p.backends.numpy import NUMPY
from dask_p2p.engine import task as frames
from dask_p2p.engine import task as module
from dask_p2p.engine.context import recorded, where_is
from dask_p2p.engine.remote import BlockRef
from dask_p2p.engine.task import LocalContext, assemble_block, current_worker
from dask_p2p.errors import P2PWarning, TransferError
from dask_p2p.monitoring.records import TaskRecord
from tests.engine.test_assembly import BLOCKS, OPTIONS, PLAN, OutputSpec, X

KEY = ("y", 1, 0)
INDEX = (1, 0)


class Worker:
    def __init__(self, address):
        self.address, self.plugins = address, {}


@pytest.fixture
def on_worker(monkeypatch):
    """Run this thread's tasks on a worker without the plugin."""
    worker = Worker("tcp://a:1")
    monkeypatch.setattr("distributed.get_worker", lambda: worker)
    monkeypatch.setattr(frames, "_drop_soon", lambda exc: None)  # on the worker's event loop
    return worker


def assemble(blocks, missing):
    output = OutputSpec(("x",), X.dtype, "numpy", OPTIONS)
    return assemble_block(KEY, PLAN, INDEX, output, blocks, lambda *of: missing.append(of))


def test_a_thread_scheduler_has_arrays_and_needs_no_plugin():
    missing = []
    block = assemble([BLOCKS["x", *s] for s in PLAN.block(INDEX).sources], missing)
    np.testing.assert_array_equal(block, X.T[3:6])
    assert not missing


def test_a_worker_without_the_plugin_has_arrays_and_requests_it(on_worker):
    missing, sources = [], PLAN.block(INDEX).sources
    block = assemble([BLOCKS["x", *s] for s in sources], missing)
    np.testing.assert_array_equal(block, X.T[3:6])
    assert missing == [(on_worker, [("x", *s) for s in sources])]


@pytest.mark.parametrize("holder", ["tcp://a:1", "tcp://b:1"])
def test_references_of_a_plugin_that_left(on_worker, holder, monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda s: None)
    refs = [BlockRef(("x", *s), (holder,)) for s in PLAN.block(INDEX).sources]
    for _ in range(OPTIONS.attempts - 1):
        with pytest.raises(Reschedule):
            assemble(refs, [])
    with pytest.raises(TransferError, match="plugin was unregistered while the task waited"):
        assemble(refs, [])


def test_each_worker_has_one_context(on_worker):
    worker, context = current_worker()
    assert worker is on_worker
    assert context is current_worker()[1]
    assert where_is(context) == "worker tcp://a:1"
    plugged = object()
    on_worker.plugins[module.PLUGIN_NAME] = SimpleNamespace(context=plugged)
    assert current_worker() == (on_worker, plugged)


def test_nothing_is_recorded_limited_or_reused():
    context = LocalContext()
    assert where_is(context) == "this process"
    made = TaskRecord(KEY, 0.0, 1.0, wanted_bytes=None)
    with recorded(context, KEY, lambda **fields: made):
        assert list(context.running) == [KEY]
    assert not context.running
    assert context.memory_below(2**60, "numpy") is None
    assert context.empty_output((2, 3), np.dtype("f4"), NUMPY.queue()).shape == (2, 3)
    assert context.transport("ucx") is None
    with pytest.warns(P2PWarning, match="text"):
        context.warn("text")
