"""Each program that measures runs once with small numbers, and writes figures."""

import importlib
import json
import math
import shlex
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from click import ClickException
from click.testing import CliRunner

import benchmarks
from benchmarks import bench as command
from benchmarks import (
    chart,
    growth,
    hosts,
    measure,
    messages_gpu,
    report,
    sections_calls,
    streams,
    transforms,
)
from benchmarks.rivals import copy_engines, mpi_fft, torch_dtensor
from tests.support import output_of, ran

pytestmark = pytest.mark.programs

ROOT = Path(benchmarks.__file__).parents[1]

#: Options by program, and numbers that the test replaces.
PROGRAMS = {
    "checkpoints": ("--mib 1 --repeats 3", {}),
    "cuts": ("--side 512 --members 2 --rounds 2 --repeats 1", {}),
    "first_calls": ("--side 64 --workers 2 --repeats 1 --way registration --way iterate", {}),
    "fused_gpus": (
        "--cpu --size 16 --cube 16 --side 32 --call 16 --runs 1",
        {"fused_gpus._CALLS": 10},
    ),
    "fused_graphs": (
        "--workers 2 --blocks 2 --kib 1 --repeats 1",
        {"fused_graphs._STEPS": 5, "fused_graphs._CALLS": 10},
    ),
    "messages": ("--bytes 8 --bytes 32768 --rounds 1 --repeats 2 --ranks 3", {}),
    "sections": ("--side 32 --repeats 1", {"sections.counts": lambda side: (60, 12)}),
    "sections_gpu": (
        "--cpu --size 12 --steps 400 --side 51 --cube 8 --shape 8 6 4 --repeats 1",
        {},
    ),
    "solvers": (
        "--side 32 --steps 110 --repeats 1 --naps 20",
        {"solvers._ROUNDS": 1, "simulated.IN_A_ROW": 2},
    ),
    "redistributions": ("--megabytes 1 --repeats 1 --case '16 row slabs'", {}),
}


