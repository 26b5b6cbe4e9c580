from __future__ import annotations

import pytest

from tests.faults.support import Gate


@pytest.fixture
def gate(tmp_path):
    with Gate(tmp_path) as gate:
        yield gate
