"""Output blocks of NumPy arrays that an emulated GPU permutes."""

from __future__ import annotations

import dask
import dask.array as da
import pytest

import dask_p2p
from dask_p2p.backends.device import gpu_obstacle
from dask_p2p.errors import NoDeviceError
from tests.simulation.streams import HOST


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


@pytest.mark.skipif(gpu_obstacle() is None, reason="there is a GPU")
def test_workers_of_a_cluster_report_it(client):
    with dask.config.set({"p2p.permute-numpy": "gpu"}):
        y = dask_p2p.transpose(da.ones((4, 4), chunks=2))
    with pytest.raises(NoDeviceError, match=r"on worker tcp://.* CuPy cannot be"):
        y.compute()
    with pytest.raises(NoDeviceError, match="on this process CuPy cannot be"):
        y.compute(scheduler="sync")
