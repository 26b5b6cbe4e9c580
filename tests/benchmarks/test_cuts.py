from __future__ import annotations

import pytest

from benchmarks import cuts
from tests.benchmarks.support import results_of

pytestmark = pytest.mark.programs


def test_what_is_compared_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(cuts, "find_spec", lambda name: None)  # without mpi4py
    made, _ = results_of(cuts, tmp_path, "--side 512 --members 2 --rounds 2 --repeats 1")
    (row,) = made["rows"]
    assert row["ranks"] == 2
    assert row["times_s"].keys() == {*cuts.WAYS, cuts.LAYER}
    assert all(len(times) == 2 and min(times) > 0 for times in row["times_s"].values())
