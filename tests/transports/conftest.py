from dataclasses import replace

import pytest

from dask_p2p.config import options
from tests.transports.loopback import linked

# On a busy machine, no published block expires in the middle of a test.
OPTIONS = replace(options(), retain_blocks_s=60.0)


@pytest.fixture
def setup(request, loop, tmp_path):
    """Two hosts of this process, and a module's `TRANSPORT` from one to the other.

    See `Conformance`.
    """
    with linked(request.module.TRANSPORT, loop, tmp_path, OPTIONS) as setup:
        yield setup
