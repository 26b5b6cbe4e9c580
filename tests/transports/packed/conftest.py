from __future__ import annotations

import pytest

from dask_p2p.config import options
from tests.transports.loopback import linked


@pytest.fixture
def setup(request, loop, tmp_path):
    """Two hosts with the `TRANSPORT` of the test's module."""
    with linked(request.module.TRANSPORT, loop, tmp_path, options()) as setup:
        yield setup
