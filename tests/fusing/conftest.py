from __future__ import annotations

import pytest

from dask_p2p.fusing import suitability
from dask_p2p.fusing.running.gang import fused_gang
from tests.sections.conftest import gpu as gpu


@pytest.fixture
def gangs(monkeypatch):
    """The gangs that the scheduler, in this process, has made."""
    gang_names = []

    def counted(*arguments, **options):
        gang_names.append(fused_gang(*arguments, **options))
        return gang_names[-1]

    monkeypatch.setattr(suitability, "fused_gang", counted)
    return gang_names
