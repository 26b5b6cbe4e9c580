"""The numbers that tests replace."""

from __future__ import annotations

import pytest

from dask_p2p import tuning
from tests.support import tune


def test_numbers_are_replaced_for_a_test():
    before = tuning.current
    with pytest.MonkeyPatch.context() as patch:
        tune(patch, spin_s=7.0)
        tune(patch, close_s=8.0)
        assert (tuning.current.spin_s, tuning.current.close_s) == (7.0, 8.0)
        with pytest.raises(TypeError, match="spin_seconds"):
            tune(patch, spin_seconds=1.0)
    assert tuning.current is before
