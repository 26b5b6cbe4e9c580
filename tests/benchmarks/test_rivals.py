from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

import benchmarks
from benchmarks.rivals import __main__ as rivals
from benchmarks.rivals import copy_engines, mpi_fft, torch_nccl
from benchmarks.rivals.common import MODULI, Case, row, run_program, time_forms, why
from dask_p2p.tools import indexed
from tests.support import BOUND_S, output_of
from tests.transports.loopback import wait_until

ROOT = Path(benchmarks.__file__).parents[1]


@pytest.mark.parametrize("parts", [1, 2, 6])
@pytest.mark.parametrize("order", torch_nccl.ORDERS)
def test_pack_exchange_unpack(order, parts):
    case = Case(size=24, dtype="int32", gpus=4, repeats=1, cpu=True)
    matrix = np.arange(24 * 24).reshape(24, 24)
    sources = np.split(matrix, 4)
    targets = [np.full((6, 24), -1) for _ in range(4)]
    shape = torch_nccl.buffer_shape(case, order, parts)
    pack, unpack = torch_nccl.ORDERS[order]
    for part in range(parts):
        sent = [
            torch_nccl.input_parts(slab, 4, parts)[:, :, part].transpose(pack) for slab in sources
        ]
        assert {tiles.shape for tiles in sent} == {shape}
        received = [np.stack([tiles[gpu] for tiles in sent]) for gpu in range(4)]
        for slab, tiles in zip(targets, received, strict=True):
            torch_nccl.output_parts(slab, 4, parts)[part] = tiles.transpose(unpack)
    assert np.array_equal(np.vstack(targets), matrix.T)


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_each_stage_has_one_reader_a_sender(gpus):
    pairs = list(copy_engines.staged(gpus))
    assert len(set(pairs)) == len(pairs) == gpus * (gpus - 1)
    for stage in range(gpus - 1):
        receivers, senders = zip(*pairs[stage * gpus : (stage + 1) * gpus], strict=True)
        assert sorted(receivers) == sorted(senders) == list(range(gpus))


def test_wrong_words_are_counted():
    device = copy_engines.Processor()
    slabs = [copy_engines.words(np, gpu * 12, 0, 12) for gpu in range(3)]
    received = [np.full(12, copy_engines.MODULUS, np.uint32) for _ in range(3)]
    copy_engines.exchange(device, slabs, received, True, 4)
    wrong = [copy_engines.count_wrong(device, received[0], 0, s, 4) for s in (1, 2)]
    assert wrong == [0, 0]
    received[0][4] += 1
    assert copy_engines.count_wrong(device, received[0], 0, 1, 4) == 1


def test_tiles_that_never_came_are_wrong(monkeypatch):
    case = Case(size=12, dtype="float32", gpus=3, repeats=1, cpu=True)
    assert copy_engines.measure(case, copy_engines.Processor())["wrong"] == 0
    monkeypatch.setattr(copy_engines, "staged", lambda gpus: [(0, 1)])
    assert copy_engines.measure(case, copy_engines.Processor())["wrong"] == 5 * 4 * 4


def test_the_quickest_form_is_timed_anew():
    times_s = {
        "slow": iter([9.0, 3.0, 3.0, 3.0]),
        "quick": iter([8.0, 1.0, 2.0, 1.0, 5.0, 6.0]),
    }
    forms = {name: values.__next__ for name, values in times_s.items()}
    timing = time_forms(forms, repeats=2)
    assert (timing.form, timing.first_s, timing.times_s) == ("quick", 8.0, [5.0, 6.0])
    assert timing.forms_s == {"slow": 3.0, "quick": 1.0}
    case = Case(size=1000, dtype="float64", gpus=4, repeats=2, cpu=True)
    made = row("a way", case, timing, 0)
    assert made["median_s"] == 5.5
    assert made["link_gbs"] == pytest.approx(250 * 750 * 8 / 5.5 / 1e9)
    assert made["bandwidth_gbs"] == pytest.approx(2 * 8e6 / 5.5 / 1e9)


def test_bands_cover_a_slab():
    case = Case(size=131072, dtype="int8", gpus=4, repeats=1, cpu=True)
    bands = list(case.bands())
    assert (bands[0][0], bands[-1][1]) == (0, 32768)
    assert all(one[1] == other[0] for one, other in pairwise(bands))
    with pytest.raises(ValueError, match="multiple"):
        Case(size=10, dtype="int8", gpus=4, repeats=1, cpu=True)


