"""The plugin on one worker: the message that it rewrites, and what it takes off again."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest
from dask.task_spec import TaskRef

import dask_p2p
from dask_p2p.config import options
from dask_p2p.engine.assembly import OutputSpec
from dask_p2p.engine.task import PLUGIN_NAME, AssembleTask, Blocks, WaitTask, assemble_block
from dask_p2p.monitoring.metrics import DEVICE_METRIC
from dask_p2p.plans import redistribution
from dask_p2p.plugins import worker as worker_module
from dask_p2p.plugins.worker import P2PPlugin
from tests.plugins.test_context import DeafWorker
from tests.support import in_process
from tests.transports.loopback import true_later


def rewritten(who_has, folder, task=None):
    """Return a message as it was sent, and as Dask gets it on a worker "a" that holds "here"."""
    task = task or AssembleTask("y", assemble_block, "y", None, (0, 0), None, Blocks(*who_has))
    sent = {"who_has": who_has, "nbytes": dict.fromkeys(who_has, 8), "run_spec": task, "key": 1}
    messages = []

    async def main():
        worker = DeafWorker()
        worker.address, worker.data = "a", {"here": None}
        worker.handlers, worker.metrics, worker.plugins = {}, {}, {}
        worker.local_directory = folder
        worker.stream_handlers = {
            "compute-task": lambda **message: messages.append(message),
            "remove-worker": None,
        }
        plugin = P2PPlugin(options())
        plugin.setup(worker)
        worker.stream_handlers["compute-task"](**sent)
        await plugin.teardown(worker)

    asyncio.run(main())
    return sent, messages[0]


def test_a_task_that_only_waits_is_given_no_block(tmp_path):
    who_has = {"here": ("a",), "there": ("b",), "read": ("a",)}
    task = WaitTask("y", print, Blocks("here", "there"), TaskRef("read"))
    _, message = rewritten(who_has, tmp_path, task)
    assert message["who_has"] == {"read": ("a",)}
    assert message["run_spec"].dependencies == {"read"}


def test_what_cannot_be_replaced_is_left_alone(tmp_path):
    sent, message = rewritten({"said-to-be-here": ("a",), "nowhere": ()}, tmp_path)
    assert message == sent


async def test_holders_that_a_message_names_are_in_the_cluster():
    """Again perhaps: a new worker may have the address of one that left."""
    plan = redistribution(((2, 2), (4,)), (1, 0), ((4,), (4,)))
    output = OutputSpec(("x",), np.dtype("f8"), "numpy", options())
    keys = [("x", 0, 0), ("x", 1, 0)]
    named_holders, sent = [], []

    async with in_process(1) as (cluster, _):
        (worker,) = cluster.workers.values()
        worker.stream_handlers["compute-task"] = lambda **message: sent.append(message)
        await worker.plugin_add(P2PPlugin(), catch_errors=False)
        worker.plugins[PLUGIN_NAME].context.on_workers_named = named_holders.extend
        worker.data[keys[0]] = np.ones((2, 4))
        own_address = worker.address
        worker.stream_handlers["compute-task"](
            run_spec=AssembleTask("y", assemble_block, "y", plan, (0, 0), output, Blocks(*keys)),
            who_has={keys[0]: [own_address, "b"], keys[1]: ["b", "c"]},
            nbytes=dict.fromkeys(keys, 64),
        )
    assert set(named_holders) == {own_address, "b", "c"}
    assert [message["who_has"] for message in sent] == [{}]
    assert sent[0]["run_spec"].dependencies == set(), "both are given as references"


async def test_a_block_that_dask_spills_is_free_at_once():
    """Though it was published: Dask looks at its memory right after, and would spill the next."""

    async with in_process(1, memory_limit="1 GB") as (cluster, _):
        (worker,) = cluster.workers.values()
        await worker.plugin_add(P2PPlugin(), catch_errors=False)
        context = worker.plugins[PLUGIN_NAME].context
        directory = context.router.transports["cma"].directory
        key = ("x", 0)
        worker.data[key] = np.ones((4, 4))
        reference = weakref.ref(worker.data[key])
        context.publish({key: worker.data[key]}, "numpy", options())
        assert key in directory.published
        metric = worker.metrics["dask-p2p-leased-bytes"]
        assert metric(worker) == 4 * 4 * 8
        worker.data.evict()
        assert key not in directory.published
        assert metric(worker) == 0
        assert reference() is None
        await worker.plugin_remove(name=PLUGIN_NAME)
        assert worker.data.fast_to_slow_callbacks == []


async def test_full_collections_of_worker_processes_pass_over_modules(monkeypatch):
    """Those of a user's process, which may hold any objects, do not."""
    frozen = []
    async with in_process(1) as (cluster, _):
        (worker,) = cluster.workers.values()
        monkeypatch.setattr(gc, "freeze", lambda: frozen.append(worker.nanny))
        for worker.nanny in (None, "tcp://there"):
            await worker.plugin_add(P2PPlugin(), catch_errors=False)
            await true_later(lambda: frozen or worker.nanny is None)
            await worker.plugin_remove(name=PLUGIN_NAME)
        worker.nanny = None
    assert frozen == ["tcp://there"]


