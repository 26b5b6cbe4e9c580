from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks import cuts


@pytest.mark.cluster
def test_what_is_compared_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(cuts, "find_spec", lambda name: None)  # without mpi4py
    path = tmp_path / "result.json"
    done = CliRunner().invoke(
        cuts.main,
        ["--side", "512", "--members", "2", "--rounds", "2", "--repeats", "1", "--json", str(path)],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    (row,) = json.loads(path.read_text())["rows"]
    assert row["ranks"] == 2
    assert row["times_s"].keys() == {*cuts.WAYS, cuts.LAYER}
    assert all(len(times) == 2 and min(times) > 0 for times in row["times_s"].values())
