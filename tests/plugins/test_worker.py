"""The plugin on one worker: the message that it rewrites, and what it takes off again."""

import asyncio
import gc
import threading
import warnings
import weakref
from contextlib import asynccontextmanager
from unittest.mock import AsyncMock, Mock

import dask
import dask.array as da
import numpy as np
import pytest
from dask.task_spec import TaskRef
from distributed import wait
from distributed.batched import BatchedSend

import dask_p2p
from dask_p2p import fft
from dask_p2p.config import options
from dask_p2p.engine.assembly import OutputSpec
from dask_p2p.engine.task import PLUGIN_NAME, AssembleTask, Blocks, WaitTask, assemble_block
from dask_p2p.monitoring.metrics import DEVICE_METRIC
from dask_p2p.plans import redistribution
from dask_p2p.plugins import worker as worker_module
from dask_p2p.plugins.dask_internals import StreamFlusher
from dask_p2p.plugins.worker import P2PPlugin
from tests.clock import clocked
from tests.faults.support import expected, source
from tests.plugins.test_context import DeafWorker
from tests.support import in_process, own_client
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
        context.router.on_worker_left = Mock(side_effect=RuntimeError("trouble"))
        message = {"worker": "tcp://gone", "stimulus_id": "test"}
        with pytest.raises(RuntimeError, match="trouble"):
            worker.stream_handlers["remove-worker"](**message)
        assert events == [message]
        with pytest.raises(ConnectionAbortedError, match="left the cluster"):
            await context.call("tcp://gone", "identity")
        transports = context.router.transports
        closed = [transport for transport in transports.values() if transport.name != "ucx"]
        transports["ucx"].close = AsyncMock(side_effect=RuntimeError("trouble"))
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


class Comm:
    """The other end of a stream: what came there."""

    def __init__(self):
        self.received = []

    def closed(self):
        return False

    async def write(self, messages, **kwargs):
        self.received += messages
        return 1


@clocked
async def test_flush_sends_batched_messages():
    first, second = (BatchedSend(interval=3600) for _ in range(2))
    ends = [Comm(), Comm()]
    for stream, end in zip((first, second), ends, strict=True):
        stream.start(end)
        stream.send("begins")  # the pause begins with it
    flusher = StreamFlusher()

    async def flushed():
        await asyncio.sleep(1)
        return [end.received for end in ends]

    assert await flushed() == [["begins"], ["begins"]]
    first.send("waits")
    second.send("waits")
    assert await flushed() == [["begins"], ["begins"]]
    flusher.flush(first, None)  # a worker that has gone has no stream
    first.send("and what comes after")
    sent = ["begins", "waits", "and what comes after"]
    assert await flushed() == [sent, ["begins"]]
    flusher.flush(second)
    flusher.flush(second)
    assert await flushed() == [sent, ["begins", "waits"]]
    second.send("waits again")
    assert await flushed() == [sent, ["begins", "waits"]]


_PAUSE_S, _SHORT_S = 120, 0.002


def stepped(x):
    return dask_p2p.iterate(lambda u: u[1:-1, 1:-1] + 1, x, 1, 1)


@pytest.mark.parametrize("operation", [fft.fft2, stepped])
def test_nobody_waits_for_what_is_next(operation):
    """Layers that follow each other: word of each task comes long before a pause has ended."""
    rows = da.from_array(np.arange(32.0 * 16).reshape(32, 16), chunks=(16, 16))
    with own_client() as client:
        dask_p2p.register(client)
        rows = client.persist(rows)  # else Dask fuses these tasks with the next, and renames them

        def compute():
            y = client.persist(operation(rows))
            wait(y, timeout=_PAUSE_S / 2)
            return y

        first = compute().compute()
        set_intervals(client, _PAUSE_S)
        second = compute()
        set_intervals(client, _SHORT_S)
        np.testing.assert_array_equal(second.compute(), first)


def set_intervals(client, interval_s):
    def on_scheduler(dask_scheduler):
        streams = *dask_scheduler.stream_comms.values(), *dask_scheduler.client_comms.values()
        for stream in streams:
            stream.interval, stream.next_deadline = interval_s, None
            stream.waker.set()

    client.run(lambda dask_worker: setattr(dask_worker.batched_stream, "interval", interval_s))
    client.run_on_scheduler(on_scheduler)


VALIDATE = {"distributed.scheduler.validate": True, "distributed.worker.validate": True}


@asynccontextmanager
async def four_workers():
    """A client and workers of this process, all of whose states are checked at the end, too."""
    with dask.config.set(VALIDATE):
        async with in_process(4, protocol="tcp://") as (cluster, client):
            workers = [*cluster.workers.values()]
            assert cluster.scheduler.validate
            assert all(worker.state.validate for worker in workers)
            yield client, workers
            cluster.scheduler.validate_state()
            for worker in cluster.workers.values():
                worker.state.validate_state()


async def make_blocks(c, shape, chunks):
    """An array whose blocks are in memory, on a cluster that has the plugins."""
    await dask_p2p.register(c)
    x = c.persist(source(shape, chunks))
    await wait(x)
    return x


async def check_transposed(c, y, shape):
    np.testing.assert_array_equal(await c.compute(y), expected(shape).T)


async def test_cancelled_and_wanted_again():
    async with four_workers() as (c, _):
        x = await make_blocks(c, (400, 300), (50, 300))
        for pause_s in (0.0, 0.001, 0.005, 0.01, 0.02):
            y = c.persist(dask_p2p.transpose(x))
            await asyncio.sleep(pause_s)
            await c.cancel(y)
            y = c.persist(dask_p2p.transpose(x))
            await check_transposed(c, y, (400, 300))
            del y


async def test_inputs_released_as_soon_as_the_last_reader_is_done():
    async with four_workers() as (c, workers):
        await dask_p2p.register(c)
        y = c.persist(dask_p2p.transpose(source((40, 30), (10, 30))))
        await wait(y)
        await true_later(lambda: all("p2p" in str(key) for w in workers for key in w.data))
        await check_transposed(c, y, (40, 30))


@pytest.mark.parametrize("graceful", [True, False])
async def test_a_worker_leaves_in_the_middle(graceful):
    async with four_workers() as (c, workers):
        x = await make_blocks(c, (800, 600), (50, 600))
        y = c.persist(dask_p2p.transpose(x))
        await asyncio.sleep(0.01)
        if graceful:
            await c.retire_workers([workers[0].address])
        else:
            await workers[0].close(nanny=False)
        await check_transposed(c, y, (800, 600))


async def test_the_plugin_goes_while_tasks_run():
    async with four_workers() as (c, workers):
        x = await make_blocks(c, (400, 300), (25, 300))
        y = c.persist(dask_p2p.transpose(x))
        await c.unregister_worker_plugin(PLUGIN_NAME)
        for worker in workers:
            assert PLUGIN_NAME not in worker.plugins
            assert "p2p_comm_read" not in worker.handlers
        y2 = c.persist(dask_p2p.transpose(x + 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            np.testing.assert_array_equal(await c.compute(y2), expected((400, 300)).T + 1)
        del y
