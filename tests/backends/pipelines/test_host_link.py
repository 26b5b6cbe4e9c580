"""What is measured of a host link, on an emulated GPU whose copies all take a millisecond."""

from __future__ import annotations

import pytest

from dask_p2p.backends.base import HostLink
from dask_p2p.backends.cupy import CUPY, measure_host_link
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

    def noted(timeline, operation, reads=(), writes=()):
        if operation == "a copy engine":  # whose memory of the host nobody has to have written
            do(HOST, "whoever had it", writes=reads) if not gpu.copies else None
            do(timeline, operation, reads, writes)
            gpu.copies.append((timeline, dict(gpu.clocks[timeline]), reads[0].nbytes))
        else:
            do(timeline, operation, reads, writes)

    monkeypatch.setattr(gpu, "do", noted)
    return gpu


def test_rates_are_bytes_by_time(gpu):
    link = CUPY.host_link(None)
    gbs = BYTES / 1e-3 / 1e9
    assert link == pytest.approx(HostLink(gbs, gbs, 2 * gbs))
    assert gpu.pageable_copies == 0
    gpu.check()


def test_memory_that_cannot_be_pinned_is_not_measured(gpu):
    gpu.can_pin = False
    warnings = []
    assert CUPY.host_link(lambda *words: warnings.append(words)) is None
    assert warnings == [("host memory cannot be pinned", "RuntimeError: cudaErrorMemoryAllocation")]
    assert gpu.copies == []


def test_memory_is_given_back(gpu):
    measure_host_link(None)
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
