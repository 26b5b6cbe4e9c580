from __future__ import annotations

import dask
import pytest

from tests.faults.support import Gate


@pytest.fixture(autouse=True)
def _by_messages():
    """Have what a test does not say otherwise come by comm, where there is the most to go wrong."""
    with dask.config.set({"p2p.transports.order": ["comm"]}):
        yield


@pytest.fixture
def gate(tmp_path):
    with Gate(tmp_path) as gate:
        yield gate
