"""What transports and tasks get of the worker that they are on."""

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import dask
import numpy as np
import pytest
from distributed import LocalCluster, secede

import dask_p2p
from dask_p2p.backends import backend_named
from dask_p2p.backends.host_memory import is_pinned
from dask_p2p.config import options, transport_classes
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.monitoring.records import TaskRecord
from dask_p2p.plugins import context as context_module
from dask_p2p.plugins.context import DaskWorkerContext
from dask_p2p.plugins.dask_internals import only_waiting
from dask_p2p.plugins.storage import OutputMemory, PinnedOutputs
from tests.clock import clocked
from tests.faults.support import cluster_of, expected, source
from tests.support import BOUND_S, noted, ran
from tests.transports.loopback import true_later, wait_until


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
    monkeypatch.setattr(context_module, "find_in_memory", Mock(side_effect=KeyError))
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


MIB = 2**20


class Worker:
    """What output memory sees of Dask's."""

    def __init__(self, limit_bytes=64 * MIB, used_bytes=0):
        self.memory_manager = SimpleNamespace(memory_limit=limit_bytes)
        self.used_bytes = used_bytes
        self.monitor = SimpleNamespace(get_process_memory=lambda: self.used_bytes)
        self.loop = SimpleNamespace(asyncio_loop=asyncio.get_running_loop())
        self.address = "tcp://a"


