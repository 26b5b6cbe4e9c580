"""`map_on_gpu` on a GPU: values are bit for bit those of whole blocks."""

from __future__ import annotations

from itertools import pairwise

import dask.array as da
import numpy as np
import pytest
from distributed import Client

import dask_p2p
from dask_p2p.backends.host_memory import is_pinned
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.on_gpu import block as module
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
    import cupy

    return cupy.asnumpy(func(cupy.asarray(block), **kwargs))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("register_from", [1, 2**40])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c16", "i2"])
def test_values_are_those_of_whole_blocks(dtype, register_from, axis, monkeypatch):
    monkeypatch.setattr(module, "register_from_bytes", lambda: register_from)
    array = values(dtype)
    x = da.from_array(array, chunks=(2048, 1024))
    y = dask_p2p.map_on_gpu(function, x, axis=axis, part_bytes=PART_BYTES)
    actual = y.compute(scheduler="threads")
    assert actual.tobytes() == compute_whole(function, array).tobytes()


def late(a):
    """Read what is given long after the copies that are queued could be done."""
    import cupy

    spin(cupy.cuda.get_current_stream(), SPIN_CYCLES)
    return a * 2


def test_a_block_begins_while_the_last_parts_of_another_come_back():
    """With one thread, and however slow the function is, at most two are under way."""
    rows = 2**12
    array = np.arange(8 * rows * 2**10, dtype="f4").reshape(8 * rows, 2**10)
    with dask_p2p.local_cluster(1, gpus=True) as cluster, Client(cluster) as client:
        client.run(hand_on_small_blocks)
        x = persisted(client, da.from_array(array, chunks=(rows, -1)))
        same = persisted(client, dask_p2p.map_on_gpu(late, x, dtype="f4"))
        y = persisted(client, dask_p2p.map_on_gpu(late, same, dtype="f4"))
        np.testing.assert_array_equal(y.compute(), 4 * array)
        (records,) = client.run(records_of, y.name).values()
    spans = sorted((record.start_s, record.stop_s) for record in records)
    assert len(spans) == 8
    assert all(then[0] < first[1] for first, then in pairwise(spans))
    assert all(third[0] > first[1] for first, third in zip(spans, spans[2:], strict=False))


def hand_on_small_blocks():
    tune_here(task_ahead_bytes=1)


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
