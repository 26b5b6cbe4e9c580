from __future__ import annotations

from contextlib import ExitStack

import pytest
from distributed import Client, LocalCluster

from dask_p2p.sections.gpu import halo_windows
from tests.sections.emulated import emulated_gpu


@pytest.fixture(scope="module")
def client(request):
    """A client of the module's own cluster with nannies if the module has `CLUSTER`."""
    with ExitStack() as stack:
        if kwargs := getattr(request.module, "CLUSTER", None):
            cluster = stack.enter_context(LocalCluster(**kwargs, dashboard_address=":0"))
        else:
            cluster = request.getfixturevalue("cluster")
        yield stack.enter_context(Client(cluster))


@pytest.fixture
def gpu(monkeypatch):
    """A recorder that replaces CuPy."""
    return emulated_gpu(monkeypatch)


@pytest.fixture
def opened(monkeypatch):
    """For each exchange that is made, the ranks whose windows it reads."""
    found, original = [], halo_windows.opened

    def noted(*args):
        own, by_rank = original(*args)
        found.append(sorted(by_rank))
        return own, by_rank

    monkeypatch.setattr(halo_windows, "opened", noted)
    return found