def test_values_are_those_of_the_package():
    assert {dtype: indexed.modulus(dtype) for dtype in MODULI} == MODULI


def test_without_their_libraries(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(rivals, "find_spec", lambda _: None)
    path = tmp_path / "rows.json"
    arguments = ["rivals", "--gpus", "2", "--size", "8", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    rivals.main()
    assert [made["failed"] for made in json.loads(path.read_text())] == [
        "cupy is not installed",
        "torch is not installed",
        "jax is not installed",
    ]
    assert capsys.readouterr().out.count("is not installed") == 3


@pytest.mark.programs
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


@pytest.mark.programs
@pytest.mark.skipif(find_spec("jax") is None, reason="needs JAX")
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("jax_wave", ["--size", 16, "--steps", 3]),
        ("jax_fft", ["--size", 16]),
        ("jax_fft", ["--shape", 32, 16, 8, "--real"]),
    ],
)
def test_programs_of_jax_on_processors(module, arguments):
    """Spectra are compared by the program itself."""
    said = run_program(module, *arguments, "--cpu", "--repeats", 2, timeout_s=BOUND_S)
    assert len(said["times_s"]) == 2
    assert min(said["times_s"]) > 0


@pytest.mark.programs
def test_programs_of_their_own():
    said = run_program("copy_engines", "--cpu", "--gpus", 2, "--size", 64, timeout_s=BOUND_S)
    assert (said["way"], said["wrong"]) == (copy_engines.WAY, 0)
    with pytest.raises(RuntimeError, match="ValueError: 65 rows are no multiple of 2"):
        run_program("copy_engines", "--cpu", "--gpus", 2, "--size", 65, timeout_s=BOUND_S)
    with pytest.raises(RuntimeError):  # what it finds in its environment
        run_program("copy_engines", "--help", timeout_s=BOUND_S, PYTHONHOME="/nowhere")


@pytest.mark.programs
def test_one_that_hangs(tmp_path, monkeypatch):
    started = tmp_path / "started"

    class Late(subprocess.Popen):
        """A process whose time begins when it has a child."""

        def wait(self, timeout=None):
            if timeout is not None:
                wait_until(lambda: started.exists() and started.read_text())
            return super().wait(timeout)

    monkeypatch.setattr(rivals.subprocess, "Popen", Late)
    in_a_group_of_its_own = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(started)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    with (tmp_path / "errors").open("wb") as errors:
        command = [sys.executable, "-c", in_a_group_of_its_own]
        assert rivals.run_for(command, 0.5, errors) == "not done after 0.5 s"
        assert rivals.run_for([sys.executable, "-c", ""], BOUND_S, errors) is None
    child = int(started.read_text())

    def has_ended():
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(child).status() == "zombie"
        return True

    wait_until(has_ended)


@pytest.mark.parametrize("shape", [(8, 8), (300, 700), (1, 5)])
@pytest.mark.parametrize("copy", [mpi_fft.copy_whole, mpi_fft.copy_in_blocks])
def test_copies_of_what_mpi_brought(copy, shape):
    src = np.arange(np.prod(shape), dtype="f8").reshape(shape)
    dst = np.full(shape[::-1], -1.0)
    copy(dst, src)
    assert np.array_equal(dst, src.T)


@pytest.mark.parametrize("transposed", [False, True])
def test_slabs_of_mpi_processes(transposed):
    case = Case(size=12, dtype="int8", gpus=3, repeats=1, cpu=True)
    made = np.vstack([mpi_fft.values(case, rank, transposed) for rank in range(3)])
    matrix = np.arange(144).reshape(12, 12) % 127
    assert np.array_equal(made, matrix.T if transposed else matrix)


def test_reasons():
    said = "Traceback\n  File\ntorch.OutOfMemoryError: too much\n[W] a farewell\n\n"
    assert why(said) == "torch.OutOfMemoryError: too much"
    assert why("expected 4 GPUs\n") == "expected 4 GPUs"
    assert why(" \n") == "it ended without a message"
    options = Namespace(dtype="int8", gpus=2)
    assert [made["size"] for made in rivals.failed("JAX", options, [8, 16], "x")] == [8, 16]
