"""In which order a GPU's queue has work done, without a GPU: every access after those before it."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.backends import Timer
from dask_p2p.backends.base import SLOTS
from dask_p2p.backends.cupy import CUPY
from dask_p2p.backends.device_queue import DeviceQueue, UnreadArrays
from dask_p2p.backends.host import HostQueue
from dask_p2p.backends.kernels.copies import Pitch, engine_pitch, find_pitch
from dask_p2p.backends.numpy import NUMPY
from tests.backends.support import cupy
from tests.clock import Clock
from tests.simulation.streams import RaceError, Stream

ROWS, COLUMNS = 4, 16  # of a part: a row of float64 is what a copy engine takes
PARTS = 2 * SLOTS + 1


def values(number):
    return np.arange(ROWS * COLUMNS, dtype="f8").reshape(ROWS, COLUMNS) + 1000 * number


def assembled(gpu):
    """Blocks of which each row of parts came in another way, and what they should be."""
    queue = DeviceQueue("cupy")
    timer = Timer()
    peers = [gpu.written(values(n)) for n in range(PARTS)]
    local = gpu.written(values(PARTS))
    out = queue.empty((COLUMNS, (PARTS + 4) * ROWS), "f8")
    places = [out[:, n * ROWS : (n + 1) * ROWS] for n in range(PARTS + 4)]
    ahead = []
    for n, peer in enumerate(peers):  # copied by engines, one slot ahead
        with queue.timing(timer):
            ahead.append((n, queue.prefetch(peer, peer.nbytes)))
        if len(ahead) == SLOTS:
            at, part = ahead.pop(0)
            queue.permute_prefetched(places[at], part, (1, 0))
    queue.permute(places[PARTS], local, (1, 0), concurrent=True)
    for at, part in ahead:
        queue.permute_prefetched(places[at], part, (1, 0))
    for n in range(1, 3):  # that came by messages, and are dropped at once
        received = gpu.written(values(PARTS + n), gpu.cupy.cuda.Stream.null)  # as Dask makes it
        queue.permute_and_drop(places[PARTS + n], received, (1, 0))
        del received
    queue.fill(places[PARTS + 3], np.full((), 7.0))
    queue.synchronize()
    result = gpu.read(out)  # by a peer, which waits for nothing
    gpu.check()
    expected = np.concatenate(
        [*(values(n).T for n in range(PARTS + 3)), np.full((COLUMNS, ROWS), 7.0)], axis=1
    )
    return result, expected


def test_all_is_done_in_order(gpu):
    for _ in range(3):  # on memory that is used again
        result, expected = assembled(gpu)
        np.testing.assert_array_equal(result, expected)
        gc.collect()
    gpu.check()


def test_an_output_waits_for_what_the_null_stream_still_does_with_its_memory(gpu):
    """A task let go of memory while its kernel was still to run, as CuPy's pool allows."""
    gone = gpu.empty((COLUMNS, (PARTS + 4) * ROWS), "f8")
    gpu.do("null", "a late kernel", writes=[gone])
    del gone
    assembled(gpu)


def test_packed_regions_are_there_when_they_are_waited_for(gpu):
    queue = DeviceQueue("cupy", leave_bandwidth=True)
    block = gpu.written(values(0))
    for src in (block, block[:, :3]):  # by an engine, by a kernel
        packed = queue.scratch(src.shape, "f8")
        queue.pack(packed, src)()
        np.testing.assert_array_equal(gpu.read(packed), values(0)[:, : src.shape[1]])
        np.testing.assert_array_equal(queue.to_host(packed), values(0)[:, : src.shape[1]])
        del packed
    queue.synchronize()
    gpu.check()


