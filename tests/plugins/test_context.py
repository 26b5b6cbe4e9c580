"""What transports and tasks get of the worker that they are on."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import dask
import numpy as np
import pytest

from dask_p2p.config import options, transport_classes
from dask_p2p.monitoring.records import TaskRecord
from dask_p2p.plugins import context as context_module
from dask_p2p.plugins.context import DaskWorkerContext
from tests.support import BOUND_S, ran
from tests.transports.loopback import true_later


class DeafWorker:
    """A worker whose calls are never answered."""

    address = "tcp://here"
    local_directory = "/nowhere"
    nanny = None
    state = SimpleNamespace(tasks={})

    def __init__(self):
        self.data = {}
        self.security = SimpleNamespace(require_encryption=False)
        self.loop = SimpleNamespace(asyncio_loop=asyncio.get_running_loop())
        self.called = []

    def rpc(self, address):
        async def op(**kwargs):
            self.called.append(address)
            await asyncio.sleep(BOUND_S)

        return SimpleNamespace(op=op)


async def test_calls_to_a_worker_that_has_left_are_refused():
    worker = DeafWorker()
    context = DaskWorkerContext(worker, options())
    context.on_worker_left("a")
    with pytest.raises(ConnectionAbortedError, match="left the cluster"):
        await asyncio.wait_for(context.call("a", "op"), BOUND_S)
    assert worker.called == [], "it was not even tried"
    context.on_workers_named(["a"])
    call = asyncio.ensure_future(context.call("a", "op"))
    await true_later(lambda: worker.called == ["a"])
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    context.close()


async def test_the_limit_of_a_worker_is_that_of_its_tasks():
    worker = DeafWorker()
    worker.memory_manager = SimpleNamespace(memory_limit=100)
    assert DaskWorkerContext(worker, options()).memory_below(101, "numpy") == 100


async def test_what_blocks_does_not_block_the_event_loop():
    context = DaskWorkerContext(DeafWorker(), options())
    event = threading.Event()
    context.loop.call_later(0.05, event.set)
    assert await context.offload(event.wait, BOUND_S), "the loop could not set it"
    threads = [thread for thread in threading.enumerate() if "p2p-serve" in thread.name]
    context.close()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("kind", "order", "expected"),
    [
        ("cupy", "auto", ["ipc", "ucx", "pinned", "comm"]),
        ("numpy", "auto", ["cma", "comm"]),
        ("cupy", ["comm"], ["comm"]),
        ("numpy", ["comm"], ["comm"]),
    ],
)
async def test_what_others_are_about_to_read_is_published_unless_that_is_off(kind, order, expected):
    """One setting turns it off: nothing is published by itself, nothing is mapped."""
    published = []
    transports = {
        name: SimpleNamespace(
            name=name,
            publish=lambda blocks, name=name: published.append((name, blocks)),
            obstacle=lambda holder, kind, dtype: None,
            probe=lambda holder, kind: None,
        )
        for name in transport_classes()
    }
    data = {("x", 0): np.ones(3), ("x", 1): np.ones(2), ("y", 0): np.ones(3), ("x", 2): "odd"}
    worker = DeafWorker()
    worker.data.update(data)
    context = DaskWorkerContext(worker, options())
    context.router.transports = transports
    with dask.config.set({"p2p.transports.order": order}):
        chosen = options()
    own_blocks = {("x", 0): data["x", 0]}
    context.publish(own_blocks, kind, chosen)
    assert [name for name, _ in published] == expected
    assert all(blocks.keys() == {("x", 0), ("x", 1)} for _, blocks in published), (
        "also what others will read"
    )
    published.clear()
    context.publish(own_blocks, kind, chosen)
    assert all(blocks == own_blocks for _, blocks in published), "which is looked for once"
    for number in range(3):
        context.on_released(("x", number))
        published.clear()
        context.publish(own_blocks, kind, chosen)
        anew = {("x", 0), ("x", 1)} if number == 2 else own_blocks.keys()
        assert all(blocks.keys() == anew for _, blocks in published), (
            "once more if all have been made anew"
        )
    ways = context.router.find_routes(["b"], kind, np.dtype("f8"), chosen.order(kind))
    assert [way.transport.name for way in ways] == expected


async def test_what_is_remembered_of_tasks_is_bounded(monkeypatch):
    monkeypatch.setattr("dask_p2p.engine.context.MOST_TASKS", 3)
    context = DaskWorkerContext(DeafWorker(), options())
    for key in range(10):
        assert context.count_attempt(key, "why") == (1, "attempt 1: why")
    assert list(context.failed) == [7, 8, 9]
    assert context.count_attempt(7, "again") == (2, "attempt 1: why; attempt 2: again")
    assert list(context.failed) == [8, 9, 7]
    context.record(TaskRecord(9, 0.0, 1.0, error="why"))
    assert list(context.failed) == [8, 9, 7], "it has not ended"
    context.record(TaskRecord(7, 0.0, 1.0))
    context.forget_attempts(8)
    assert list(context.failed) == [9]
    for key in range(12_000):
        context.record(TaskRecord(key, 0.0, 1.0))
    assert [record.key for record in context.records] == [*range(2000, 12_000)]
    assert context.failed == {}


@pytest.mark.parametrize(
    ("address", "required", "expected"),
    [
        ("tcp://here", False, False),
        ("tcp://here", None, False),
        ("tcp://here", True, True),
        ("tls://here", False, True),
        ("wss://here", None, True),
    ],
)
async def test_where_nothing_may_leave_unencrypted(address, required, expected):
    worker = DeafWorker()
    worker.address, worker.security.require_encryption = address, required
    assert DaskWorkerContext(worker, options()).encrypted_only is expected


class ForgottenMeanwhile(dict):
    """Of which another thread drops something whenever one looks for the oldest."""

    def __iter__(self):
        iterator = super().__iter__()
        self.pop(max(self.keys()), None)
        return iterator


async def test_blocks_that_are_read_from_disk_may_be_forgotten_meanwhile(monkeypatch):
    def not_in_memory(data, key):
        raise KeyError(key)

    monkeypatch.setattr(context_module, "find_in_memory", not_in_memory)
    monkeypatch.setattr(context_module, "read_spilled", lambda data, key: key)
    context = DaskWorkerContext(DeafWorker(), options())
    context.from_disk = ForgottenMeanwhile()
    assert [context.block(key) for key in "abcd"] == [*"abcd"]
    assert len(context.from_disk) <= 2


PROGRAM = """
import dask.array as da
from distributed import Client
import dask_p2p

client = Client(processes=False, dashboard_address=":0")
x = da.ones((4, 4), chunks=2)
assert dask_p2p.rechunk(x, (4, 1)).sum().compute() == 16
"""


def test_a_program_that_does_not_close_its_client_ends_without_errors():
    """Its workers close after the end of the main thread, when no thread can start."""
    process = ran("-c", PROGRAM)
    assert process.returncode == 0
    assert "Traceback" not in process.stderr
