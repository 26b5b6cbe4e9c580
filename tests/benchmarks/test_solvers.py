from __future__ import annotations

from math import inf

import numpy as np
import pytest

from benchmarks import simulated, solvers
from tests.benchmarks.support import results_of

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}


@pytest.mark.cluster
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


def test_the_fastest_steps_in_a_row(monkeypatch):
    monkeypatch.setattr(simulated, "IN_A_ROW", 2)
    monkeypatch.setattr(simulated, "_began_s", [0.0, 0.5, 5.0, 6.0, 7.0, 10.0])
    assert simulated.least_noted() == 1.0
    assert simulated.least_noted() == np.inf


def test_wrong_values_are_found(client, monkeypatch):
    monkeypatch.setattr(solvers, "by_numpy", lambda name, fields, steps: fields)
    with pytest.raises(Exception, match="other values than NumPy's"):
        solvers.of_program(client, "Gray-Scott", 16, 2, 1)
