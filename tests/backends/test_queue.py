from __future__ import annotations

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.backends import Timer
from dask_p2p.backends.cupy import CUPY
from dask_p2p.backends.device_queue import UnreadArrays
from dask_p2p.backends.host import HostQueue
from dask_p2p.backends.kernels.copies import Pitch, engine_pitch, find_pitch
from dask_p2p.backends.numpy import NUMPY
from tests.clock import Clock


@st.composite
def regions(draw):
    """A box of a block, in some order of axes."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    block = np.arange(int(np.prod(shape)), dtype="i4").reshape(shape)
    block = block.transpose(draw(st.permutations(range(len(shape)))))
    bounds = [draw(st.tuples(st.integers(0, n), st.integers(0, n))) for n in block.shape]
    return block[tuple(slice(min(b), max(b)) for b in bounds)]


@given(regions())
def test_a_pitched_copy_gives_the_elements_in_order(region):
    pitch = find_pitch(region.shape, region.strides, region.itemsize)
    if region.size == 0:
        assert pitch is None
        return
    if region.flags.c_contiguous:
        assert pitch == Pitch(1, region.nbytes, region.nbytes)
    if pitch is None:
        return
    assert pitch.rows * pitch.run_bytes == region.nbytes
    base = region
    while base.base is not None:
        base = base.base
    raw = base.reshape(-1).view("u1")
    start = region.__array_interface__["data"][0] - raw.__array_interface__["data"][0]
    runs = [raw[start + row * pitch.stride_bytes :][: pitch.run_bytes] for row in range(pitch.rows)]
    assert np.concatenate(runs).tobytes() == np.ascontiguousarray(region).tobytes()


@pytest.mark.parametrize(
    ("rows", "stride_bytes", "run_bytes", "is_copied"),
    [
        (9, 4096, 128, True),
        (9, 4096, 124, False),  # kernels are quicker
        (1, 4096, 4, True),
        (2, 2**31 - 4, 128, True),
        (2, 2**31, 128, False),  # CUDA refuses it
    ],
)
def test_what_copy_engines_are_for(rows, stride_bytes, run_bytes, is_copied):
    pitch = engine_pitch((rows, run_bytes // 4), (stride_bytes, 4), 4)
    assert (pitch is not None) == is_copied


@pytest.mark.gpu
def test_the_device_queue_fills():
    import cupy

    queue = CUPY.queue()
    boxes = (slice(2, 5), slice(0, 1)), (slice(0, 5), slice(3, 4)), (slice(0, 0), slice(0, 2))
    for item in (np.float32(-0.0), np.complex128(1 + 2j), np.bool_(True)):
        for value in (np.asarray(item), np.zeros((), item.dtype)):
            expected = np.ones((5, 4), value.dtype)
            dst = cupy.asarray(expected)
            for box in boxes:
                expected[box] = value
                queue.fill(dst[box], value)
            queue.synchronize()
            assert dst.get().tobytes() == expected.tobytes()


def test_the_host_queue_tells_what_work_took():
    queue = HostQueue(NUMPY)
    clock = Clock()
    timer, second_timer = Timer(clock=clock), Timer(clock=clock)
    for _ in range(2):
        with queue.timing(timer):
            clock.advance(2)
    with queue.timing(second_timer):
        clock.advance(1)
    assert (timer.seconds, second_timer.seconds) == (4, 1)


@pytest.mark.gpu
def test_the_device_queue_tells_what_work_took():
    import cupy

    queue = CUPY.queue(leave_bandwidth=True)
    src = cupy.ones((8192, 8192), "f4")
    region = src[:, :4096]
    queue.wait_until_written([src], any_stream=True)
    dst = queue.empty((8192, 8192), "f4")
    half = queue.empty((4096, 8192), "f4")
    local, kernels, copies, dropped = (Timer() for _ in range(4))
    for _ in range(100):  # more than are timed at once
        with queue.timing(local):
            queue.permute(dst, src, (1, 0), concurrent=True)
        with queue.timing(copies):
            part = queue.prefetch(region, region.nbytes)
        with queue.timing(kernels):
            queue.permute_prefetched(half, part, (1, 0))
        queue.permute(dst, src, (1, 0))  # is not timed
    with queue.timing(dropped):
        queue.permute_and_drop(half, region.get(), (1, 0))
    queue.synchronize()
    seconds = [timer.seconds for timer in (local, kernels, copies, dropped)]
    assert min(seconds) > 0
    queue.synchronize()
    assert [timer.seconds for timer in (local, kernels, copies, dropped)] == seconds


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 64), (1000, 300), (7, 5, 300), (1, 1)])
@pytest.mark.parametrize("slot_bytes", [0, 100, 2**20])
def test_the_device_queue(shape, slot_bytes):
    import cupy

    src = cupy.arange(int(np.prod(shape)), dtype="f4").reshape(shape)
    axes = tuple(reversed(range(len(shape))))
    queue = CUPY.queue(leave_bandwidth=True)
    queue.wait_until_written([src], any_stream=True)
    results = []
    for permute in 10 * (  # more than there are slots
        lambda dst: queue.permute_prefetched(dst, queue.prefetch(src, slot_bytes), axes),
        lambda dst: queue.permute(dst, src, axes, concurrent=True),
        lambda dst: queue.permute_and_drop(dst, src.get(), axes),
        lambda dst: queue.permute_and_drop(dst, src.copy(), axes),
    ):
        results.append(queue.empty(shape[::-1], "f4"))
        permute(results[-1])
    queue.synchronize()
    expected = src.get().transpose(axes)
    for dst in results:
        np.testing.assert_array_equal(dst.get(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [slice(0, 1000), slice(3, 700), slice(5, 20), slice(7, 8)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_packing_on_a_device(columns, order):
    import cupy

    src = cupy.arange(3000 * 1000, dtype="i4").reshape(3000, 1000)
    region = cupy.asarray(src, order=order)[1:2999, columns]
    queue = CUPY.queue(leave_bandwidth=True)
    queue.wait_until_written([region], any_stream=False)
    packed = queue.scratch(region.shape, region.dtype)
    wait = queue.pack(packed, region)
    wait()
    with cupy.cuda.Stream(non_blocking=True):  # which waits for nothing by itself
        values = packed.get()
    np.testing.assert_array_equal(values, src.get()[1:2999, columns])


@pytest.mark.gpu
def test_rows_that_are_further_apart_than_copy_engines_go():
    import cupy

    block = cupy.empty((2, 2**29), "f4")
    region = block[:, 5:1005]
    region[...] = cupy.arange(2000, dtype="f4").reshape(2, 1000)
    queue = CUPY.queue(leave_bandwidth=True)
    queue.wait_until_written([block], any_stream=True)
    dst, packed = queue.empty((1000, 2), "f4"), queue.scratch((2, 1000), "f4")
    queue.permute_prefetched(dst, queue.prefetch(region, 2**20), (1, 0))
    queue.pack(packed, region)()
    queue.synchronize()
    np.testing.assert_array_equal(dst.get(), region.get().T)
    np.testing.assert_array_equal(packed.get(), region.get())


class Read:
    """Stands for an event: happens when it is waited for, and the array must still be there."""

    def __init__(self, array):
        self.array = weakref.ref(array)
        self.done = False

    def synchronize(self):
        assert self.array() is not None, "its memory is another's before it has been read"
        self.done = True


def test_what_is_being_read_is_kept_until_then():
    being_read = UnreadArrays(2)
    events = []
    for _ in range(5):
        array = np.empty(3)
        events.append(Read(array))
        being_read.add(array, events[-1])
        del array
    assert [event.done for event in events] == [True, True, True, False, False]
    assert [event.array() is None for event in events] == [True, True, True, False, False]
    events[3].done = True  # by itself
    array = np.empty(3)
    being_read.add(array, Read(array))
    assert events[3].array() is None
    assert events[4].array() is not None
    being_read.clear()
    assert events[4].array() is None


@pytest.mark.gpu
def test_what_was_dropped_is_kept_until_it_is_read():
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    queue = CUPY.queue()
    side = 8192
    dst = queue.empty((side, side), "f8")
    busy = [cupy.ones((side, side)) for _ in range(2)]
    queue.wait_until_written(busy, any_stream=True)
    for _ in range(20):  # kernels that the one to come has to wait for
        queue.permute(busy[0], busy[1], (1, 0))
    queue.permute_and_drop(dst, cupy.zeros((side, side)), (1, 0))
    # The pool would give out the same memory again.
    again = cupy.cuda.alloc(side * side * 8)
    with cupy.cuda.Stream(non_blocking=True):
        cupy.ndarray((side, side), "f8", again)[...] = 7
    queue.synchronize()
    assert not dst.any()
