from dataclasses import replace

import pytest


@pytest.fixture
def chosen(chosen):
    """On a busy machine, no published block expires in the middle of a test."""
    return replace(chosen, retain_blocks_s=60.0)
