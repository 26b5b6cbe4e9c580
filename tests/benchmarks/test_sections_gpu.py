"""What of the program needs no GPU. On GPUs it compares values itself before it times anything."""

from __future__ import annotations

import json

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import sections_gpu
from benchmarks.rivals.wave import RADIUS, reference, wave


def test_a_step_is_that_of_the_whole_array():
    u, before = np.random.default_rng(0).random((2, 11, 10, 9), "f4")
    out = np.empty_like(u)
    wave(np.pad(u, ((RADIUS, RADIUS), (0, 0), (0, 0)), "wrap"), before, out)
    np.testing.assert_allclose(out, reference(u, before, 1), rtol=1e-5, atol=1e-5)
    assert abs(reference(np.ones((9, 9, 9)), np.ones((9, 9, 9)), 1) - 1).max() < 1e-6


@pytest.mark.cluster
def test_what_is_compared_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(sections_gpu, "find_spec", lambda name: None)  # without JAX
    path = tmp_path / "result.json"
    done = CliRunner().invoke(
        sections_gpu.main,
        [
            *("--cpu", "--size", "12", "--steps", "3", "--side", "51", "--repeats", "1"),
            *("--json", str(path)),
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    row, square = json.loads(path.read_text())["rows"]
    assert square["side"] == 51
    times = square["transpose_s"]
    assert times.keys() == {sections_gpu.IN_SECTION, sections_gpu.LAYER}
    assert all(len(each) == 1 and each[0] > 0 for each in times.values())
    assert row["size"] == 12
    assert row["step_s"].keys() == {
        sections_gpu.KERNEL,
        sections_gpu.OURS,
        sections_gpu.NO_OVERLAP,
    }


def test_what_fails_is_told_and_the_rest_goes_on(capsys):
    def fails():
        raise RuntimeError("no memory")

    assert sections_gpu.attempt("512 JAX", fails) is None
    assert capsys.readouterr().out == "512 JAX failed: RuntimeError: no memory\n"


@pytest.mark.cluster
def test_transposes_that_are_wrong_are_told(monkeypatch, capsys, cluster):
    """By members and by the layer, on one worker alone."""
    from distributed import Client

    with Client(cluster) as client:
        monkeypatch.setattr(sections_gpu, "count_wrong", lambda *args: da.ones(3).sum())
        assert sections_gpu.transposes_of(client, 16, 1, False, 30) == {}
    assert capsys.readouterr().out.count("3.0 elements are wrong") == 2


def test_help():
    assert CliRunner().invoke(sections_gpu.main, ["--help"]).exit_code == 0
