from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import benchmarks
from benchmarks.rivals import copy_engines, mpi_fft, torch_nccl
from tests.support import output_of

pytestmark = pytest.mark.programs

ROOT = Path(benchmarks.__file__).parents[1]


def test_on_processors(tmp_path):
    path = tmp_path / "rows.json"
    options = ["--cpu", "--gpus", "2", "--size", "65", "--size", "64", "--repeats", "2", "--json"]
    output_of("-m", "benchmarks.rivals", *options, path, cwd=ROOT)
    made = {(found["way"], found["size"]): found for found in json.loads(path.read_text())}
    assert len(made) == 8
    if find_spec("mpi4py_fft"):
        assert made[mpi_fft.WAY, 64]["wrong"] == 0
        assert made[mpi_fft.WAY, 64]["all_to_all_s"] > 0
    else:
        assert made[mpi_fft.WAY, 64]["failed"] == "mpi4py_fft is not installed"
    assert made[copy_engines.WAY, 64]["wrong"] == 0
    assert "no multiple of 2 GPUs" in made[copy_engines.WAY, 65]["failed"]
    if find_spec("torch"):
        assert made[torch_nccl.WAY, 64]["wrong"] == 0
