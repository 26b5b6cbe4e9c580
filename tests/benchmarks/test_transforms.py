from __future__ import annotations

from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import redistributions, transforms
from benchmarks.measure import compare
from benchmarks.rivals import jax_fft
from benchmarks.transforms import Spectrum
from dask_p2p.plans import block_plans

CUBE = Spectrum((8,) * 3, ((2,) * 4, (8,), (8,)), (0, 1, 2), np.dtype("c16"))


def test_transforms_take_turns_with_mpi(client, monkeypatch):
    case = CUBE
    ways = case.ways(False)
    right = ways["dask_p2p"].transpose(case.make(), case.axes)
    assert case.wrong(right) == 0
    assert case.wrong(right.map_blocks(np.add, 1e-6)) == 512
    monkeypatch.setattr(transforms.mpi_fftn, "seconds", lambda case, processes: processes / 8)
    some = {name: ways[name] for name in ("dask_p2p", "mpi4py-fft")}
    ours, rival = compare(client, some, case, 2, anew=True)
    assert (rival["times_s"], rival["median_s"], ours["wrong"]) == ([0.5, 0.5], 0.5, 0)
    redistributions.judged([ours, rival], case, 4)
    assert ours["to_mpi"] == ours["median_s"] / 0.5


@pytest.mark.parametrize("dtype", ["c8", "f4"])
def test_elements_that_are_wrong_are_found(client, monkeypatch, dtype):
    """Also in parts: each of one column or two."""
    case = replace(CUBE, dtype=np.dtype(dtype))
    monkeypatch.setattr(transforms, "_CHECKED_BYTES", case.size_bytes // 4 // 3)
    y = case.ways(True)["dask_p2p"].transpose(case.make(), case.axes)
    columns = 8 if dtype == "c8" else 5
    assert y.shape == (8, 8, columns)
    assert case.wrong(y) == 0
    assert case.wrong(y + 1e4) == 64 * columns
    is_last = da.arange(columns) == columns - 1
    assert case.wrong(da.where(is_last, np.nan, y)) == 64


def test_what_moves_of_real_numbers():
    """Half a spectrum of complex numbers: of 8 elements along the last axis, 5 times two."""
    case = replace(CUBE, dtype=np.dtype("f8"))
    y = da.empty((8, 8, 5), chunks=(8, 2, 5), dtype="c16")
    plan = case.plan(y)
    reads = [piece for _, block in block_plans(plan) for piece in block.pieces]
    assert len(reads) == 16
    assert {piece.src[2] for piece in reads} == {(0, 10)}


def test_jax_times_many_in_one_process(monkeypatch):
    asked = []

    def run(*arguments, **options):
        asked.append((arguments, options))
        return {"times_s": [3.0, 1.0]}

    monkeypatch.setattr(jax_fft, "run_program", run)
    case = replace(CUBE, dtype=np.dtype("f4"), kind="cupy")
    way = case.ways(True)[jax_fft.WAY]
    assert [way.transpose(None, None) for _ in range(3)] == [3.0, 1.0, 3.0]
    given = ("jax_fft", "--gpus", 4, "--shape", 8, 8, 8, "--real")
    options = {"timeout_s": 60, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert asked == [(given, options)] * 2


def test_times_end_when_the_gpus_are_done(monkeypatch):
    class Client:
        ran = 0

        def run(self, function):
            self.ran += 1
            return {"a": 2.0, "b": 3.0}

    client = Client()
    assert CUBE.settle(client) == 0
    assert client.ran == 0
    assert replace(CUBE, kind="cupy").settle(client) == 3
    assert client.ran == 1


@pytest.mark.cluster
def test_errors_that_are_printed(monkeypatch):
    monkeypatch.setattr(transforms, "_SHAPES", ((8, 8, 8), (101,)))
    made = CliRunner().invoke(transforms.main, ["--workers", "2"], catch_exceptions=False)
    assert made.exit_code == 0, made.output
    figures = {
        shape.strip(): (float(single), float(double))
        for _, shape, single, double, _ in (
            line.split("│") for line in made.output.splitlines() if "e-" in line
        )
    }
    assert figures.keys() == {"8 x 8 x 8", "101"}
    for single, double in figures.values():
        assert 1e-9 < single < 1e-6
        assert double < 1e-15


def test_an_error_is_of_the_largest_value(client, monkeypatch):
    def halved(x):
        return da.fft.fft(x) / 2

    monkeypatch.setattr(transforms.fft, "fftn", halved)
    assert transforms.error((16,), "c8", 1, "numpy") == pytest.approx(0.5)
