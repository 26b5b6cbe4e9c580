from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import benchmarks
from benchmarks import chart
from benchmarks.bench import bench

RESULTS = Path(benchmarks.__file__).parent / "results"
CHARTED = sorted(path for path in RESULTS.glob("*.json") if not path.stem.endswith("-engines"))


def report(limit=True):
    """What `python -m benchmarks` writes, with figures that are easy to reckon with."""
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


def test_fractions_of_the_limit():
    series = chart.read_series([report()])
    found = {s.way: [*chart.fractions(s, series).values()] for s in series}
    assert found["dask_p2p"] == pytest.approx([1 / 4, 1 / 4])
    assert found[chart.EXCHANGE] == pytest.approx([1 / 2, 1 / 2])
    assert found["a new one"] == pytest.approx([1 / 8, 1 / 8])
    assert "JAX" not in found
    assert {s.machine for s in series} == {"2 x A GPU"}


def test_no_limit_of_another_machine_or_dtype():
    theirs = report(limit=False)
    theirs["hardware"]["gpus"] = ["B GPU"] * 4
    series = chart.read_series([report(), theirs])
    assert not any(chart.fractions(s, series) for s in series if s.machine == "2 x B GPU")
    for measured in theirs["rows"]:
        measured["dtype"] = "int8"
    theirs["hardware"]["gpus"] = ["A GPU"] * 4
    series = chart.read_series([report(), theirs])
    assert not any(chart.fractions(s, series) for s in series if s.dtype == "int8")


def test_panels():
    time_panel, limit_panel = chart.draw([report()]).axes
    labels = {line.get_label() for line in time_panel.get_lines()}
    assert labels == {"dask_p2p", "one no-op layer", "torch + NCCL", "a new one", chart.LIMIT}
    labels = {line.get_label() for line in limit_panel.get_lines() if line.get_label()[0] != "_"}
    assert labels == {"dask_p2p", chart.EXCHANGE, "torch + NCCL", "a new one"}
    assert len(chart.draw([report(limit=False)]).axes) == 1
    with pytest.raises(ValueError, match="no square matrix in even slabs"):
        chart.draw([{**report(), "rows": []}])


def test_machines_and_dtypes_are_told_apart():
    both = chart.draw([report(), json.loads((RESULTS / "cpu-2-cores.json").read_text())])
    labels = {line.get_label() for line in both.axes[0].get_lines()}
    assert "dask_p2p, 2 x A GPU, float32" in labels
    assert any("float64" in label and "workers on" in label for label in labels)


def test_the_same_results_give_the_same_files(tmp_path):
    path = tmp_path / "made.json"
    path.write_text(json.dumps(report()))
    chart.main([str(path)])
    again = [tmp_path / "again.png", tmp_path / "again.svg"]
    chart.main([str(path), "-o", str(again[0]), "-o", str(again[1])])
    for other in again:
        assert path.with_suffix(other.suffix).read_bytes() == other.read_bytes()
    assert b"<dc:date>" not in again[1].read_bytes()


@pytest.mark.parametrize("path", CHARTED, ids=lambda path: path.name)
def test_results_that_are_there(path):
    assert all(panel.get_lines() for panel in chart.draw([json.loads(path.read_text())]).axes)


def test_results_that_are_there_as_one_chart(tmp_path):
    chart.main([*map(str, CHARTED), "-o", str(tmp_path / "chart.svg")])
    assert (tmp_path / "chart.svg").stat().st_size > 10_000


def test_one_dtype_of_several(tmp_path):
    made = report()
    made["rows"] += [{**measured, "dtype": "int8"} for measured in made["rows"]]
    charts = []
    for contents, arguments in ((made, ["--dtype", "int8"]), (made, [])):
        path = tmp_path / "made.json"
        path.write_text(json.dumps(contents))
        chart.main([str(path), "-o", str(tmp_path / "made.svg"), *arguments])
        charts.append((tmp_path / "made.svg").read_text().count("<!-- dask_p2p, "))
    assert charts == [1, 4]  # beside the exchange only


def test_some_ways_of_several(tmp_path):
    path = tmp_path / "made.json"
    path.write_text(json.dumps(report()))
    arguments = ["-o", str(tmp_path / "made.svg"), "--way", "a new one", "--way", chart.LIMIT]
    chart.main([str(path), *arguments])
    drawn = (tmp_path / "made.svg").read_text()
    assert "<!-- a new one -->" in drawn
    assert "<!-- dask_p2p -->" not in drawn


def test_what_the_program_writes(cluster, tmp_path):
    path = tmp_path / "made.json"
    arguments = ["--scheduler", cluster.scheduler_address, "--json", str(path)]
    arguments += ["--size", "64", "--repeats", "1"]
    result = CliRunner().invoke(bench, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    made = json.loads(path.read_text())
    medians_s = [row["median_s"] for row in made["rows"]]
    made["rows"] += [{**row, "case": "uneven blocks", "median_s": 1} for row in made["rows"]]
    made["rows"] += [{**row, "shape": [64, 63], "median_s": 1} for row in made["rows"]]
    series = chart.read_series([made])
    assert [s.way for s in series] == ["dask_p2p", chart.EXCHANGE, chart.FLOOR]
    assert [[*s.median_s.values()] for s in (series[0], series[2])] == [[t] for t in medians_s]
    assert "4 workers" in chart.caption([made])


def test_caption():
    assert chart.caption([report()]) == "2 x A GPU, driver 1.2, 2026-11-21, commit 0123456789ab"


def test_unknown_formats(capsys):
    with pytest.raises(SystemExit):
        chart.main(["x.json", "-o", "x.gif"])
    assert ".svg or .png" in capsys.readouterr().err
