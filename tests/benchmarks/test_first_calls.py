from __future__ import annotations

import pytest

from benchmarks import first_calls
from tests.benchmarks.support import results_of

pytestmark = pytest.mark.programs


def test_times_of_first_calls_are_written(tmp_path):
    made, output = results_of(first_calls, tmp_path, "--side 64 --workers 2 --repeats 1")
    rows = {row["way"]: row["times_s"] for row in made["rows"]}
    assert rows.keys() == first_calls.WAYS.keys()
    for way, (times,) in rows.items():
        assert times.keys() == {*first_calls.FIELDS}
        assert min(times.values()) > 0, way
        assert way in output