def take_output(memory, shape=(MIB // 8,), dtype="f8"):
    return memory.empty(shape, np.dtype(dtype), backend_named("numpy").queue())


@clocked
async def test_it_is_given_back_when_none_has_come_for_a_while():
    memory = OutputMemory(Worker(), retain_s=2)
    for _ in range(4):
        take_output(memory)  # and drop it
        await asyncio.sleep(1.9)
        assert memory.idle_bytes == MIB
    await asyncio.sleep(0.2)
    assert memory.idle_bytes == 0
    take_output(memory)
    await asyncio.sleep(0)
    memory.close()
    assert memory.idle_bytes == 0
    assert not asyncio.get_running_loop().has_timers()


async def test_what_is_small_or_large_or_of_objects_is_not_kept():
    memory = OutputMemory(Worker(), retain_s=60)
    assert take_output(memory, (100, 10)).flags.owndata
    assert take_output(memory, (4 * MIB + 1,), "u1").flags.owndata, "too large to be kept"
    assert take_output(memory, (MIB,), object)[0] is None
    assert take_output(memory, (), "f8").shape == ()
    gc.collect()
    assert memory.idle_bytes == 0
    assert not take_output(memory, (4 * MIB,), "u1").flags.owndata
    assert memory.idle_bytes == 4 * MIB


async def test_outputs_of_a_gpu_are_pinned_and_their_memory_is_kept(gpu):
    memory = PinnedOutputs(Worker(), 60, None)
    first = take_output(memory)
    where = first.ctypes.data
    assert is_pinned(first[::2])
    assert memory.pinned_bytes == MIB
    del first
    assert (memory.idle_bytes, memory.pinned_bytes) == (MIB, MIB)
    again = take_output(memory, (MIB // 4, 1), "f4")
    assert again.ctypes.data == where
    assert len(gpu.pinned) == 1
    odd = take_output(memory, (5 * MIB // 16,))
    assert memory.pinned_bytes == (1 + 3) * MIB, "not a power of two"
    memory.close()
    del again, odd
    assert (memory.pinned_bytes, gpu.pinned) == (0, {})


async def test_no_more_is_pinned_than_half_of_the_limit(gpu):
    memory = PinnedOutputs(worker := Worker(16 * MIB), 60, None)
    outputs = [take_output(memory) for _ in range(10)]
    assert [is_pinned(output) for output in outputs] == 8 * [True] + 2 * [False]
    assert memory.pinned_bytes == 8 * MIB
    worker.used_bytes = 9 * MIB  # of 16: it gives back what comes back
    del outputs[:3]
    assert (memory.idle_bytes, len(gpu.pinned)) == (0, 5)
    worker.used_bytes = 0
    outputs.append(take_output(memory))
    assert is_pinned(outputs[-1])
    outputs.clear()
    larger = [take_output(memory, (MIB // 2,)) for _ in range(2)]
    assert all(map(is_pinned, larger)), "kept buffers of another size are given up"


async def test_what_cannot_be_pinned_is_ordinary_memory_with_one_warning(gpu, monkeypatch):
    warnings_sent = []
    monkeypatch.setattr(gpu, "pin", Mock(side_effect=RuntimeError("cudaErrorMemoryAllocation")))
    memory = PinnedOutputs(Worker(), 60, warnings_sent.append)
    outputs = [take_output(memory) for _ in range(3)]
    assert not any(map(is_pinned, outputs))
    (text,) = warnings_sent
    assert text.startswith("dask_p2p: worker tcp://a: host memory cannot be pinned (Runtime")


def test_an_output_may_outlive_its_worker():
    """Whose loop is closed."""
    memory, output = asyncio.run(_one(closes=False))
    del output
    memory, output = asyncio.run(_one(closes=True))
    output[...] = 1
    del output
    assert memory.idle_bytes == 0


async def _one(closes):
    memory = OutputMemory(Worker(), retain_s=60)
    output = take_output(memory)
    if closes:
        memory.close()
    return memory, output


def idle_bytes(dask_worker):
    return dask_worker.plugins[PLUGIN_NAME].context.outputs.idle_bytes


def note_dropped(dask_worker):
    """Note the sizes of the memory that a worker gives back."""
    outputs = dask_worker.plugins[PLUGIN_NAME].context.outputs
    dask_worker.dropped = noted(pytest.MonkeyPatch(), outputs, "clear", lambda: outputs.idle_bytes)


@pytest.mark.slow
def test_workers_give_the_memory_back():
    """By default, soon after the last output is gone."""
    shape = (2000, 4000)

    with cluster_of(2) as client:
        x = client.persist(source(shape, (1000, 4000)))
        client.run(note_dropped)
        y = client.persist(dask_p2p.transpose(x))
        some = client.compute(y[::97, ::89]).result(timeout=BOUND_S)
        np.testing.assert_array_equal(some, expected(shape).T[::97, ::89])
        del y
        wait_until(lambda: any(client.run(lambda dask_worker: sum(dask_worker.dropped)).values()))
        wait_until(lambda: not any(client.run(idle_bytes).values()), BOUND_S)


TASKS = 20


@pytest.fixture
def cluster():
    """A worker in this process, of which no other test has used the threads."""
    threads = {"threads_per_worker": 1, "processes": False}
    with LocalCluster(n_workers=1, **threads, dashboard_address=":0") as cluster:
        yield cluster


class Seen:
    """What tasks of the worker in this process have noted."""

    turn = threading.Lock()
    at_work = 0
    together: ClassVar[list[int]] = []
    begun: ClassVar[list[int]] = []
    threads: ClassVar[set[threading.Thread]] = set()
    failed: ClassVar[set[threading.Thread]] = set()


def work(number):
    Seen.at_work += 1
    Seen.together.append(Seen.at_work)
    Seen.begun.append(number)
    Seen.threads.add(threading.current_thread())
    time.sleep(0.005)
    Seen.at_work -= 1
    with Seen.turn, only_waiting():
        wait_until(lambda: Seen.begun[-1] != number or len(Seen.begun) == TASKS)  # the next begins
    return number


def note_thread(number):
    Seen.threads.add(threading.current_thread())


def test_the_next_task_begins_and_threads_are_used_again(client):
    assert client.gather(client.map(work, range(TASKS))) == list(range(TASKS))
    assert max(Seen.together) == 1, "one at a time works, whoever waits"
    assert len(Seen.threads) == 2
    client.gather(client.map(note_thread, range(TASKS)))
    assert len(Seen.threads) == 2, "tasks that come later find these"


def test_a_task_that_fails_while_it_waits_comes_back_too(client):
    def fails():
        Seen.failed.add(threading.current_thread())
        with only_waiting():
            raise KeyError("of the device")

    for _ in range(5):
        with pytest.raises(KeyError):
            client.submit(fails, pure=False).result(timeout=BOUND_S)
    assert len(Seen.failed) <= 2


def test_a_thread_that_has_left_the_pool_just_waits(client):
    def leave_pool():
        secede()
        with only_waiting():
            return "done"

    assert client.submit(leave_pool).result(timeout=BOUND_S) == "done"


def test_on_a_thread_that_is_not_dasks_nothing_else_begins():
    def wait():
        with only_waiting():
            return "done"

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(wait).result() == "done"
