"""`map_on_gpu` on a GPU: values bit for bit those of whole blocks; slots not in use are filled."""

import threading
import warnings
from itertools import pairwise
from math import prod

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client

import dask_p2p
from dask_p2p.backends import host_memory as pinned
from dask_p2p.backends import pipelines as part_streams
from dask_p2p.backends.device_queue import SlotCache
from dask_p2p.backends.host_memory import is_pinned
from dask_p2p.backends.pipelines import HostStreams, PartStreams
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import P2PWarning
from dask_p2p.on_gpu import block as module
from dask_p2p.plans.base import Input, plan_parts
from tests.backends.support import cupy
from tests.backends.test_pipelines import steps_without
from tests.gpu.test_streams import spin
from tests.support import output_of, persisted, tune_here

pytestmark = pytest.mark.gpu(1)

SHAPE = (4096, 1024)
PART_BYTES = 2**20
SPIN_CYCLES = 20_000_000  # about 10 ms


def values(dtype):
    rng = np.random.default_rng(0)
    return (100 * rng.standard_normal(SHAPE)).astype(dtype)


def function(a):
    return a * 2 + 1


def compute_whole(func, block, **kwargs):
    return cupy.asnumpy(func(cupy.asarray(block), **kwargs))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("register_from", [1, 2**40])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c16", "i2"])
def test_values_are_those_of_whole_blocks(dtype, register_from, axis, monkeypatch):
    monkeypatch.setattr(module, "register_from_bytes", lambda: register_from)
    array = values(dtype)
    x = da.from_array(array, chunks=(2048, 1024))
    y = dask_p2p.map_on_gpu(function, x, axis=axis, part_bytes=PART_BYTES)
    assert y.compute(scheduler="threads").tobytes() == compute_whole(function, array).tobytes()


def test_functions_that_overwrite_what_they_get():
    def in_place(a):
        a *= 3
        return a

    array = values("f4")
    x = da.from_array(array, chunks=(2048, 1024)).persist(scheduler="sync")
    y = dask_p2p.map_on_gpu(in_place, x, part_bytes=PART_BYTES)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), array * np.float32(3))
    np.testing.assert_array_equal(x.compute(scheduler="sync"), array)


def around(a):
    return cupy.roll(a, 1, 0) + 2 * cupy.roll(a, -1, 0) + 3 * cupy.roll(a, 1, 1)


def test_halos_several_arrays_and_another_length():
    array, row = values("f8"), values("f8")[:1]
    x = da.from_array(array, chunks=(2048, 512))
    y = dask_p2p.map_on_gpu(around, x, depth=1, boundary="periodic", part_bytes=PART_BYTES)
    expected = np.roll(array, 1, 0) + 2 * np.roll(array, -1, 0) + 3 * np.roll(array, 1, 1)
    np.testing.assert_allclose(y.compute(scheduler="sync"), expected, rtol=1e-14)
    row_blocks = da.from_array(row, chunks=(1, 512))
    options = {"chunks": (x.chunks[0], 256), "part_bytes": PART_BYTES}
    y = dask_p2p.map_on_gpu(lambda a, b: (a > b)[:, ::2], x, row_blocks, **options)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), (array > row)[:, ::2])


def test_parts_are_reduced_on_the_gpu():
    array = values("f4").astype("i8")
    x = da.from_array(array, chunks=(2048, 1024))
    y = dask_p2p.map_on_gpu(
        lambda a: a.sum(0, keepdims=True), x, reduce=cupy.add, part_bytes=PART_BYTES
    )
    np.testing.assert_array_equal(y.sum(0).compute(scheduler="sync"), array.sum(0))


def late(a):
    """Read what is given long after the copies that are queued could be done."""
    spin(cupy.cuda.get_current_stream(), SPIN_CYCLES)
    return a * 2


def at_once(a):
    """Read what is given before a copy that has been queued is done: `doubled` makes these late."""
    return a * 2


