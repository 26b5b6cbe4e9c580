"""What is measured of a host link, on an emulated GPU whose copies all take a millisecond."""

from __future__ import annotations

import pytest

from dask_p2p.backends.base import HostLink
from dask_p2p.backends.cupy import CUPY, measured_host_link
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.backends.pipelines import HostStreams
from tests.simulation.streams import HOST, drop_host_slots

BYTES = 2**12
REPEATS = 3  # of each measurement


@pytest.fixture
def gpu(gpu, monkeypatch):
    monkeypatch.setattr("dask_p2p.backends.cupy.LINK_COPY_BYTES", BYTES)
    monkeypatch.setattr("dask_p2p.backends.cupy.LINK_COPIES", REPEATS)
    gpu.copies = []
    do = gpu.do

    def noted(timeline, what, reads=(), writes=()):
        if what == "a copy engine":  # whose memory of the host nobody has to have written
            do(HOST, "whoever had it", writes=reads) if not gpu.copies else None
            do(timeline, what, reads, writes)
            gpu.copies.append((timeline, dict(gpu.clocks[timeline]), reads[0].nbytes))
        else:
            do(timeline, what, reads, writes)

    monkeypatch.setattr(gpu, "do", noted)
    return gpu


def test_rates_are_bytes_by_time(gpu):
    link = CUPY.host_link(None)
    gbs = BYTES / 1e-3 / 1e9
    assert link == pytest.approx(HostLink(gbs, gbs, 2 * gbs))
    assert gpu.pageable_copies == 0
    gpu.check()


def test_both_copies_are_under_way_at_once(gpu):
    measured_host_link(None)
    names = {what: stream.name for what, stream in HostStreams(None).streams.items()}
    assert {timeline for timeline, *_ in gpu.copies} == {names["up"], names["down"]}
    (_, up, _), (_, down, _) = gpu.copies[-2:]
    assert up[names["down"]] < down[names["down"]], "it does not wait for the other"
    assert down[names["up"]] < up[names["up"]]
    assert [nbytes for *_, nbytes in gpu.copies] == [2 * BYTES] + 4 * REPEATS * [BYTES]


def test_the_time_is_that_of_both(gpu, monkeypatch):
    """The last event comes after all copies, and the first one before."""
    measured = []

    def elapsed(start, stop):
        assert start.clock
        assert all(gpu.clocks[HOST][other] >= tick for other, tick in stop.clock.items())
        measured.append((dict(start.clock), dict(stop.clock), len(gpu.copies)))
        return 1.0

    monkeypatch.setattr(gpu.cupy.cuda, "get_elapsed_time", elapsed)
    measured_host_link(None)
    assert len(measured) == 3 * REPEATS
    for number, (start, stop, count) in enumerate(measured):
        copies = 2 if number >= 2 * REPEATS else 1
        for timeline, clock, _ in gpu.copies[count - copies : count]:
            assert start.get(timeline, 0) < clock[timeline] <= stop[timeline]
            assert all(clock[other] >= tick for other, tick in start.items()), "it begins after"


def test_memory_that_cannot_be_pinned_is_not_measured(gpu):
    gpu.can_pin = False
    said = []
    assert CUPY.host_link(lambda *words: said.append(words)) is None
    assert said == [("host memory cannot be pinned", "RuntimeError: cudaErrorMemoryAllocation")]
    assert gpu.copies == []


def test_memory_is_given_back(gpu):
    measured_host_link(None)
    assert gpu.live_bytes == 2 * BYTES, "it is kept for the next use"
    HostStreams.drop_slots()
    drop_host_slots()
    assert (gpu.live_bytes, gpu.pinned) == (0, {})
    gpu.check()


def test_without_a_gpu_there_is_nothing_to_measure(gpu):
    assert NUMPY.host_link(None) is None
    gpu.cupy.cuda.runtime.getDeviceCount = lambda: 0
    assert CUPY.host_link(None) is None
    assert gpu.copies == []
