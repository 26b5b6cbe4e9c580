from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import dask.array as da
import numpy as np
import psutil
import pytest
from click.testing import CliRunner

import dask_p2p
from benchmarks import chart, growth, hosts, monitoring_cost, redistributions
from benchmarks.rivals import __main__ as rivals
from benchmarks.rivals import copy_engines, mpi_fft, torch_nccl
from benchmarks.rivals.common import MODULI, Case, row, time_forms
from dask_p2p import indexed
from dask_p2p.cli import p2p

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHARTED = sorted(path for path in RESULTS.glob("*.json") if not path.stem.endswith("-engines"))


def report(limit=True):
    """What `dask p2p bench` writes, with figures that are easy to reckon with."""
    rows = []
    for size in (1024, 2048):
        shared = {"size": size, "dtype": "float32", "matrix_bytes": 4 * size**2}
        time_s = shared["matrix_bytes"] / 1e9
        rows += [
            {**shared, "way": "dask_p2p", "median_s": 4 * time_s, "exchange_s": [2 * time_s]},
            {**shared, "way": "one no-op layer", "median_s": 0.01, "exchange_s": []},
            {**shared, "way": "torch + NCCL", "median_s": 5 * time_s},
            {**shared, "way": "a new one", "median_s": 8 * time_s},
            {"size": size, "dtype": "float32", "way": "JAX", "failed": "jax is not installed"},
        ]
        if limit:
            rows.append({**shared, "way": chart.LIMIT, "median_s": time_s})
    return {
        "started": 1795232130.6,
        "kind": "cupy",
        "workers": 2,
        "rows": rows,
        "commit": "0123456789abcdef",
        "hardware": {"cpu": "a CPU", "cpu_count": 8, "gpus": ["A GPU"] * 4, "driver": "1.2"},
    }


