from __future__ import annotations

import dask.array as da
from click.testing import CliRunner

import dask_p2p
from dask_p2p.cli import p2p
from tests.monitoring.test_trace import checked


def run(*args):
    return CliRunner().invoke(p2p, ["trace", *map(str, args)])


def test_the_last_runs_of_a_cluster(cluster, client, tmp_path):
    for _ in range(2):
        dask_p2p.transpose(da.ones((64, 48), chunks=(16, 48))).compute()
    file = tmp_path / "trace.json"
    result = run(file, "--scheduler", cluster.scheduler_address, "--runs", 2)
    assert result.exit_code == 0, result.output
    assert "2 runs, 8 attempts" in " ".join(result.output.split())
    events = checked(file.read_text("utf-8"))
    assert sum(event["cat"] == "task" for event in events["X"]) == 8


def test_wrong_use(cluster, tmp_path):
    assert "Missing option '--scheduler'" in run(tmp_path / "trace.json").output
    result = run(tmp_path / "trace.json", "--scheduler", "no address")
    assert result.exit_code == 1
    assert "no scheduler answers at no address" in result.output
    result = run(tmp_path / "no" / "trace.json", "--scheduler", cluster.scheduler_address)
    assert result.exit_code == 1
    assert "expected a file that can be written" in result.output
    assert "Traceback" not in result.output