def figures_in(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from figures_in(part)
    elif isinstance(value, float):
        yield value


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_writes_figures(name, client, tmp_path, monkeypatch):
    options, numbers = PROGRAMS[name]
    program = importlib.import_module(f"benchmarks.{name}")
    if hasattr(program, "find_spec"):  # without MPI and JAX
        monkeypatch.setattr(program, "find_spec", lambda name: None)
    monkeypatch.setattr(report, "start", lambda spec: nullcontext(client))
    for path, number in numbers.items():
        monkeypatch.setattr(f"benchmarks.{path}", number)
    path = tmp_path / "result.json"
    arguments = [*shlex.split(options), "--json", str(path)]
    run = CliRunner().invoke(program.main, arguments, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    result = json.loads(path.read_text())
    figures = list(figures_in(result.get("rows", result.get("results"))))
    assert figures
    least = -math.inf if name == "sections" else 0  # which has differences of two times
    assert all(math.isfinite(figure) and figure >= least for figure in figures)


def test_rivals_on_processors(tmp_path):
    path = tmp_path / "rows.json"
    options = ["--cpu", "--gpus", "2", "--size", "65", "--size", "64", "--repeats", "2", "--json"]
    output_of("-m", "benchmarks.rivals", *options, path, cwd=ROOT)
    rows = {(row["way"], row["size"]): row for row in json.loads(path.read_text())}
    assert rows[copy_engines.WAY, 64]["wrong"] == 0
    assert "no multiple of 2 GPUs" in rows[copy_engines.WAY, 65]["failed"]
    libraries = {mpi_fft: "mpi4py_fft", torch_dtensor: "torch"}
    for row, library in ((rows[rival.WAY, 64], name) for rival, name in libraries.items()):
        assert row.get("wrong") == 0 or row["failed"] == f"{library} is not installed"


def test_results_as_one_chart(tmp_path):
    paths = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    paths = [str(path) for path in paths if not path.stem.endswith("-engines")]
    chart.main([*paths, "-o", str(tmp_path / "chart.svg")])
    assert (tmp_path / "chart.svg").stat().st_size > 10_000


def test_simulated_growth():
    one_pass, groups, two, three = growth.simulated(1000, 4)
    assert one_pass.edges == 1000**2
    assert groups.edges < 70_000
    assert (one_pass.moved, groups.moved, two.moved, three.moved) == (0.75, 0.75, 1.5, 2.25)


def test_simulated_orders_of_several_hosts():
    """The package's order keeps all networks busy, and the order by rank does not."""
    network = "NDR, one a GPU"
    by_rank, two_levels = (
        hosts.simulated(network, 2, order, True, 0.0).bounds
        for order in ("diagonal by rank", "two levels")
    )
    assert two_levels == pytest.approx(1.0, abs=0.01)
    assert by_rank > 2


def test_messages_of_gpus_on_cpus():
    """Without the plain copy and NCCL, which need GPUs."""
    rows = messages_gpu.measured([64, 1 << 20], 1, on_cpu=True)
    assert [row["bytes"] for row in rows] == [64, 1 << 20]
    assert all(time_s > 0 for row in rows for time_s in row["times_s"].values())


def test_transforms_of_sections(client):
    seconds = sections_calls.transforms_of(client, (8, 12, 6), 1, False, 30)
    assert {"Context.fftn", "Context.rfftn"} < seconds.keys()


def test_errors_of_transforms(monkeypatch):
    monkeypatch.setattr(transforms, "_SHAPES", ((8, 8, 8), (101,)))
    run = CliRunner().invoke(transforms.main, ["--workers", "2"], catch_exceptions=False)
    assert run.exit_code == 0, run.output
    rows = [line.split("│") for line in run.output.splitlines() if "e-" in line]
    assert [row[1].strip() for row in rows] == ["8 x 8 x 8", "101"]
    assert all(1e-9 < float(row[2]) < 1e-6 and float(row[3]) < 1e-15 for row in rows)


def test_streams_check_values(client, monkeypatch):
    ways = streams.mapping(client, 1000, fallback="numpy")
    assert ways[streams.PAGEABLE]() > 0
    client.run(streams._fill_by, *streams._AS_IT_IS)
    ways = streams.mapping(client, 1000, fallback="numpy")
    monkeypatch.setattr(streams.dask_p2p, "map_on_gpu", lambda function, x, **kwargs: x + 0)
    with pytest.raises(ClickException, match="values are wrong"):
        ways[streams.PAGEABLE]()


def test_the_hand_written_step_is_the_reference():
    from benchmarks.rivals.wave import RADIUS, reference, wave

    u, before = np.random.default_rng(0).random((2, 11, 10, 9), "f4")
    out = np.empty_like(u)
    wave(np.pad(u, ((RADIUS, RADIUS), (0, 0), (0, 0)), "wrap"), before, out)
    np.testing.assert_allclose(out, reference(u, before, 1), rtol=1e-5, atol=1e-5)


def test_the_program_runs_from_a_checkout():
    arguments = ["--cpu", "--workers", "1", "--size", "64", "--repeats", "1"]
    process = ran("-m", "benchmarks", *arguments, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    assert "All 4096 elements are where they belong." in process.stdout


def test_wrong_elements_are_status_1(client, monkeypatch):
    monkeypatch.setattr(measure, "transpose", lambda x, axes: x.transpose(axes) + 1)
    monkeypatch.setattr(report, "start", lambda spec: nullcontext(client))
    arguments = ["--cpu", "--workers", "4", "--shape", "20x20", "--repeats", "1"]
    result = CliRunner().invoke(command.bench, arguments)
    assert result.exit_code == 1
    assert result.stderr == "Error: some elements are wrong: 400 of 400 of dask_p2p\n"
    assert "where they belong" not in result.stdout
