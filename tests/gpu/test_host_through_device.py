"""NumPy blocks that a GPU permutes: values bit for bit those of NumPy, and bounded memory."""

from __future__ import annotations

import threading

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.backends.host.pinned import Pinned, is_pinned
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.backends.pipelines.host_link import measured_host_link
from dask_p2p.backends.pipelines.host_streams import HostStreams
from dask_p2p.backends.pipelines.host_through_device import (
    HostThroughDeviceQueue,
    is_for_device,
    slots_bytes,
)
from dask_p2p.backends.pipelines.slots import KeptSlots
from tests.backends.support import DTYPES, bits, random_bits
from tests.gpu.test_streams import spin
from tests.support import persisted

pytestmark = pytest.mark.gpu(1)

LIMIT_BYTES = 2**24  # for staging: parts of 341 KiB
BY_GPU = {"p2p.permute-numpy": "gpu", "p2p.memory.staging-limit": LIMIT_BYTES}


def pinned(values):
    memory = np.asarray(Pinned(values.nbytes))[: values.nbytes]
    array = memory.view(values.dtype).reshape(values.shape)
    array[...] = values
    return array


@pytest.mark.parametrize("pins", [(False, False), (True, True)], ids=str)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if is_for_device("gpu", 1, d)], ids=str)
def test_every_dtype_bit_for_bit(dtype, pins):
    queue = HostThroughDeviceQueue(NUMPY, 2**16, None)
    for shape, axes in (((), ()), ((5000,), (0,)), ((301, 407), (1, 0)), ((41, 5, 307), (2, 0, 1))):
        values = random_bits(shape, dtype)
        src = pinned(values) if pins[0] and values.size else values
        out = random_bits([shape[axis] for axis in axes], dtype, seed=1)
        out = pinned(out) if pins[1] else out
        queue.permute(out, src[..., ::-1] if shape else src, axes)
        queue.synchronize()
        assert bits(out) == bits((values[..., ::-1] if shape else values).transpose(axes))


def test_transposes_and_rechunks_of_uneven_blocks():
    values = random_bits((1203, 901, 3), "f8")
    x = da.from_array(values, chunks=((700, 503), (300, 600, 1), 3))
    with dask.config.set(BY_GPU):
        y = dask_p2p.transpose(x, (1, 2, 0), chunks=((401, 500), 3, -1))
        z = dask_p2p.rechunk(x, (600, 901, 2))
    with dask.config.set(pool=None, num_workers=4):
        assert bits(y.compute(scheduler="threads")) == bits(values.transpose(1, 2, 0))
        assert bits(z.compute(scheduler="threads")) == bits(values)
    assert threading.active_count() > 1


def test_no_more_memory_of_the_gpu_is_taken_than_slots_have(monkeypatch):
    import cupy

    values = random_bits((4096, 2048), "f8")
    pool, before = cupy.cuda.MemoryPool(), cupy.cuda.get_allocator()
    monkeypatch.setattr(HostStreams, "_kept_slots", KeptSlots())
    cupy.cuda.set_allocator(pool.malloc)
    try:
        with dask.config.set(BY_GPU):
            y = dask_p2p.transpose(da.from_array(values, chunks=(1024, 2048)))
        assert bits(y.compute(scheduler="sync")) == bits(values.T)
        assert 0 < pool.total_bytes() <= slots_bytes(LIMIT_BYTES) + 512
    finally:
        cupy.cuda.set_allocator(before)


def late(monkeypatch):
    """Delay kernels until long after the queued copies could be done."""
    from dask_p2p.backends.kernels import permute as kernels

    permute = kernels.permute_into

    def permute_into(*args, stream, **kwargs):
        spin(stream, 20_000_000)
        permute(*args, stream=stream, **kwargs)

    monkeypatch.setattr(kernels, "permute_into", permute_into)


@pytest.mark.parametrize("left_out", [None, "_finish_first"])
def test_slots_are_not_overwritten_while_they_are_in_use(monkeypatch, left_out):
    """Without the waits for the copies values are wrong, so the test would find that."""
    queue = HostThroughDeviceQueue(NUMPY, 2**16, None)
    late(monkeypatch)
    if left_out:
        monkeypatch.setattr(queue, left_out, lambda: queue._under_way.popleft())
    values = random_bits((1024, 1024), "f8")
    out = np.zeros((1024, 1024))
    queue.permute(out, values, (1, 0))
    queue.synchronize()
    assert (bits(out) == bits(values.T)) == (left_out is None)


def test_the_host_link_is_measured():
    link = measured_host_link(None)
    assert min(link) > 0


@pytest.mark.gpu(2)
def test_on_a_cluster_outputs_are_pinned(client):
    def pinned_blocks(dask_worker):
        blocks = [b for b in dask_worker.data.values() if isinstance(b, np.ndarray)]
        return sum(map(is_pinned, blocks))

    values = random_bits((4096, 2048), "f4")
    x = persisted(client, da.from_array(values, chunks=(1024, 2048)))
    with dask.config.set({"p2p.permute-numpy": "gpu"}):
        y = persisted(client, dask_p2p.transpose(x))
    assert sum(client.run(pinned_blocks).values()) == y.npartitions
    assert bits(y.compute()) == bits(values.T)
