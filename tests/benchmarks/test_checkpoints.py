from __future__ import annotations

import pytest

from benchmarks import checkpoints
from tests.benchmarks.support import results_of

pytestmark = pytest.mark.programs


def test_what_is_compared_and_written(tmp_path):
    made, output = results_of(checkpoints, tmp_path, "--mib 1 --repeats 3")
    assert "checkpoint / copy" in output
    (row,) = made["rows"]
    assert row["state_mib"] == 1
    seconds = row["seconds"]
    assert {name: len(of) for name, of in seconds.items()} == {
        checkpoints.COPY: 3,
        checkpoints.FIRST: 2,
        checkpoints.LATER: 3,
    }
    assert all(each > 0 for of in seconds.values() for each in of)
