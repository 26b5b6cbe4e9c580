"""Output blocks of NumPy arrays that an emulated GPU permutes."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.backends.base import SLOTS
from dask_p2p.backends.device import gpu_obstacle
from dask_p2p.backends.pipelines.host_streams import HostStreams
from dask_p2p.backends.pipelines.host_through_device import slots_bytes
from dask_p2p.errors import MemoryLimitError, NoDeviceError
from tests.backends.support import bits, random_bits
from tests.engine.test_assembly import FakePeers, FakeTransport, X, assembly, check
from tests.simulation.streams import HOST

LIMIT_BYTES = 2**17  # for staging: parts of 2.5 KiB
BY_GPU = {"p2p.permute-numpy": "gpu", "p2p.memory.staging-limit": LIMIT_BYTES}


@pytest.fixture
def gpu(gpu, monkeypatch):
    """Every array of the host has been written: that is looked at elsewhere."""
    access, by_producer = gpu.access, (("its producer", HOST, 0, True),)

    def written(what, timeline, clock, where, is_write):
        if not is_write:
            for address in where:
                gpu.accesses[address] = gpu.accesses[address] or by_producer
        access(what, timeline, clock, where, is_write)

    monkeypatch.setattr(gpu, "access", written)
    return gpu


@pytest.fixture
def parts(monkeypatch):
    """The shapes of parts that went through the GPU."""
    seen = []
    copy_up = HostStreams.copy_up

    def noted(streams, to, of, pitch=None):
        seen.append(to.shape)
        copy_up(streams, to, of, pitch)

    monkeypatch.setattr(HostStreams, "copy_up", noted)
    return seen


@pytest.mark.skipif(gpu_obstacle() is None, reason="there is a GPU")
def test_workers_of_a_cluster_report_it(client):
    with dask.config.set({"p2p.permute-numpy": "gpu"}):
        y = dask_p2p.transpose(da.ones((4, 4), chunks=2))
    with pytest.raises(NoDeviceError, match=r"on worker tcp://.* CuPy cannot be"):
        y.compute()
    with pytest.raises(NoDeviceError, match="on this process CuPy cannot be"):
        y.compute(scheduler="sync")


@pytest.mark.parametrize("dtype", ["f8", "i2", "c16", ">f4", "M8[ns]", "?"])
def test_transposes_and_rechunks_of_uneven_blocks(gpu, parts, dtype):
    values = random_bits((23, 31, 5), dtype)
    x = da.from_array(values, chunks=((7, 16), (10, 20, 1), 5))
    with dask.config.set(BY_GPU):
        y = dask_p2p.transpose(x, (1, 2, 0), chunks=((11, 20), 5, (20, 3)))
        z = dask_p2p.rechunk(x, (9, 31, 2))
    for result, expected in ((y, values.transpose(1, 2, 0)), (z, values)):
        assert bits(result.compute(scheduler="sync")) == bits(expected)
        assert parts
        parts.clear()
    assert gpu.most_bytes == slots_bytes(LIMIT_BYTES)
    assert gpu.pageable_copies == 0
    gpu.check()


def test_objects_and_structures_are_left_to_the_cpu(gpu, parts):
    for dtype in ("O", [("a", "i1"), ("b", "f8")]):
        values = random_bits((6, 4), np.dtype(dtype))
        with dask.config.set({"p2p.permute-numpy": "gpu"}):
            y = dask_p2p.transpose(da.from_array(values, chunks=3))
        assert (y.compute(scheduler="sync") == values.T).all()
    assert parts == []


def test_halos_beyond_the_end_are_filled(gpu, parts):
    values = np.arange(12.0)
    with dask.config.set(BY_GPU):
        x = da.from_array(values, chunks=4)
        y = dask_p2p.map_overlap(lambda a: a, x, depth=1, boundary=7.0, trim=False)
    blocks = y.to_delayed().ravel()
    got = np.concatenate([block.compute(scheduler="sync") for block in blocks])
    assert got.tolist() == [7, 0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 7, 8, 9, 10, 11, 7]
    assert parts


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_regions_of_other_workers(gpu, parts, mode):
    """Each is dropped as soon as it is given to the queue."""
    log = []
    quick, slow = FakeTransport("quick", log, part_bytes=24), FakeTransport("slow", log)
    changes = {"permute_numpy": "gpu", "staging_limit_bytes": LIMIT_BYTES, "mode": mode}
    made = assembly(FakePeers(quick, slow), **changes)
    check(made.run())
    assert len(parts) == 7
    gpu.check()


def test_outputs_lie_in_pinned_memory(gpu):
    asked = []

    class Worker(FakePeers):
        def empty_output(self, shape, dtype, queue):
            asked.append(queue.pinned_output)
            return queue.empty(shape, dtype)

    log = []
    transports = FakeTransport("quick", log), FakeTransport("slow", log)
    for where in ("cpu", "gpu"):
        check(assembly(Worker(*transports), permute_numpy=where).run())
    assert asked == [False, True]


def test_a_lack_of_memory_is_warned_of_once(gpu, parts):
    gpu.limit_bytes = 100
    log = []
    worker = FakePeers(FakeTransport("quick", log), FakeTransport("slow", log))
    for _ in range(2):
        check(assembly(worker, permute_numpy="gpu").run())
    (text,) = worker.warnings
    assert text.startswith("dask_p2p: worker b: its GPU is out of memory (MemoryError: ")
    assert parts == []


def test_what_slots_take_is_counted(gpu):
    x = da.ones((400, 300), chunks=100)
    staging_bytes = []
    for where in ("cpu", "gpu", "auto"):  # as if this were a worker with a GPU
        with dask.config.set({"p2p.permute-numpy": where}):
            staging_bytes.append(dask_p2p.estimate(x, workers=4).staging_bytes)
    by_cpu, by_gpu, by_either = staging_bytes
    assert by_gpu >= by_cpu + 6 * 2**24
    assert by_either == by_gpu
    worker = FakePeers(FakeTransport("quick", []), FakeTransport("slow", []))
    block_bytes = X[:3].nbytes  # of the output, and of the input that is there
    worker.memory = 2 * SLOTS * 2**24 + 2 * block_bytes - 1
    check(assembly(worker, permute_numpy="cpu").run())
    with pytest.raises(MemoryLimitError):
        assembly(worker, permute_numpy="gpu").run()
