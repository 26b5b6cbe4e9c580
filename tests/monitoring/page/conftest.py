import pytest

import dask_p2p


@pytest.fixture
def client(client):
    """A client of a cluster with the plugins, whose scheduler has the pages."""
    dask_p2p.register(client)
    return client
