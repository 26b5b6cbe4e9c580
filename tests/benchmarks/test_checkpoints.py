from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks import checkpoints


@pytest.mark.cluster
def test_what_is_compared_and_written(tmp_path):
    path = tmp_path / "result.json"
    done = CliRunner().invoke(
        checkpoints.main,
        ["--mib", "1", "--repeats", "3", "--json", str(path)],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    assert "checkpoint / copy" in done.output
    (row,) = json.loads(path.read_text())["rows"]
    assert row["state_mib"] == 1
    seconds = row["seconds"]
    assert {name: len(of) for name, of in seconds.items()} == {
        checkpoints.COPY: 3,
        checkpoints.FIRST: 2,
        checkpoints.LATER: 3,
    }
    assert all(each > 0 for of in seconds.values() for each in of)
