import pytest

from dask_p2p.fusing import suitability
from tests.sections.conftest import gpu as gpu
from tests.support import noted


@pytest.fixture
def gangs(monkeypatch):
    """The gangs that the scheduler, in this process, has made."""
    return noted(monkeypatch, suitability, "fused_gang", lambda *args, **options: args)