@pytest.mark.parametrize("axes", [(2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_regions_whose_axes_lie_otherwise_come_through_slots(gpu, axes):
    """As of a spectrum, whose transformed axis lies last."""
    queue = DeviceQueue("cupy")
    array = np.arange(8 * 6 * 40, dtype="f8").reshape(8, 6, 40)
    region = gpu.written(array)[:, :, 3:23].transpose(axes)  # runs of 160 bytes
    out = queue.empty(region.shape[::-1], "f8")
    part = queue.prefetch(region, region.nbytes)
    assert part.slot is not None
    queue.permute_prefetched(out, part, (2, 1, 0))
    queue.synchronize()
    np.testing.assert_array_equal(gpu.read(out), array[:, :, 3:23].transpose(axes).T)
    gpu.check()


def test_parts_that_are_larger_than_the_slots_are_read_in_place(gpu):
    """Those of one holder may all be smaller than those of the next."""
    queue = DeviceQueue("cupy")
    out = queue.empty((3 * ROWS, COLUMNS), "f8")
    peers = [gpu.written(values(0)), gpu.written(np.concatenate([values(1), values(2)]))]
    for place, peer in zip((out[:ROWS], out[ROWS:]), peers, strict=True):
        queue.permute_prefetched(place, queue.prefetch(peer, peer.nbytes), (0, 1))
    queue.synchronize()
    np.testing.assert_array_equal(gpu.read(out), np.concatenate([*map(values, range(3))]))
    gpu.check()


def test_after_a_lack_of_memory_slots_are_tried_again(gpu):
    queue, peer = DeviceQueue("cupy"), gpu.written(values(0))
    out = queue.empty(peer.shape, "f8")
    for limit_bytes, goes_through_a_slot in ((gpu.live_bytes, False), (2**20, True)):
        gpu.limit_bytes = limit_bytes
        part = queue.prefetch(peer, peer.nbytes)
        assert (part.slot is not None) == goes_through_a_slot
        queue.permute_prefetched(out, part, (0, 1))
        queue.synchronize()


def test_work_within_another_stream(gpu):
    """It follows what that was given before, and what that is given after follows it."""
    stream, queue = gpu.stream(), DeviceQueue("cupy", has_own_streams=True)
    src, out = gpu.empty((ROWS, COLUMNS), "f8"), queue.empty((COLUMNS, 3 * ROWS), "f8")
    places = [out[:, n * ROWS : (n + 1) * ROWS] for n in range(3)]
    for number in range(3):
        gpu.do(stream.name, "a task", writes=[src])
        src.values[...] = values(number)
        with queue.within(stream):
            queue.permute(places[0], src, (1, 0), concurrent=True)
            queue.permute(places[1], src, (1, 0))
            queue.permute_prefetched(places[2], queue.prefetch(src, src.nbytes), (1, 0))
        gpu.do(stream.name, "a task", reads=[out])
        np.testing.assert_array_equal(out.values, np.tile(values(number).T, 3))

    def fails():
        with queue.within(stream):
            queue.permute(places[0], src, (1, 0))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    gpu.do(stream.name, "a task", writes=[src])
    queue.synchronize()


def test_streams_of_a_queues_own(gpu):
    streams = []
    for has_own_streams in (False, False, True, True):
        before = len(gpu.streams)
        queue = DeviceQueue("cupy", False, has_own_streams)
        streams.append((len(gpu.streams) - before, {stream.name for stream in queue.reading}))
    (stream_count, of_thread), (again, same), *queues = streams
    assert (stream_count - 1, again, of_thread) == (4, 0, same), "besides one for memory"
    assert [stream_count for stream_count, _ in queues] == [4, 4]
    assert len(of_thread.union(*(names for _, names in queues))) == 3 * len(of_thread)


@pytest.mark.parametrize(("owner", "method"), [(UnreadArrays, "add"), (Stream, "synchronize")])
def test_without_its_order_a_race_is_found(gpu, monkeypatch, owner, method):
    """So the tests above would fail if arrays were dropped unread, or streams not waited for."""
    monkeypatch.setattr(owner, method, lambda *args: None)
    with pytest.raises(RaceError):
        test_all_is_done_in_order(gpu)


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
    src = cupy.arange(3000 * 1000, dtype="i4").reshape(3000, 1000)
    region = cupy.asarray(src, order=order)[1:2999, columns]
    queue = CUPY.queue(leave_bandwidth=True)
    queue.wait_until_written([region], any_stream=False)
    packed = queue.scratch(region.shape, region.dtype)
    queue.pack(packed, region)()
    with cupy.cuda.Stream(non_blocking=True):  # which waits for nothing by itself
        values = packed.get()
    np.testing.assert_array_equal(values, src.get()[1:2999, columns])


@pytest.mark.gpu
def test_rows_that_are_further_apart_than_copy_engines_go():
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
