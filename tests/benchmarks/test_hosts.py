from __future__ import annotations

import pytest

from benchmarks import hosts

pytestmark = pytest.mark.programs


def test_orders_of_several_hosts_are_simulated():
    """The package's order keeps all networks busy, and the order by rank does not."""
    network = "NDR, one a GPU"
    bounds = {
        (order, beside): hosts.simulated(network, 2, order, beside, 0.0).bounds
        for order in ("diagonal by rank", "two levels")
        for beside in (False, True)
    }
    assert bounds["two levels", True] == pytest.approx(1.0, abs=0.01)
    # What is read within the host takes 7 / 345 beside 8 / 45.
    assert bounds["two levels", False] == pytest.approx(1 + (7 / 345) / (8 / 45), abs=0.02)
    assert bounds["diagonal by rank", True] > 2