class TestChart:
    def test_fractions_of_the_limit(self):
        series = chart.read_series([report()])
        found = {s.way: [*chart.fractions(s, series).values()] for s in series}
        assert found["dask_p2p"] == pytest.approx([1 / 4, 1 / 4])
        assert found[chart.EXCHANGE] == pytest.approx([1 / 2, 1 / 2])
        assert found["a new one"] == pytest.approx([1 / 8, 1 / 8])
        assert "JAX" not in found
        assert {s.machine for s in series} == {"2 x A GPU"}

    def test_no_limit_of_another_machine_or_dtype(self):
        theirs = report(limit=False)
        theirs["hardware"]["gpus"] = ["B GPU"] * 4
        series = chart.read_series([report(), theirs])
        assert not any(chart.fractions(s, series) for s in series if s.machine == "2 x B GPU")
        for measured in theirs["rows"]:
            measured["dtype"] = "int8"
        theirs["hardware"]["gpus"] = ["A GPU"] * 4
        series = chart.read_series([report(), theirs])
        assert not any(chart.fractions(s, series) for s in series if s.dtype == "int8")

    def test_panels(self):
        time_panel, limit_panel = chart.draw([report()]).axes
        labels = {line.get_label() for line in time_panel.get_lines()}
        assert labels == {"dask_p2p", "one no-op layer", "torch + NCCL", "a new one", chart.LIMIT}
        labels = {
            line.get_label() for line in limit_panel.get_lines() if line.get_label()[0] != "_"
        }
        assert labels == {"dask_p2p", chart.EXCHANGE, "torch + NCCL", "a new one"}
        assert len(chart.draw([report(limit=False)]).axes) == 1
        with pytest.raises(ValueError, match="nothing"):
            chart.draw([{**report(), "rows": []}])

    def test_machines_and_dtypes_are_told_apart(self):
        both = chart.draw([report(), json.loads((RESULTS / "cpu-2-cores.json").read_text())])
        labels = {line.get_label() for line in both.axes[0].get_lines()}
        assert "dask_p2p, 2 x A GPU, float32" in labels
        assert any("float64" in label and "workers on" in label for label in labels)

    def test_the_same_results_give_the_same_files(self, tmp_path):
        path = tmp_path / "made.json"
        path.write_text(json.dumps(report()))
        chart.main([str(path)])
        again = [tmp_path / "again.png", tmp_path / "again.svg"]
        chart.main([str(path), "-o", str(again[0]), "-o", str(again[1])])
        for other in again:
            assert path.with_suffix(other.suffix).read_bytes() == other.read_bytes()
        assert b"<dc:date>" not in again[1].read_bytes()

    @pytest.mark.parametrize("path", CHARTED, ids=lambda path: path.name)
    def test_results_that_are_there(self, path, tmp_path):
        chart.main([str(path), "-o", str(tmp_path / "chart.svg")])
        assert (tmp_path / "chart.svg").stat().st_size > 10_000

    def test_one_dtype_of_several(self, tmp_path):
        made = report()
        made["rows"] += [{**measured, "dtype": "int8"} for measured in made["rows"]]
        charts = []
        for contents, arguments in ((made, ["--dtype", "int8"]), (made, [])):
            path = tmp_path / "made.json"
            path.write_text(json.dumps(contents))
            chart.main([str(path), "-o", str(tmp_path / "made.svg"), *arguments])
            charts.append((tmp_path / "made.svg").read_text().count("<!-- dask_p2p, "))
        assert charts == [1, 4]  # beside the exchange only

    def test_some_ways_of_several(self, tmp_path):
        path = tmp_path / "made.json"
        path.write_text(json.dumps(report()))
        arguments = ["-o", str(tmp_path / "made.svg"), "--way", "a new one", "--way", chart.LIMIT]
        chart.main([str(path), *arguments])
        drawn = (tmp_path / "made.svg").read_text()
        assert "<!-- a new one -->" in drawn
        assert "<!-- dask_p2p -->" not in drawn

    def test_what_the_program_writes(self, cluster, tmp_path):
        path = tmp_path / "made.json"
        arguments = ["bench", "--scheduler", cluster.scheduler_address, "--json", str(path)]
        arguments += ["--size", "64", "--repeats", "1"]
        result = CliRunner().invoke(p2p, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        made = json.loads(path.read_text())
        medians_s = [row["median_s"] for row in made["rows"]]
        made["rows"] += [{**row, "case": "uneven blocks", "median_s": 1} for row in made["rows"]]
        made["rows"] += [{**row, "shape": [64, 63], "median_s": 1} for row in made["rows"]]
        series = chart.read_series([made])
        assert [s.way for s in series] == ["dask_p2p", chart.EXCHANGE, chart.FLOOR]
        assert [[*s.median_s.values()] for s in (series[0], series[2])] == [[t] for t in medians_s]
        assert "4 workers" in chart.caption([made])

    def test_caption(self):
        assert chart.caption([report()]) == "2 x A GPU, driver 1.2, 2026-11-21, commit 0123456789ab"

    def test_unknown_formats(self, capsys):
        with pytest.raises(SystemExit):
            chart.main(["x.json", "-o", "x.gif"])
        assert ".svg or .png" in capsys.readouterr().err


class TestRedistributions:
    @pytest.mark.parametrize("kind", ["numpy", "cupy"])
    def test_cases_cut_the_whole_array(self, kind):
        cases = [*redistributions.scaled_cases(50, 4, kind), *redistributions.fixed_cases(4, kind)]
        assert len({case.name for case in cases}) == len(cases) == (10 if kind == "numpy" else 4)
        for case in cases:
            after = getattr(case, "after", case.chunks)
            for chunks in (case.chunks, after):
                assert tuple(map(sum, chunks)) == case.shape
                assert min(map(min, chunks)) > 0
            assert after != case.chunks or isinstance(case, redistributions.Stencil)
        scaled = next(redistributions.scaled_cases(50, 4, kind))
        assert scaled.size_bytes == pytest.approx(50e6, rel=0.03)

    @pytest.mark.parametrize(("shape", "depth"), [((9, 8), 1), ((6, 7, 8), 2)])
    def test_a_star(self, shape, depth):
        x = np.random.default_rng(1).integers(0, 100, shape)
        whole = np.pad(x, depth, mode="wrap")
        expected = x + sum(
            np.roll(x, sign * step, axis)
            for axis in range(x.ndim)
            for step in range(1, depth + 1)
            for sign in (1, -1)
        )
        assert np.array_equal(redistributions.star(whole, depth), expected)

    def test_rims_that_are_wrong_are_found(self, client):
        case = redistributions.Stencil((16, 16), ((8, 8), (8, 8)), (0, 1), np.dtype("f8"), depth=1)
        x = case.make()
        right = case.ways(False)["dask_p2p"].transpose(x, case.axes)
        assert case.wrong(right) == 0
        assert case.wrong(x) == 256
        assert case.wrong(right.map_blocks(np.add, 1)) == 256

    def test_dasks_tasks_wait_for_their_kernels(self, monkeypatch):
        waited = []
        stream = Namespace(synchronize=lambda: waited.append(None))
        cuda = Namespace(get_current_stream=lambda: stream)
        monkeypatch.setitem(sys.modules, "cupy", Namespace(cuda=cuda))
        x = da.from_array(np.arange(64).reshape(8, 8), chunks=(4, 4))
        y = redistributions.done(x.rechunk((2, 8), method="tasks"))
        assert np.array_equal(y.compute(scheduler="sync"), np.arange(64).reshape(8, 8))
        assert len(waited) == 4

    def test_what_is_to_be_reached(self):
        case = next(redistributions.scaled_cases(50, 2, "cupy"))
        rows = [
            {"way": "dask_p2p", "median_s": 0.02, "moved_bytes": 620e6},
            {"way": "one no-op layer", "median_s": 0.01},
            {"way": "dask tasks", "median_s": 0.03},
            {"way": "dask p2p", "failed": "it always does"},
        ]
        redistributions.judged(rows, case, 2)
        assert rows[0]["budget_s"] == pytest.approx(0.01 + 0.001 + 0.002)
        assert (rows[0]["faster_by"], rows[0]["reach"]) == (pytest.approx(1.5), 1.4)
        redistributions.judged(rows[:2], case, 2)
        assert rows[0]["faster_by"] is None

    @pytest.mark.slow
    def test_what_the_program_writes(self, client, tmp_path, monkeypatch):
        path = tmp_path / "made.json"
        monkeypatch.setattr(redistributions.measuring, "start", lambda _: nullcontext(client))
        monkeypatch.setattr(
            redistributions,
            "fixed_cases",
            lambda *_: [
                redistributions.Stencil(
                    (16, 16), ((4,) * 4,) * 2, (0, 1), np.dtype("f8"), name="map_overlap"
                )
            ],
        )
        arguments = ["--megabytes", "1", "--repeats", "1", "--json", str(path)]
        arguments += ["--case", "16 row slabs", "--case", "map_overlap"]
        result = CliRunner().invoke(redistributions.main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        report = json.loads(path.read_text())
        assert (report["workers"], len(report["devices"])) == (4, 4)
        found = {(row["case"], row["way"]): row for row in report["rows"]}
        assert len(found) == 2 * 4 + 3
        assert not any("failed" in figures for figures in found.values())
        ours = {case: row for (case, way), row in found.items() if way == "dask_p2p"}
        assert all(row["wrong"] == 0 and row["faster_by"] > 0 for row in ours.values())
        assert all(len(row["cpu_s"]) == 1 and row["cpu_s"][0] > 0 for row in ours.values())
        columns = ours["16 row slabs to columns"]
        assert columns["least_anywhere_bytes"] == 3 / 4 * columns["matrix_bytes"]
        assert ours["4 x 4 to 16 row slabs"]["least_anywhere_bytes"] == 0
        rims = 2 * 16 * 8 * 4  # of each worker's row of blocks
        assert ours["map_overlap"]["least_anywhere_bytes"] == rims
        for figures in ours.values():
            assert figures["moved_bytes"] == figures["least_bytes"]
            assert figures["least_bytes"] >= figures["least_anywhere_bytes"]
        assert "16 row slabs to columns" in result.output

    def test_names_that_are_none(self):
        result = CliRunner().invoke(redistributions.main, ["--case", "diagonal"])
        assert result.exit_code == 2
        assert "3-D pencils" in result.output


class TestRivals:
    @pytest.mark.parametrize("parts", [1, 2, 6])
    @pytest.mark.parametrize("order", torch_nccl.ORDERS)
    def test_pack_exchange_unpack(self, order, parts):
        case = Case(size=24, dtype="int32", gpus=4, repeats=1, cpu=True)
        matrix = np.arange(24 * 24).reshape(24, 24)
        sources = np.split(matrix, 4)
        targets = [np.full((6, 24), -1) for _ in range(4)]
        shape = torch_nccl.buffer_shape(case, order, parts)
        pack, unpack = torch_nccl.ORDERS[order]
        for part in range(parts):
            sent = [
                torch_nccl.input_parts(slab, 4, parts)[:, :, part].transpose(pack)
                for slab in sources
            ]
            assert {tiles.shape for tiles in sent} == {shape}
            received = [np.stack([tiles[gpu] for tiles in sent]) for gpu in range(4)]
            for slab, tiles in zip(targets, received, strict=True):
                torch_nccl.output_parts(slab, 4, parts)[part] = tiles.transpose(unpack)
        assert np.array_equal(np.vstack(targets), matrix.T)

    @pytest.mark.parametrize("gpus", [1, 2, 3, 8])
    def test_each_stage_has_one_reader_a_sender(self, gpus):
        pairs = list(copy_engines.staged(gpus))
        assert len(set(pairs)) == len(pairs) == gpus * (gpus - 1)
        for stage in range(gpus - 1):
            receivers, senders = zip(*pairs[stage * gpus : (stage + 1) * gpus], strict=True)
            assert sorted(receivers) == sorted(senders) == list(range(gpus))

    def test_wrong_words_are_counted(self):
        device = copy_engines.Processor()
        slabs = [copy_engines.words(np, gpu * 12, 0, 12) for gpu in range(3)]
        received = [np.full(12, copy_engines.MODULUS, np.uint32) for _ in range(3)]
        copy_engines.exchange(device, slabs, received, True, 4)
        wrong = [copy_engines.count_wrong(device, received[0], 0, s, 4) for s in (1, 2)]
        assert wrong == [0, 0]
        received[0][4] += 1
        assert copy_engines.count_wrong(device, received[0], 0, 1, 4) == 1

    def test_tiles_that_never_came_are_wrong(self, monkeypatch):
        case = Case(size=12, dtype="float32", gpus=3, repeats=1, cpu=True)
        assert copy_engines.measure(case, copy_engines.Processor())["wrong"] == 0
        monkeypatch.setattr(copy_engines, "staged", lambda gpus: [(0, 1)])
        assert copy_engines.measure(case, copy_engines.Processor())["wrong"] == 5 * 4 * 4

    def test_the_quickest_form_is_timed_anew(self):
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

    def test_bands_cover_a_slab(self):
        case = Case(size=131072, dtype="int8", gpus=4, repeats=1, cpu=True)
        bands = list(case.bands())
        assert (bands[0][0], bands[-1][1]) == (0, 32768)
        assert all(one[1] == other[0] for one, other in pairwise(bands))
        with pytest.raises(ValueError, match="multiple"):
            Case(size=10, dtype="int8", gpus=4, repeats=1, cpu=True)

    def test_values_are_those_of_the_package(self):
        assert {dtype: indexed.modulus(dtype) for dtype in MODULI} == MODULI

    def test_without_their_libraries(self, monkeypatch, capsys, tmp_path):
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
    def test_on_processors(self, tmp_path):
        path = tmp_path / "rows.json"
        command = [sys.executable, "-m", "benchmarks.rivals", "--cpu", "--gpus", "2"]
        command += ["--size", "65", "--size", "64", "--repeats", "2", "--json", str(path)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
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
    def test_one_that_hangs(self, tmp_path):
        started = tmp_path / "started"
        in_a_group_of_its_own = (
            "import subprocess, sys, time\n"
            "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
            f"open({str(started)!r}, 'w').write(str(child.pid))\n"
            "time.sleep(60)"
        )
        with (tmp_path / "errors").open("wb") as errors:
            command = [sys.executable, "-c", in_a_group_of_its_own]
            assert rivals.run_for(command, 2, errors) == "not done after 2 s"
            assert rivals.run_for([sys.executable, "-c", ""], 30, errors) is None
        child = int(started.read_text())
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"

    @pytest.mark.parametrize("shape", [(8, 8), (300, 700), (1, 5)])
    @pytest.mark.parametrize("copy", [mpi_fft.copy_whole, mpi_fft.copy_in_blocks])
    def test_copies_of_what_mpi_brought(self, copy, shape):
        src = np.arange(np.prod(shape), dtype="f8").reshape(shape)
        dst = np.full(shape[::-1], -1.0)
        copy(dst, src)
        assert np.array_equal(dst, src.T)

    @pytest.mark.parametrize("transposed", [False, True])
    def test_slabs_of_mpi_processes(self, transposed):
        case = Case(size=12, dtype="int8", gpus=3, repeats=1, cpu=True)
        made = np.vstack([mpi_fft.values(case, rank, transposed) for rank in range(3)])
        matrix = np.arange(144).reshape(12, 12) % 127
        assert np.array_equal(made, matrix.T if transposed else matrix)

    def test_reasons(self):
        said = "Traceback\n  File\ntorch.OutOfMemoryError: too much\n[W] a farewell\n\n"
        assert rivals.why(said) == "torch.OutOfMemoryError: too much"
        assert rivals.why("expected 4 GPUs\n") == "expected 4 GPUs"
        assert rivals.why(" \n") == "it ended without a word"
        options = Namespace(dtype="int8", gpus=2)
        assert [made["size"] for made in rivals.failed("JAX", options, [8, 16], "x")] == [8, 16]


def test_what_growth_is_simulated_to_cost():
    one_pass, groups, two, three = growth.simulated(1000, 4)
    assert one_pass.edges == 1000**2
    assert groups.edges < 70_000
    assert groups.tasks < 1070
    assert (one_pass.moved, groups.moved, two.moved, three.moved) == (0.75, 0.75, 1.5, 2.25)
    assert three.edges < two.edges < one_pass.edges


def test_what_monitoring_costs_is_compared_within_rounds():
    bare_s = [1.0, 10.0, 2.0, 4.0, 1.0]  # a machine that others use too
    assert monitoring_cost.ratio(bare_s, bare_s) == (1, 1, 1)
    middle, low, high = monitoring_cost.ratio([1.5 * s for s in bare_s], bare_s)
    assert middle == low == high == 1.5
    middle, low, high = monitoring_cost.ratio([1.0, 11.0, 2.0, 8.0, 1.1], bare_s)
    assert middle == pytest.approx(1.1)
    assert low < middle < high


def test_monitoring_is_left_out_where_that_is_measured(client):
    x = client.persist(da.full((64, 48), 7.25, chunks=(16, 48)))  # which no other test has
    dask_p2p.register(client)
    rows = monitoring_cost.measured(client, x, rounds=1, runs=2)
    assert tuple(rows) == monitoring_cost.WAYS
    assert all(len(values) == 1 for row in rows.values() for values in row.values())
    runs = dask_p2p.last_runs(client, n=100)
    # Two rounds, the first of which warms up, of two ways that leave records.
    assert sum(run.name == dask_p2p.transpose(x).name for run in runs) == 2 * 2 * 2


def test_orders_of_several_hosts_are_simulated():
    """The package's order keeps all networks busy, and the order by rank does not."""
    network = "NDR, one a GPU"
    bounds = {
        (order, beside): hosts.simulated(network, 2, order, beside, 0.0).bounds
        for order in ("diagonal by rank", "two levels")
        for beside in (False, True)
    }
    assert bounds["two levels", True] == pytest.approx(1.0, abs=0.01)
    # What is read within the host takes 7 / 345 beside 8 / 45.
    assert bounds["two levels", False] == pytest.approx(1 + (7 / 345) / (8 / 45), abs=0.02)
    assert bounds["diagonal by rank", True] > 2
