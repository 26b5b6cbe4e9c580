import pytest

from dask_p2p.config import options
from tests.transports.loopback import linked


@pytest.fixture
def transport(request):
    """The class of transports that a module tests."""
    return request.module.TRANSPORT


@pytest.fixture
def chosen():
    """Options of both transports."""
    return options()


@pytest.fixture
def setup(transport, chosen, loop, tmp_path):
    """Two hosts of this process, and a transport from one to the other: see `Conformance`."""
    with linked(transport, loop, tmp_path, chosen) as setup:
        yield setup
