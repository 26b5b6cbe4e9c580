"""One cluster on two GPUs for all tests of a module that do it no harm."""

from pathlib import Path

import pytest

import dask_p2p
from tests.faults.support import Gate
from tests.gpu.support import POOL, shared_cluster


def pytest_collection_modifyitems(items):
    """Give all tests of this folder time, and let pass the warnings of libraries for GPUs."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session", autouse=True)
def _sharing(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--share-gpu"):
            patch.setattr(dask_p2p, "local_cluster", shared_cluster)
        yield


@pytest.fixture
def two_gpus(request):
    """Skip a test that needs GPUs 0 and 1 themselves, where workers share one GPU."""
    if request.config.getoption("--share-gpu"):
        pytest.skip("needs two GPUs, as it names each by its number: --share-gpu has one")


@pytest.fixture(scope="module")
def cluster():
    with dask_p2p.local_cluster(2, gpus=True, **POOL) as cluster:
        yield cluster


@pytest.fixture
def gate(tmp_path):
    with Gate(tmp_path) as gate:
        yield gate
