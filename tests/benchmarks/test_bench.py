from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import bench as command
from benchmarks import measure, report
from tests.support import ran

pytestmark = pytest.mark.programs

ROOT = Path(command.__file__).parents[1]


@pytest.fixture
def bench(client, monkeypatch):
    """Run the command with the tests' cluster, of four workers."""

    def run(*args):
        monkeypatch.setattr(report, "start", lambda _: contextlib.nullcontext(client))
        return CliRunner().invoke(command.bench, ["--cpu", "--workers", "4", *args])

    return run


def test_the_program_runs_from_a_checkout():
    arguments = ["--cpu", "--workers", "1", "--size", "64", "--repeats", "1"]
    process = ran("-m", "benchmarks", *arguments, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    assert "All 4096 elements are where they belong." in process.stdout


def test_wrong_elements_are_status_1(bench, monkeypatch):
    monkeypatch.setattr(measure, "transpose", lambda x, axes: x.transpose(axes) + 1)
    result = bench("--shape", "20x20", "--repeats", "1")
    assert result.exit_code == 1
    assert result.stderr == "Error: some elements are wrong: 400 of 400 of dask_p2p\n"
    assert "where they belong" not in result.stdout
