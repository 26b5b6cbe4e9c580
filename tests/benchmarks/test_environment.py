from __future__ import annotations

import json

import pytest

from benchmarks.environment import environment

pytestmark = pytest.mark.programs


def test_it_is_json_and_says_what_figures_depend_on():
    found = json.loads(json.dumps(environment()))
    assert found["hardware"]["cpu"]
    assert found["hardware"]["cpu_count"] >= 1
    assert set(found) == {"versions", "commit", "hardware"}
