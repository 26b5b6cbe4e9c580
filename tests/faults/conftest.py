import dask
import pytest

from tests.faults.support import Gate, as_new, cluster_of


@pytest.fixture(autouse=True)
def _by_messages():
    """Move regions by comm by default, as it has the most faults."""
    with dask.config.set({"p2p.transports.order": ["comm"]}):
        yield


@pytest.fixture
def gate(tmp_path):
    with Gate(tmp_path) as gate:
        yield gate


@pytest.fixture(scope="module")
def shared(request):
    """A client of the cluster of a module, made with the keywords in its `CLUSTER`."""
    with cluster_of(**request.module.CLUSTER) as client:
        yield client


@pytest.fixture
def client(shared, request):
    """The cluster, restored after each test."""
    with as_new(shared, request.module.CLUSTER["n_workers"]) as client:
        yield client
