from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks import first_calls


@pytest.mark.cluster
def test_times_of_first_calls_are_written(tmp_path):
    path = tmp_path / "result.json"
    done = CliRunner().invoke(
        first_calls.main,
        ["--side", "64", "--workers", "2", "--repeats", "1", "--json", str(path)],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    rows = {row["way"]: row["times_s"] for row in json.loads(path.read_text())["rows"]}
    assert rows.keys() == first_calls.WAYS.keys()
    for way, (times,) in rows.items():
        assert times.keys() == {*first_calls.FIELDS}
        assert min(times.values()) > 0, way
        assert way in done.output