async def test_an_error_of_the_plugin_keeps_nothing_from_dask():
    """Neither that a worker left, nor the rest of the plugin's end."""

    async with in_process(1) as (cluster, client):
        (worker,) = cluster.workers.values()
        events = []
        worker.stream_handlers["remove-worker"] = lambda **message: events.append(message)
        await dask_p2p.register(client)
        context = worker.plugins[PLUGIN_NAME].context

        def fail(*args):
            raise RuntimeError("trouble")

        async def fail_to_close():
            fail()

        context.router.on_worker_left = fail
        message = {"worker": "tcp://gone", "stimulus_id": "test"}
        with pytest.raises(RuntimeError, match="trouble"):
            worker.stream_handlers["remove-worker"](**message)
        assert events == [message]
        with pytest.raises(ConnectionAbortedError, match="left the cluster"):
            await context.call("tcp://gone", "identity")
        transports = context.router.transports
        closed = [transport for transport in transports.values() if transport.name != "ucx"]
        transports["ucx"].close = fail_to_close
        reply = await worker.plugin_remove(name=PLUGIN_NAME)
        assert reply["exception_text"] == "RuntimeError('trouble')"
        assert all(transport.is_closed for transport in closed)
        with pytest.raises(RuntimeError, match="after shutdown"):
            await context.offload(int)
        assert not [op for op in worker.handlers if op.startswith("p2p_")]


async def test_heartbeats_go_on_while_the_plugin_comes_and_goes():
    """On GPU workers some of Dask's own metrics take a while."""
    changed = asyncio.Event()

    async def slow(worker):
        await changed.wait()
        return 1

    async with in_process(1) as (cluster, _):
        (worker,) = cluster.workers.values()
        worker.metrics = {"slow": slow, "last": lambda worker: 2}
        for change in (
            lambda: worker.plugin_add(P2PPlugin(), catch_errors=False),
            lambda: worker.plugin_remove(name=PLUGIN_NAME),
        ):
            changed.clear()
            metrics = asyncio.ensure_future(worker.get_metrics())
            await asyncio.sleep(0)  # now it waits for the slow one
            await change()
            changed.set()
            assert (await metrics)["last"] == 2
        assert [*worker.metrics] == ["slow", "last"]


async def test_the_thread_that_unpickles_messages_imports_the_package_of_arrays(monkeypatch):
    """Another thread would import CuPy at the same time: both would find it half made."""
    threads = {}
    warm = threading.Event()

    class OnDevice:
        on_device = True

        @property
        def module(self):
            threads["import"] = threading.get_ident()

        def warm_up(self):
            threads["kernels"] = threading.get_ident()
            warm.set()

        def device_bytes(self):
            return 32

    monkeypatch.setattr(worker_module, "worker_backend", OnDevice)

    async with in_process(1) as (cluster, _):
        (worker,) = cluster.workers.values()
        await worker.plugin_add(P2PPlugin(), catch_errors=False)
        assert await asyncio.to_thread(warm.wait, 10)
        assert threads["import"] == threading.get_ident() != threads["kernels"]
        await true_later(lambda: worker.metrics[DEVICE_METRIC](worker) == 32)
