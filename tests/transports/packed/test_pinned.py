"""``pinned`` between two workers of one process: NumPy blocks, and CuPy blocks of made-up GPUs."""

import gc
import os
import threading
import weakref
from collections import deque
from contextlib import suppress
from unittest.mock import Mock

import numpy as np
import pytest

from dask_p2p.errors import TransferError
from dask_p2p.transports import buffers
from dask_p2p.transports.buffers import Segment, Segments
from dask_p2p.transports.pinned import PinnedTransport
from tests.simulation.streams import HOST
from tests.support import BOUND_S
from tests.transports.conformance import FLOAT64, PackedConformance
from tests.transports.loopback import wait_until
from tests.usage import usage

TRANSPORT = PinnedTransport
WHOLE = ((0, 6), (0, 10))


SEGMENTS = weakref.WeakSet()


@pytest.fixture(autouse=True)
def _note_segments(monkeypatch):
    """Note which segments are made."""
    make = Segment.make

    def note(size_bytes):
        segment = make(size_bytes)
        SEGMENTS.add(segment)
        return segment

    SEGMENTS.clear()
    monkeypatch.setattr(Segment, "make", note)


def inodes():
    """Of which files there are segments that were made here."""
    return [segment.name.inode for segment in list(SEGMENTS)]


def shared_files():
    """Inodes of the segments that this process has open or mapped."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = {line.split()[4] for line in maps if buffers.FILE_NAME in line}
    opened = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            if buffers.FILE_NAME in os.readlink(f"/proc/self/fd/{fd}"):
                opened.add(str(os.stat(f"/proc/self/fd/{fd}").st_ino))
    return mapped | opened


class Pinned(PackedConformance):
    test_a_holder_that_is_closing_refuses = None

    def test_large_regions_come_in_parts(self, setup):
        array = np.arange(300 * 400.0).reshape(300, 400)
        setup.put("block", array)
        calls = setup.host.calls
        region = self.read(setup, "block", array, ((7, 290), (3, 400)), part_bytes=2**16)
        np.testing.assert_array_equal(region, array[7:290, 3:])
        assert calls.count("p2p_pinned_read") >= 283 * 397 * 8 / 2**16

    def test_memory_is_used_again(self, setup, block):
        key, array = block
        mapped = set()
        for i in range(20):
            setup.put(key, array + i + 1)
            region = self.read(setup, key, array, WHOLE)
            np.testing.assert_array_equal(region, array + i + 1)
            del region
            # The thread that has answered may let go of the memory a little later.
            wait_until(lambda: setup.reader.segments[setup.kind].idle_bytes > 0)
            mapped.update(setup.serving.mapped.values())
        assert len(mapped) == 1, "the holder maps it once"

    def test_a_reader_that_left(self, setup, loop, block):
        key, array = block
        assert setup.reader.obstacle("holder", setup.kind, array.dtype) is None
        self.read(setup, key, array, WHOLE)
        loop.call(setup.serving.on_worker_left, "reader")
        loop.call(setup.reader.on_worker_left, "holder")
        wait_until(lambda: usage(setup.serving)["mapped"] == 0)
        calls = setup.host.calls
        calls.clear()
        assert setup.reader.obstacle("holder", setup.kind, array.dtype) is None
        assert len(calls) == 1, "another worker may be there"
        self.read(setup, key, array, WHOLE)

    def test_the_probe(self, setup):
        setup.reader.probe("holder", setup.kind)
        original = setup.host.probes.block
        setup.host.probes.block = lambda key: original(key) ^ 1
        with pytest.raises(TransferError, match="65536 of 65536 bytes of a probe arrived changed"):
            setup.reader.probe("holder", setup.kind)

    @pytest.mark.parametrize("why", ["it takes too long", "the reading is closed"])
    def test_memory_of_a_call_without_an_answer_is_not_used_again(self, setup, block, why):
        """The holder is late, and writes when the reader has gone on."""
        key, array = block
        pack = setup.serving.pack_all
        is_packing, go_on, written = (threading.Event() for _ in range(3))

        def late(*args):
            is_packing.set()
            assert go_on.wait(BOUND_S)
            try:
                return pack(*args)
            finally:
                written.set()

        setup.serving.pack_all = late
        timeout_s = 0.1 if why == "it takes too long" else 20.0
        remote = self.open(setup, key, array, WHOLE, request_timeout_s=timeout_s)
        pending = remote.request()
        assert is_packing.wait(BOUND_S)
        if why == "it takes too long":
            with pytest.raises(TransferError, match="no answer from holder"):
                pending.result(BOUND_S)
        remote.close()
        wait_until(lambda: usage(setup.reader)["requested"] == 0)
        del remote, pending
        gc.collect()
        setup.serving.pack_all = pack
        second_remote = self.open(setup, key, array, WHOLE)
        region = second_remote.request().result(BOUND_S)
        setup.put(key, array + 1)
        go_on.set()
        assert written.wait(BOUND_S)
        np.testing.assert_array_equal(setup.to_numpy(region), array)
        second_remote.close()

    def test_closing_lets_go_of_all_memory(self, setup, block, loop):
        before = shared_files()
        self.read(setup, *block, WHOLE)
        assert shared_files() - before
        for transport in (setup.reader, setup.serving):
            loop.run(transport.close())
        wait_until(lambda: shared_files() <= before)  # a thread unpins it


class TestPinned(Pinned):
    def test_no_more_memory_is_lent_than_a_task_may_hold(self, setup):
        """Whatever the sizes of the regions are: answers are counted, and not regions."""
        array = np.arange(100 * 2**10.0).reshape(100, 2**10)
        setup.put("block", array)
        thin = [((i, i + 1), (j, j + 4)) for i in range(8) for j in range(0, 2**10, 16)]
        wide = [((i, i + 1), (0, 2**10)) for i in range(8)]
        largest_bytes = 0
        for boxes in (thin, wide, wide + thin, thin + wide, (thin[:20] + wide) * 3):
            remote = self.open(setup, "block", array, *boxes, part_bytes=2**13)
            ahead = deque()
            for region in remote.reading:
                ahead.append(region)
                del region
                largest_bytes = max(largest_bytes, len(inodes()))
                while len(ahead) > remote.reading.ahead:
                    region = ahead.popleft()
                    expected = array[tuple(slice(*pair) for pair in region.box)]
                    np.testing.assert_array_equal(region.result(BOUND_S), expected)
                    del region
            while ahead:
                ahead.popleft().result(BOUND_S)
            remote.close()
        in_flight = setup.reader.footprint(self.options, "numpy").parts_in_flight
        assert in_flight <= largest_bytes <= in_flight + 1

    def test_a_holder_unmaps_what_its_reader_gave_up(self, setup, block):
        regions = []
        for _ in range(4):
            remote = self.open(setup, *block, WHOLE)
            regions.append(remote.request().result(BOUND_S))
            remote.close()
        assert usage(setup.serving)["mapped"] == 4
        setup.reader.segments[setup.kind].clear()
        del regions[1:], remote
        setup.reader.segments[setup.kind].clear()
        self.read(setup, *block, WHOLE)
        assert usage(setup.serving)["mapped"] == 2


# --- what is in the way ---


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kernel": "another"}, "different hosts"),
        ({"pid_namespace": "another"}, "different PID namespaces"),
        ({"pid": 2**22 + 1}, "cannot be opened"),
        ({"fd": 10**6}, "cannot be opened"),
        ({"inode": 1}, "does not match its name"),
        ({"size_bytes": 1024}, "does not match its name"),
    ],
    ids=str,
)
def test_memory_that_a_holder_cannot_open_is_an_obstacle(setup, monkeypatch, change, words):
    make = Segment.make

    def elsewhere(size_bytes):
        segment = make(size_bytes)
        segment.name = segment.name._replace(**change)
        return segment

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "make", elsewhere)
        assert words in str(setup.reader.obstacle("holder", "numpy", np.dtype("f8")))
        calls = setup.host.calls.copy()
        assert words in str(setup.reader.obstacle("holder", "numpy", np.dtype("f8")))
        assert setup.host.calls == calls, "it is asked once"


def test_a_holder_that_does_not_answer_is_asked_again(setup):
    handler = setup.host.handlers.pop("p2p_pinned_read")
    assert setup.reader.obstacle("holder", "numpy", np.dtype("f8")).code == "no-answer"
    setup.host.handlers["p2p_pinned_read"] = handler
    assert setup.reader.obstacle("holder", "numpy", np.dtype("f8")) is None


def test_where_memory_is_full_other_ways_are_left(setup, monkeypatch):
    """Said before anything is written there: later it would be a signal."""
    array = np.ones((3, 4))
    setup.put("block", array)
    before = shared_files()
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device")
        patch.setattr(os, "posix_fallocate", Mock(side_effect=full))
        assert "No space left" in str(setup.reader.obstacle("holder", "numpy", np.dtype("f8")))
        with pytest.raises(TransferError, match=r"no memory to share: .* No space left"):
            PackedConformance().read(setup, "block", array, ((0, 3), (0, 4)))
    assert shared_files() <= before
    assert usage(setup.reader) == {"opened": 0, "requested": 0, "mapped": 0}


def test_memory_is_not_mapped_for_what_cannot_be_packed(setup, loop):
    setup.put(("x-1", 0, 0), np.ones((6, 10)))
    segment = Segment.make(4096)
    blocks, where = [(("x-1", 0, 0), (6, 10))], tuple(segment.name)
    request = {"blocks": blocks, "parts": [(0, WHOLE)], "where": where, **FLOAT64}
    for change in ({"dtype": "float32 <f4"}, {"blocks": [("other", (6, 10))]}, {"item_bytes": 4}):
        loop.run(setup.host.handlers["p2p_pinned_read"](**request | change))
    assert usage(setup.serving)["mapped"] == 0


# --- an emulated GPU ---


@pytest.fixture
def on_gpu(gpu, setup, loop, monkeypatch):
    """The hosts, with blocks on the emulated GPU, which knows that both map the same memory."""
    access, make, open_segment = gpu.access, Segment.make, Segment.open
    distances = weakref.WeakKeyDictionary()  # in words, to where the reader has mapped a segment

    def access_mapped(work, timeline, clock, words, is_write):
        for segment, distance in list(distances.items()):
            if words and 0 <= 8 * min(words) - segment.ptr < segment.bytes.nbytes:
                words = [word + distance for word in words]
        access(work, timeline, clock, words, is_write)

    def open_mapped(name):
        segment = open_segment(name)
        (source,) = (source for source in list(SEGMENTS) if source.name == name)
        distances[segment] = (source.ptr - segment.ptr) // 8
        return segment

    def make_zeros(size_bytes):
        segment = make(size_bytes)
        gpu.do(HOST, "the system", writes=[segment.bytes])
        return segment

    monkeypatch.setattr(gpu, "access", access_mapped)
    monkeypatch.setattr(Segment, "make", make_zeros)
    monkeypatch.setattr(Segment, "open", open_mapped)
    monkeypatch.setattr(buffers, "_per_thread", threading.local())
    setup.gpu, setup.kind, setup.to_numpy = gpu, "cupy", gpu.read

    def put(key, array):
        data = gpu.written(np.ascontiguousarray(array).reshape(-1).view("u1"))
        setup.host.blocks[key] = data.view(array.dtype).reshape(array.shape)

    setup.put = put
    yield setup
    for transport in (setup.reader, setup.serving):
        loop.run(transport.close())
    setup.host.blocks.clear()
    # A thread that has just answered may let go of what it answered with a little later.
    wait_until(lambda: gc.collect() is not None and gpu.pinned == {})
    assert gpu.pageable_copies == 0
    gpu.check()


class TestPinnedOnGpus(Pinned):
    @pytest.fixture
    def setup(self, on_gpu):
        return on_gpu

    test_the_probe = None  # a kernel checks it on real GPUs
    test_dtypes_of_numpy = None

    def test_memory_that_cannot_be_pinned(self, setup, block):
        setup.gpu.can_pin = False
        self.refused(setup, block, "no memory to share: cudaErrorMemory")
        setup.gpu.can_pin = True
        self.read(setup, *block, WHOLE)


def test_segments_of_another_size_make_room():
    """Those of an earlier reading would have each one of this reading made anew."""
    segments = Segments("numpy", 4 * 2**16)
    for size_bytes in (2**17, 2**16, 2**18):
        lent = [segments.lend(size_bytes) for _ in range(2**18 // size_bytes)]
        inodes = {segment.name.inode for segment, _ in lent}
        del lent
        assert segments.idle_bytes == 2**18
        again = [segments.lend(size_bytes) for _ in inodes]
        assert {segment.name.inode for segment, _ in again} == inodes, "none was made anew"
        del again


def test_memory_of_a_segment_does_not_become_shorter():
    segment = Segment.make(4096)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(segment.name.fd, 0)
