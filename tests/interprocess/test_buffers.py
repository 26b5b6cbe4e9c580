from __future__ import annotations

import gc

import pytest

from dask_p2p.backends.device import private_stream
from dask_p2p.transports.buffers import Buffers


def test_no_more_than_the_limit_is_kept():
    buffers = Buffers("numpy", 2**17)
    arrays = [buffers.take((2**16,), "u1") for _ in range(5)]
    arrays.clear()
    assert buffers.idle_bytes == 2**17
    buffers.clear()
    assert buffers.idle_bytes == 0


@pytest.mark.gpu
def test_device_buffers_come_back():
    import cupy

    buffers = Buffers("cupy", 2**30)
    array = buffers.take((1000, 1000), "c16")
    where = array.data.ptr
    view = array[5:].T
    del array
    gc.collect()
    assert buffers.idle_bytes == 0
    view[...] = 1
    cupy.cuda.runtime.deviceSynchronize()
    del view
    assert buffers.idle_bytes == 16 * 2**20
    assert buffers.take((10, 10), "f4").data.ptr != where
    assert buffers.take((2**24,), "u1").data.ptr == where


@pytest.mark.gpu
def test_what_the_last_owner_queued_is_over():
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    side = 8192
    with private_stream():  # whose memory a pool gives it again
        last = cupy.zeros((side, side), "f8")
        where = last.data.ptr
        for _ in range(20):
            last += 1
        del last
    array = Buffers("cupy", 0).take((side, side), "f8")
    assert array.data.ptr == where
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array[...] = -1
        stream.synchronize()
    cupy.cuda.runtime.deviceSynchronize()
    assert (array == -1).all()
