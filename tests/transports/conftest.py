from __future__ import annotations

import pytest

from tests.transports.loopback import EventLoop


@pytest.fixture(scope="module")
def loop():
    loop = EventLoop()
    yield loop
    loop.close()
