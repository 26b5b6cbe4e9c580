"""Blocks of `map_on_gpu` through a GPU that is emulated, with a check of every access."""

import gc
import warnings
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Reschedule

import dask_p2p
from dask_p2p.errors import BlockMismatchError, DeviceLostError, MemoryLimitError, P2PWarning
from dask_p2p.on_gpu import block as module
from tests.sections.emulated import kernel
from tests.simulation.streams import HOST
from tests.support import noted

VALUES = np.arange(24 * 64.0).reshape(24, 64)


@pytest.fixture
def gpu(gpu, monkeypatch):
    def write(block, *_):
        if isinstance(block, np.ndarray):
            gpu.do(HOST, "the task that made it", writes=[block])

    noted(monkeypatch, module, "checked_block", write)
    yield gpu
    gc.collect()
    gpu.check()


@pytest.fixture
def x():
    return da.from_array(VALUES, chunks=(12, 64))


def on_gpu(gpu, function, *arrays, **kwargs):
    kwargs = {"part_bytes": 4 * 512, "dtype": "f8", **kwargs}
    return dask_p2p.map_on_gpu(kernel(gpu, function), *arrays, **kwargs)


def computed(gpu, y):
    """The values of a result that is read as soon as its tasks have returned."""
    with dask.config.set(scheduler="sync"):
        blocks = [delayed.compute() for delayed in y.to_delayed().ravel()]
    gpu.do(HOST, "whoever reads the blocks", reads=blocks)
    return np.block([[b] for b in blocks])


@pytest.mark.parametrize("register_from", [1, 2**30])
def test_values_are_those_of_whole_blocks(gpu, x, register_from, monkeypatch):
    monkeypatch.setattr(module, "register_from_bytes", lambda: register_from)
    y = on_gpu(gpu, lambda a: 2 * a + 1, x)
    np.testing.assert_array_equal(computed(gpu, y), 2 * VALUES + 1)
    assert gpu.most_bytes <= dask_p2p.estimate(y).total_bytes
    assert gpu.pageable_copies == 0


def test_parts_are_reduced_where_they_are(gpu, x):
    y = on_gpu(gpu, lambda a: a.sum(0, keepdims=True), x, reduce=kernel(gpu, lambda a, b: a + b))
    np.testing.assert_array_equal(computed(gpu, y), VALUES.reshape(2, 12, 64).sum(1))


def around(a):
    return np.roll(a, 1, 0) + 2 * np.roll(a, -1, 0) + 3 * np.roll(a, 1, 1) + np.roll(a, -1, 1)


def test_halos(gpu, x):
    """They are trimmed on the GPU: copies to the host are contiguous."""
    y = on_gpu(gpu, around, x, depth=1, boundary="periodic", part_bytes=6 * 66 * 8)
    np.testing.assert_array_equal(computed(gpu, y), around(VALUES))
    assert gpu.most_bytes <= dask_p2p.estimate(y).total_bytes


def test_blocks_of_the_gpu_go_through_as_they_are(gpu):
    values = np.arange(6.0).reshape(2, 3)
    block = gpu.written(values, stream=gpu.stream("another task's"))

    def doubled(a):
        gpu.do(gpu.current[-1].name, "the function", reads=[a], writes=[a])
        a.values[...] *= 2
        return a

    y = dask_p2p.map_on_gpu(doubled, da.from_array(values), dtype="f8")
    result = y.__dask_graph__()[(y.name, 0, 0)].func((0, 0), block, keywords={})
    gpu.cupy.cuda.Stream.null.synchronize()
    np.testing.assert_array_equal(gpu.read(result), 2 * values)
    np.testing.assert_array_equal(gpu.read(block), values)
    two = dask_p2p.map_on_gpu(np.add, da.from_array(values), da.from_array(values), dtype="f8")
    with pytest.raises(BlockMismatchError, match="one array library, got cupy and numpy ones"):
        two.__dask_graph__()[(two.name, 0, 0)].func((0, 0), block, values, keywords={})


def test_what_stays_on_the_host_is_refused(gpu, x):
    y = dask_p2p.map_on_gpu(lambda a: a.values, x, dtype="f8")
    with pytest.raises(BlockMismatchError, match=r"expected a cupy\.ndarray .* got numpy"):
        computed(gpu, y)


@pytest.fixture
def worker(monkeypatch):
    """A stand-in for a task's view of Dask. It lists records and warnings."""
    notes = []
    context = SimpleNamespace(
        address="tcp://a",
        running={},
        record=notes.append,
        empty_output=lambda shape, dtype, queue: queue.pinned_output and queue.empty(shape, dtype),
        warn=notes.append,
        on_device_lost=lambda error: True,
    )
    worker = SimpleNamespace(
        address="tcp://a",
        get_current_task=lambda: "fused-0123",
        state=SimpleNamespace(tasks={"fused-0123": SimpleNamespace(run_id=7)}),
        context=context,
        notes=notes,
    )
    monkeypatch.setattr(module, "current_worker", lambda: (worker, context))
    return worker


def test_a_worker_notes_what_went_through_its_gpu(gpu, x, worker, monkeypatch):
    notes, context = worker.notes, worker.context
    running = []

    def noted(a):
        running.extend(record() for record in context.running.values())
        return -a

    np.testing.assert_array_equal(computed(gpu, on_gpu(gpu, noted, x)), -VALUES)
    assert len(notes) == 2
    assert context.running == {}
    for number, record in enumerate(notes):
        assert record.key == ("p2p-on-gpu-0123", number, 0)
        assert (record.parts, record.up_bytes, record.down_bytes) == (3, 6144, 6144)
        assert (record.up_s, record.function_s, record.down_s) == (3e-3,) * 3, "by events"
        assert (record.is_made, record.run) == (True, 7)
    assert not running[0].is_made
    notes.clear()

    def lost(*args):
        raise DeviceLostError("it works no more")

    monkeypatch.setattr(module, "PartStreams", lost)
    with pytest.raises(Reschedule):
        computed(gpu, on_gpu(gpu, np.negative, x))
    assert notes[0].error == "DeviceLostError: it works no more"


def test_with_too_little_memory_parts_are_smaller(gpu, x):
    y = on_gpu(gpu, np.negative, x)
    gpu.limit_bytes = dask_p2p.estimate(y).total_bytes // 2
    match = "out of memory of its GPU .*Parts are made smaller"
    with pytest.warns(P2PWarning, match=match) as caught:
        np.testing.assert_array_equal(computed(gpu, y), -VALUES)
    assert len(caught) == 1
    gpu.limit_bytes = 512
    with pytest.raises(MemoryLimitError, match="one element along axis 0"):
        computed(gpu, y)


def test_without_pinned_memory_there_is_one_warning(gpu, x):
    gpu.can_pin = False
    with pytest.warns(P2PWarning, match="this process: host memory cannot be pinned") as caught:
        np.testing.assert_array_equal(computed(gpu, on_gpu(gpu, np.negative, x)), -VALUES)
    assert len(caught) == 1


def test_empty_blocks_need_no_gpu_memory(gpu):
    y = on_gpu(gpu, np.negative, da.zeros((0, 3), chunks=(1, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert y.compute(scheduler="sync").shape == (0, 3)
    assert gpu.most_bytes == 0
