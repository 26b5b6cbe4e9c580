from __future__ import annotations

import pytest

from benchmarks import growth

pytestmark = pytest.mark.programs


def test_what_growth_is_simulated_to_cost():
    one_pass, groups, two, three = growth.simulated(1000, 4)
    assert one_pass.edges == 1000**2
    assert groups.edges < 70_000
    assert groups.tasks < 1070
    assert (one_pass.moved, groups.moved, two.moved, three.moved) == (0.75, 0.75, 1.5, 2.25)
    assert three.edges < two.edges < one_pass.edges
