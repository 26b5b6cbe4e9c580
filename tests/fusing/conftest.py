from __future__ import annotations

import pytest

from dask_p2p.fusing import suitability
from dask_p2p.fusing.running.gang import fused_gang
from tests.sections.conftest import gpu as gpu


@pytest.fixture
def gangs(monkeypatch):
    """The gangs that the scheduler, in this process, has made."""
    made = []

    def counted(*given):
        made.append(fused_gang(*given))
        return made[-1]

    monkeypatch.setattr(suitability, "fused_gang", counted)
    return made
