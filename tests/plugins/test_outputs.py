from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace

import numpy as np
import pytest

import dask_p2p
from dask_p2p.backends import backend_named
from dask_p2p.backends.host_memory import is_pinned
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.plugins.storage import OutputMemory, PinnedOutputs
from tests.clock import run_clocked
from tests.faults.support import BOUND_S, cluster_of, expected, source
from tests.transports.loopback import wait_until

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


def test_it_is_given_back_when_none_has_come_for_a_while():
    async def main():
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

    run_clocked(main())


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
    def refused(*args):
        raise RuntimeError("cudaErrorMemoryAllocation")

    warnings_sent = []
    monkeypatch.setattr(gpu, "pin", refused)
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


def dropped_bytes(dask_worker):
    return dask_worker.dropped


def idle_bytes(dask_worker):
    return dask_worker.plugins[PLUGIN_NAME].context.outputs.idle_bytes


def note_dropped(dask_worker):
    """Note the sizes of the memory that a worker gives back."""
    outputs = dask_worker.plugins[PLUGIN_NAME].context.outputs
    dask_worker.dropped, clear = [], outputs.clear

    def noted():
        dask_worker.dropped.append(outputs.idle_bytes)
        clear()

    outputs.clear = noted


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
        wait_until(lambda: any(map(sum, client.run(dropped_bytes).values())))
        wait_until(lambda: not any(client.run(idle_bytes).values()), BOUND_S)
