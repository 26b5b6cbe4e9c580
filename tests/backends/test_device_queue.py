"""In which order a GPU's queue has work done, without a GPU: every access after those before it."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from dask_p2p.backends import Timer
from dask_p2p.backends.base import SLOTS
from dask_p2p.backends.device_queue import DeviceQueue, UnreadArrays
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
    shape = (COLUMNS, (PARTS + 4) * ROWS)
    gone = gpu.empty(shape, "f8")
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
