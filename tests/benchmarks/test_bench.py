from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks import bench as command
from benchmarks import measure, options, report, tables
from benchmarks.measure import Case
from benchmarks.options import AnyClusterSpec
from tests.support import ran

pytestmark = pytest.mark.programs

ROOT = Path(command.__file__).parents[1]

CASE = Case((8, 6), ((2,) * 4, (6,)), (1, 0), np.dtype("f4"))


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
    assert fact(result.stdout, "mode") == "async"
    assert "GB/s" in result.stdout
    assert len(figures(result.stdout, "dask_p2p")) == 10
    assert len(figures(result.stdout, "one no-op layer")) == 4
    assert "dask_p2p: moved 2.25 MiB, least possible 2.25 MiB; cma for 12 pairs" in result.stdout
    assert "All 786432 elements are where they belong." in result.stdout


def test_a_cluster_that_is_there(cluster):
    arguments = ["--scheduler", cluster.scheduler_address, "--shape", "80x60", "--repeats", "1"]
    result = CliRunner().invoke(command.bench, [*arguments, "--rivals"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"4 workers of {cluster.scheduler_address}" in fact(result.stdout, "devices")
    assert "Rivals without Dask are omitted" in result.stdout
    assert "All 4800 elements are where they belong." in result.stdout
    assert "failed" not in result.stdout
    result = CliRunner().invoke(command.bench, [*arguments, "--workers", "2"])
    assert "for a cluster that is started here" in result.stderr


def test_workers_need_the_package_alone(cluster, client):
    def hide():
        sys.modules["benchmarks"] = None

    def show():
        del sys.modules["benchmarks"]

    client.run(hide)
    try:
        arguments = ["--scheduler", cluster.scheduler_address, "--size", "64", "--repeats", "1"]
        result = CliRunner().invoke(command.bench, arguments)
    finally:
        client.run(show)
    assert (result.exit_code, result.stderr) == (0, "")


def test_the_program_runs_from_a_checkout():
    arguments = ["--cpu", "--workers", "1", "--size", "64", "--repeats", "1"]
    done = ran("-m", "benchmarks", *arguments, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "All 4096 elements are where they belong." in done.stdout


def test_json_of_both_modes_and_the_rivals(bench, monkeypatch):
    def p2p_fails(method):
        def way(x, axes):
            if method == "p2p":
                raise RuntimeError("it failed") from TypeError("no CuPy here\nat all")
            return x.transpose(axes).rechunk((10, 60), method=method)

        return way

    monkeypatch.setattr(report, "dask_rechunk", p2p_fails)
    monkeypatch.setattr(report, "_without_dask", lambda *_: [])
    args = ["--shape", "60x40", "--dtype", "i2", "--mode", "both", "--repeats", "2", "--rivals"]
    result = bench(*args, "--json", "-")
    assert result.exit_code == 0, result.output
    assert "dask p2p failed: TypeError: no CuPy here" in result.stderr
    assert re.search(r"async is [\d.]+ times as fast as sync", result.stderr)
    assert re.search(r"and [\d.]+ times without the time between tasks", result.stderr)
    made = json.loads(result.stdout)
    assert made["versions"]["dask-p2p"]
    assert len(made["devices"]) == made["workers"] == 4
    assert made["hardware"]["gpus"] == []
    assert made["hardware"]["cpu"]
    assert made["repeats"] == 2
    assert made["p2p_config"]["mode"] == "async"
    assert "commit" in made
    names = ["dask_p2p, sync", "dask_p2p", "one no-op layer", "dask tasks", "dask p2p"]
    assert [row["way"] for row in made["rows"]] == names
    for row in made["rows"]:
        assert (row["shape"], row["dtype"], row["axes"]) == ([60, 40], "int16", [1, 0])
    for row in made["rows"][:4]:
        assert len(row["times_s"]) == 2
        assert row["wrong"] == (None if row["way"] == "one no-op layer" else 0)
        assert row["bandwidth_gbs"] == pytest.approx(2 * 60 * 40 * 2 / row["median_s"] / 1e9)
    assert [row["one_by_one"] for row in made["rows"][:4]] == [True, False, False, False]
    for row in made["rows"][:2]:
        assert row["moved_bytes"] == row["least_bytes"]
        assert row["moved_bytes"] == sum(pair["bytes"] for pair in row["pairs"])
        assert {pair["transport"] for pair in row["pairs"]} == {"cma"}
        assert row["first_s"] > 0 < row["link_gbs"]
    assert made["rows"][4]["failed"] == "TypeError: no CuPy here"
    assert "median_s" not in made["rows"][4]


@pytest.mark.slow
def test_several_arrays_ways_and_cases(bench, tmp_path):
    file = tmp_path / "out.json"
    args = ["--bytes", "64KiB", "--dtype", "int8", "--dtype", "complex128"]
    args += ["--repeats", "1", "--cases", "--variants", "--json", str(file)]
    result = bench(*args, "--commit", "f00")
    assert result.exit_code == 0, result.output
    made = json.loads(file.read_text())
    assert made["commit"] == "f00"
    ours = ["dask_p2p", "one no-op layer", "dask_p2p, comm"]
    even = [row for row in made["rows"] if row["case"] == measure.EVEN]
    sizes = [("int8", 256), ("complex128", 64)]
    assert [(row["dtype"], row["size"], row["way"]) for row in even] == [
        (dtype, size, way) for dtype, size in sizes for way in ours
    ]
    cases = [row for row in made["rows"] if row["case"] != measure.EVEN]
    assert len(cases) == len(sizes) * 4 * 2
    assert {row["case"] for row in cases} == {
        "4 blocks a worker",
        "uneven blocks",
        "box, axes 2, 1, 0",
        "box, axes 1, 0, 2",
    }
    for row in cases:
        if row["way"] == "dask_p2p":
            assert row["wrong"] == 0
            assert row["median_to_even"] > 0
            assert row["span_to_even"] > 0
    assert "256 x 256 int8, 64.00 kiB, uneven blocks" in result.stdout


def test_times_by_the_byte():
    even = [{"way": "dask_p2p", "matrix_bytes": 16, "median_s": 1.0, "span_s": [0.5]}]
    made = {"way": "dask_p2p", "matrix_bytes": 8, "median_s": 1.0, "span_s": [0.5, 0.75, 1.0]}
    others = [{"way": "dask_p2p", "failed": "x"}, {**made, "way": "not measured"}]
    other = replace(CASE, name="other")
    command.compare_with_even({CASE: even, other: [made, *others]}, {CASE: [other]})
    assert (made["median_to_even"], made["span_to_even"]) == (2.0, 3.0)
    assert not any("median_to_even" in row for row in others)


@pytest.mark.parametrize("dtype", ["longdouble", ">f4"])
def test_dtypes_that_gpus_lack(dtype):
    spec = AnyClusterSpec(2, ("0", "1"), None, 2**40)
    with pytest.raises(click.BadParameter, match="CuPy has no dtype"):
        report.slabs(spec, (64, 64), np.dtype(dtype), (1, 0), "--shape")


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_cases_are_as_large_as_the_even_matrix(workers):
    spec = AnyClusterSpec(workers, (), None, 2**40)
    even = report.slabs(spec, (1536, 1536), np.dtype("f4"), (1, 0), "--shape")
    for case in report.hard_cases(spec, even):
        assert tuple(map(sum, case.chunks)) == case.shape
        assert case.size_bytes == pytest.approx(even.size_bytes, rel=0.01)
        assert sorted(case.axes) == list(range(len(case.shape)))
        assert len(case.chunks[0]) in (workers, 4 * workers)
    assert max(report.split_unevenly(1536, workers)) > 1.2 * 1536 / workers


def test_rows_for_bytes():
    assert report.rows_of(2**36, 4) == 131072
    assert report.rows_of(2**36, 16) == 65536
    assert report.rows_of(2**20, 4) == 512
    assert report.rows_of(1, 4) == 1


def test_json_file_and_other_axes(bench, tmp_path):
    file = tmp_path / "out.json"
    result = bench(
        *("--shape", "12x8x10", "--axes", "2,0,1", "--mode", "sync", "--repeats", "1"),
        *("--json", str(file)),
    )
    assert result.exit_code == 0, result.output
    (row, _) = json.loads(file.read_text())["rows"]
    assert (row["axes"], row["way"], row["wrong"]) == ([2, 0, 1], "dask_p2p, sync", 0)
    assert fact(result.stdout, "mode") == "sync"


def test_what_was_measured_is_kept_whatever_comes_next(bench, monkeypatch, tmp_path):
    compared = []

    def compare(*args, **options):
        if compared:
            raise OSError("the second one\nfails")
        compared.append(1)
        return [{"way": "dask_p2p"}]

    monkeypatch.setattr(report, "compare", compare)
    file = tmp_path / "out.json"
    result = bench("--size", "64", "--size", "65", "--json", str(file))
    assert (result.exit_code, result.stderr) == (1, "Error: OSError: the second one fails\n")
    assert json.loads(file.read_text())["rows"] == [{"way": "dask_p2p"}]


def test_wrong_elements_are_status_1(bench, monkeypatch):
    monkeypatch.setattr(measure, "transpose", lambda x, axes: x.transpose(axes) + 1)
    result = bench("--shape", "20x20", "--repeats", "1")
    assert result.exit_code == 1
    assert result.stderr == "Error: some elements are wrong: 400 of 400 of dask_p2p\n"
    assert "where they belong" not in result.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--shape", "7"], "cannot be split into 8 slabs"),
        (["--shape", "7x9", "--axes", "0,1,2"], "in any order"),
        (["--mode", "fast"], "'fast' is not one of"),
        (["--repeats", "0"], "0 is not in the range"),
        (["--json", "no/such/folder.json"], "the folder does not exist"),
        (["--shape", "10000000x10000000"], "are free"),
        (["--dtype", "V4"], "boolean, integer, float or complex"),
        (["--dtype", "no such"], "NumPy has no dtype of this name"),
        (["--shape", "3y4"], "lengths of at least 1"),
        (["--axes", "a,b"], "whole numbers with commas"),
        (["--size", "0"], "0 is not in the range"),
        (["--bytes", "much"], "give a size such as"),
        (["--bytes", "1e400"], "give a size such as"),
        (["--size", "40", "--cases"], "several and uneven blocks"),
    ],
)
def test_wrong_usage(bench, args, words):
    result = bench("--workers", "8", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr.splitlines()[-1]


def test_trouble_with_a_cluster_is_one_line(monkeypatch):
    def fail(spec):
        raise OSError("no more\nprocesses")

    monkeypatch.setattr(report, "start", fail)
    result = CliRunner().invoke(command.bench, ["--cpu", "--shape", "8x8"])
    assert (result.exit_code, result.stderr) == (1, "Error: OSError: no more processes\n")


def test_fields_on_gpus():
    spec = AnyClusterSpec(4, ("0", "1", "2", "3"), None, 2**40)
    case = report.slabs(spec, (768, 1024), np.dtype("f4"), (1, 0), "--shape")
    found = dict(command.summary_rows(case))
    assert found["tile"] == "16 of 192 x 256"
    assert tables.devices_text(spec, ["H200"] * 4) == "4 workers, one per GPU: 4 x H200"


def test_transports_of_pairs():
    def line(*transports):
        pairs = [{"transport": transport} for transport in transports]
        return tables.moved_lines(
            [{"way": "w", "moved_bytes": 2048, "least_bytes": 0, "pairs": pairs}]
        )

    assert line() == ["w: moved 2.00 kiB, least possible 0 B; no pair"]
    (text,) = line("comm", "ipc", "ipc")
    assert text.endswith("; ipc for 2 pairs; comm for 1 pair")
    assert tables.moved_lines([{"way": "dask tasks"}]) == []


def test_the_limit_and_what_failed():
    shared = {"first_s": 1.0, "times_s": [0.5], "wrong": 0, "bandwidth_gbs": 1.0, "link_gbs": 3.5}
    rows = [
        {**shared, "way": "dask_p2p", "median_s": 0.5, "exchange_s": [0.25], "before_s": [0.1]},
        {**shared, "way": tables.LIMIT, "median_s": 0.2},
        {"way": "JAX", "failed": "jax is not installed"},
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables.ways_table(rows, 200))
    text = console.export_text()
    assert "250.00" in text
    assert "40.0%" in text
    assert "JAX" not in text
    narrow = tables.ways_table(rows, 80)
    assert [str(column.header) for column in narrow.columns][2:4] == ["median", "exchange"]
    tables.report_correctness(console, {CASE: rows})
    assert "JAX failed: jax is not installed" in console.export_text()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_terminals_only(monkeypatch, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, record=True)
    monkeypatch.setattr(tables, "Console", lambda **_: console)
    with tables.progress(2, "transposing") as step:
        step()
        step()
    assert ("2/2" in console.export_text()) is terminal


def test_the_same_options_mean_the_same(monkeypatch):
    assert options.order_of_axes((-1, 0), (2, 3)) == (1, 0)
    assert options.order_of_axes(None, (2, 3, 4)) == (2, 1, 0)


def test_rivals_have_clusters_of_their_own(monkeypatch, client):
    started = []

    def start(spec, **options):
        started.append(options)
        return contextlib.nullcontext(client)

    monkeypatch.setattr(report, "start", start)
    monkeypatch.setattr(report, "find_spec", lambda name: True)
    monkeypatch.setattr(report, "device_names", lambda client, kind: ["a GPU"] * 2)
    spec = AnyClusterSpec(2, ("0", "1"), None, 2**40)
    ways = report.ways_on(spec, rivals=True, variants=True)
    assert "dask p2p" not in ways
    assert {"dask_p2p, ucx", "dask_p2p, kernels read in place"} < set(ways)
    chosen = ("dask_p2p", "dask tasks")
    ways = {name: ways[name] for name in chosen}
    made = report.Report(spec, 1)
    made.measure({CASE: ways}, lambda client: None)
    assert started == [{}, {"protocol": "ucx"}]
    assert [row["way"] for row in made.measured[CASE]] == [*chosen]
    on_cpus = report.ways_on(AnyClusterSpec(4, (), None, 2**40), rivals=True)
    assert {"dask tasks", "dask p2p"} < set(on_cpus)


@pytest.mark.parametrize(("dtype", "way"), [("int8", "mpi4py-fft"), (">f4", "rivals")])
def test_rivals_that_cannot_run_are_rows(capfd, dtype, way):
    spec = AnyClusterSpec(3, (), None, 2**40)
    case = report.slabs(spec, (10, 10), np.dtype(dtype), (1, 0), "--shape")
    measured = {case: []}
    assert report.add_rivals(spec, measured, 1, 60) is None
    (row,) = measured[case]
    assert (row["way"], row["shape"], row["case"]) == (way, [10, 10], measure.EVEN)
    reasons = ("not installed", "no multiple of 3", "benchmarks.rivals ended with 2")
    assert any(reason in row["failed"] for reason in reasons)


@pytest.mark.slow
def test_rivals_without_dask_get_square_matrices(bench, monkeypatch):
    asked = []

    def without_dask(spec, dtype, sizes, repeats, timeout_s):
        asked.append((dtype, [*sizes], repeats, timeout_s))
        return [{"way": "JAX", "size": 20, "failed": "jax is not installed"}]

    monkeypatch.setattr(report, "_without_dask", without_dask)
    args = ["--size", "20", "--shape", "20x30", "--size", "21", "--repeats", "1", "--rivals"]
    result = bench(*args, "--rival-timeout", "7")
    assert result.exit_code == 0, result.output
    assert asked == [("float32", [20, 21], 1, 7)]
    assert "square matrices only" in result.stdout
    assert "JAX failed: jax is not installed" in result.stdout
