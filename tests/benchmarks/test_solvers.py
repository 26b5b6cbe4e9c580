from __future__ import annotations

from math import inf

import pytest

from benchmarks import simulated, solvers
from tests.benchmarks.support import results_of

pytestmark = pytest.mark.programs

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}


def test_what_is_compared_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(solvers, "_ROUNDS", 1)
    monkeypatch.setattr(simulated, "IN_A_ROW", 2)
    made, _ = results_of(solvers, tmp_path, "--side 32 --steps 110 --repeats 1 --naps 20")
    rows = made["rows"]
    ways = {solvers.NUMPY, solvers.OURS, solvers.SAVED, solvers.WATCHED}
    assert rows.keys() == {*solvers.PROGRAMS, "halos", "progress"}
    assert all(rows[name].keys() == ways for name in solvers.PROGRAMS)
    assert all(0 < step_s < inf for name in rows for step_s in rows[name].values())
    assert rows["halos"].keys() == {solvers.ONE, solvers.EIGHT}
    assert rows["progress"].keys() == {solvers.ALONE, solvers.WATCHED}
