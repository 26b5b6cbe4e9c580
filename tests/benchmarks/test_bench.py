from __future__ import annotations

import contextlib
import re
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


def fact(text, name):
    return next(
        re.split(r"\s{2,}", line.strip())[1] for line in text.splitlines() if line.startswith(name)
    )


def figures(text, way):
    """Cells of the line of this way."""
    line = next(line for line in text.splitlines() if line.startswith(f"  {way}  "))
    return re.split(r"\s{2,}", line.strip())[1:]


def test_the_articles_fields(bench):
    result = bench("--shape", "768x1024", "--repeats", "1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "4 one-thread workers over TCP on" in fact(result.stdout, "devices")
    assert fact(result.stdout, "array") == "768 x 1024 float32, 3.00 MiB, axes 1, 0"
    assert fact(result.stdout, "local input slab") == "4 of 192 x 1024"
    assert fact(result.stdout, "local output slab") == "4 of 256 x 768"
    assert fact(result.stdout, "tile") == "16 of 192 x 256"
    assert "GB/s" in result.stdout
    assert len(figures(result.stdout, "dask_p2p")) == 10
    assert len(figures(result.stdout, "one no-op layer")) == 4
    assert "dask_p2p: moved 2.25 MiB, least possible 2.25 MiB; cma for 12 pairs" in result.stdout
    assert "All 786432 elements are where they belong." in result.stdout


def test_the_program_runs_from_a_checkout():
    arguments = ["--cpu", "--workers", "1", "--size", "64", "--repeats", "1"]
    done = ran("-m", "benchmarks", *arguments, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "All 4096 elements are where they belong." in done.stdout


def test_wrong_elements_are_status_1(bench, monkeypatch):
    monkeypatch.setattr(measure, "transpose", lambda x, axes: x.transpose(axes) + 1)
    result = bench("--shape", "20x20", "--repeats", "1")
    assert result.exit_code == 1
    assert result.stderr == "Error: some elements are wrong: 400 of 400 of dask_p2p\n"
    assert "where they belong" not in result.stdout
