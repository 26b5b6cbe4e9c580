import pytest

from dask_p2p.sections.gpu import halo_windows
from dask_p2p.sections.gpu.regions import GpuRegions
from dask_p2p.sections.wire.connections import Connections
from tests.sections.emulated import emulated_gpu
from tests.support import noted


@pytest.fixture
def gpu(monkeypatch):
    """An emulated GPU that all ranks use."""
    return emulated_gpu(monkeypatch)


@pytest.fixture
def two_hosts(monkeypatch):
    """Put the first two ranks on one host, and the others on another one."""

    def is_on_other_host(connections, rank):
        return rank // 2 != connections.rank_and_size[0] // 2

    monkeypatch.setattr(Connections, "is_on_other_host", is_on_other_host)


@pytest.fixture
def opened(monkeypatch):
    """For each exchange that is made, the ranks whose windows it reads."""
    openings, original = [], halo_windows.opened

    def make(*args):
        window, by_rank = original(*args)
        openings.append(sorted(by_rank))
        return window, by_rank

    monkeypatch.setattr(halo_windows, "opened", make)
    return openings


@pytest.fixture
def in_place(monkeypatch):
    """The ranks that read regions in place."""
    return noted(monkeypatch, GpuRegions, "_bring_directly", lambda regions, *_: regions)
