import itertools
from contextlib import ExitStack, closing

import pytest

from dask_p2p.sections.wire import endpoint
from dask_p2p.transports.ucx_messenger import Messenger
from tests.sections.gangs import NoAcceptors
from tests.sections.wire.support import TCP, Gang, tls


@pytest.fixture
def hosts(monkeypatch, processes):
    """Give each rank a host of its own."""
    kernels = itertools.count()
    monkeypatch.setattr(endpoint, "_kernel_and_network", lambda: f"kernel-{next(kernels)}")


@pytest.fixture
def messengers():
    """Make the UCX messengers of three ranks."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Messenger(None))) for _ in range(3)]


@pytest.fixture
def processes(monkeypatch):
    """Give each rank an acceptor of its own, as if it had a process of its own."""
    monkeypatch.setattr(endpoint.Acceptor, "_running", NoAcceptors())


@pytest.fixture(params=["one process", "one host", "tcp", "tls", "ucx"])
def gang(request):
    if request.param != "one process":
        request.getfixturevalue("processes" if request.param == "one host" else "hosts")
    messengers = request.getfixturevalue("messengers") if request.param == "ucx" else None
    with Gang(3, tls() if request.param == "tls" else TCP, messengers) as gang:
        yield gang
