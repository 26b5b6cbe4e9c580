from __future__ import annotations

import pytest

from dask_p2p.transports.same_host import DirectoryOptions
from tests.support import with_section


@pytest.fixture
def chosen(chosen):
    """On a busy machine, no published block expires in the middle of a test."""
    return with_section(chosen, DirectoryOptions, retain_s=60.0)