class InPinnedMemory:
    """Twice an array, all in pinned memory: nothing but events keeps copies back."""

    is_reduced = False

    def __init__(self, func):
        self.func = func
        self.array, self.out = (pinned_array(32 * SHAPE[0], SHAPE[1] // 4) for _ in range(2))
        # Memory of slots may have held other arrays before, also with the same values.
        self.array[...] = np.random.default_rng().standard_normal(self.array.shape, "f4")
        self.out[...] = np.nan
        self.arrays = [self.array]
        rows = Input(self.array.shape, 4, 0)
        self.plan = plan_parts([rows], len(self.array), 2**24, rows.row_bytes)

    def views(self, part):
        yield self.array[slice(*part.reads[0])]

    def output_slices(self, part):
        return (slice(*part.output_range),)

    def call(self, part, inputs):
        return self.func(inputs[0])


def pinned_array(*shape):
    size_bytes = 4 * prod(shape)
    return np.asarray(pinned.Pinned(size_bytes))[:size_bytes].view("f4").reshape(shape)


def doubled(monkeypatch, func, left_out=None):
    up = part_streams._BlockInTransit._up

    def up_late(self, number, stream):
        spin(stream, SPIN_CYCLES)
        up(self, number, stream)

    if func is at_once:
        monkeypatch.setattr(part_streams._BlockInTransit, "_up", up_late)
    monkeypatch.setattr(part_streams, "schedule_steps", steps_without(left_out))
    monkeypatch.setattr(HostStreams, "_kept_slots", SlotCache())
    work = InPinnedMemory(func)
    PartStreams(2**60, pytest.fail).run(work, work.out)
    return work.out, 2 * work.array


@pytest.mark.parametrize("func", [late, at_once])
def test_slots_are_not_overwritten_while_they_are_in_use(monkeypatch, func):
    np.testing.assert_array_equal(*doubled(monkeypatch, func))


@pytest.mark.parametrize(
    ("func", "left_out"),
    [(at_once, ("up", "run")), (late, ("run", "down")), (late, ("down", "up"))],
)
def test_without_an_event_values_are_wrong(monkeypatch, func, left_out):
    """The test above would fail without it."""
    actual, expected = doubled(monkeypatch, func, left_out)
    assert (actual != expected).any()


@pytest.mark.parametrize("is_kept", [False, True])
def test_blocks_of_several_threads_go_through_the_same_streams(is_kept):
    """In memory that is pinned, or is not: slots on the host are used again too."""
    array = values("f8")
    x = da.from_array(array, chunks=(256, 1024))
    if is_kept:
        x = x.map_blocks(pinned_copy).persist(scheduler="threads")
    y = dask_p2p.map_on_gpu(function, x, part_bytes=2**18)
    with dask.config.set(pool=None, num_workers=4):
        actual = y.compute(scheduler="threads")
    assert threading.active_count() > 1
    np.testing.assert_array_equal(actual, function(array))


def pinned_copy(block):
    memory = np.asarray(pinned.Pinned(block.nbytes))[: block.nbytes]
    copy = memory.view(block.dtype).reshape(block.shape)
    copy[...] = block
    return copy


def test_a_block_begins_while_the_last_parts_of_another_come_back():
    """With one thread, and however slow the function is, at most two are under way."""
    rows = 2**12
    array = np.arange(8 * rows * 2**10, dtype="f4").reshape(8 * rows, 2**10)
    with dask_p2p.local_cluster(1, gpus=True) as cluster, Client(cluster) as client:
        client.run(tune_here, task_ahead_bytes=1)  # small blocks are handed on
        x = persisted(client, da.from_array(array, chunks=(rows, -1)))
        same = persisted(client, dask_p2p.map_on_gpu(late, x, dtype="f4"))
        y = persisted(client, dask_p2p.map_on_gpu(late, same, dtype="f4"))
        np.testing.assert_array_equal(y.compute(), 4 * array)
        (records,) = client.run(records_of, y.name).values()
    spans = sorted((record.start_s, record.stop_s) for record in records)
    assert len(spans) == 8
    assert all(then[0] < first[1] for first, then in pairwise(spans))
    assert all(third[0] > first[1] for first, third in zip(spans, spans[2:], strict=False))


def records_of(name, dask_worker):
    records = dask_worker.plugins[PLUGIN_NAME].context.records.since(0)[1]
    return [record for record in records if record.key[0] == name]


@pytest.mark.gpu(2)
def test_on_a_cluster_outputs_are_pinned_and_read_by_peers(client):
    def pinned_blocks(dask_worker):
        blocks = [b for b in dask_worker.data.values() if isinstance(b, np.ndarray)]
        context = dask_worker.plugins[PLUGIN_NAME].context
        return sum(map(is_pinned, blocks)), context.pinned.pinned_bytes

    array = values("f4")
    x = da.from_array(array, chunks=(1024, 1024))
    y = persisted(client, dask_p2p.map_on_gpu(function, x, part_bytes=PART_BYTES))
    assert isinstance(y.blocks[0, 0].compute(), np.ndarray)
    assert sum(count for count, _ in client.run(pinned_blocks).values()) >= 4
    again = persisted(client, dask_p2p.map_on_gpu(function, y, part_bytes=PART_BYTES))
    z = dask_p2p.transpose(again)
    np.testing.assert_array_equal(z.compute(), function(function(array)).T)


def test_an_array_ten_times_as_large_as_the_memory_there_is(monkeypatch):
    """There is no warning: parts need not be made smaller."""
    array = values("f8")
    limit_bytes = array.nbytes // 10
    y = dask_p2p.map_on_gpu(function, da.from_array(array, chunks=-1), part_bytes=2**17, dtype="f8")
    assert dask_p2p.estimate(y).total_bytes + 2**18 <= limit_bytes  # `a * 2` is there too
    pool, before = cupy.cuda.MemoryPool(), cupy.cuda.get_allocator()
    pool.set_limit(size=limit_bytes)
    monkeypatch.setattr(HostStreams, "_kept_slots", SlotCache())
    cupy.cuda.set_allocator(pool.malloc)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", P2PWarning)
            actual = y.compute(scheduler="sync")
        assert pool.total_bytes() <= limit_bytes
    finally:
        cupy.cuda.set_allocator(before)
    np.testing.assert_array_equal(actual, function(array))


def test_what_cannot_be_pinned_is_copied_as_it_is(monkeypatch):
    def refused(array):
        raise cupy.cuda.runtime.CUDARuntimeError(2)

    monkeypatch.setattr(pinned, "register", refused)
    monkeypatch.setattr(pinned, "_warned", set())
    monkeypatch.setattr(HostStreams, "_kept_host_slots", SlotCache())
    array = values("f4")
    x = da.from_array(array, chunks=(2048, 1024))
    y = dask_p2p.map_on_gpu(function, x, part_bytes=PART_BYTES)
    with pytest.warns(P2PWarning, match="host memory cannot be pinned") as caught:
        actual = y.compute(scheduler="sync")
    assert [warning.category for warning in caught].count(P2PWarning) == 1
    np.testing.assert_array_equal(actual, function(array))


WITHOUT_LOCKED_MEMORY = """
import resource, warnings
import dask.array as da, numpy as np, dask_p2p
from dask_p2p.errors import P2PWarning
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
array = np.arange(2**22, dtype="f4").reshape(4096, 1024)
x = da.from_array(array, chunks=(2048, 1024))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    y = dask_p2p.map_on_gpu(lambda a: a * 2 + 1, x, part_bytes=2**20, dtype="f4")
    got = y.compute(scheduler="sync")
assert (got == array * 2 + 1).all()
texts = [str(each.message) for each in caught if each.category is P2PWarning]
assert len(texts) <= 1, texts
assert all("ulimit -l" in text for text in texts), texts
print("right")
"""


def test_a_process_that_may_lock_no_memory():
    """The driver may be able to pin memory then or not. Values are right in both cases."""
    assert output_of("-c", WITHOUT_LOCKED_MEMORY).split() == ["right"]
