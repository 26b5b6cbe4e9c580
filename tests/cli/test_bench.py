from __future__ import annotations

import contextlib
import io
import json
import re

import pytest
from click.testing import CliRunner
from rich.console import Console

from dask_p2p import measure
from dask_p2p.cli import _measuring, _options, _tables, p2p
from dask_p2p.cli import bench as command
from dask_p2p.cli._options import Site
from dask_p2p.indexed import indexed_array
from dask_p2p.measure import Exchange


@pytest.fixture
def bench(client, monkeypatch):
    """Run the command with the tests' cluster, of four workers."""

    def run(*args):
        monkeypatch.setattr(_measuring, "start", lambda _: contextlib.nullcontext(client))
        return CliRunner().invoke(p2p, ["bench", "--cpu", "--workers", "4", *args])

    return run


def fact(text, name):
    return next(
        re.split(r"\s{2,}", line.strip())[1] for line in text.splitlines() if line.startswith(name)
    )


def test_the_articles_fields(bench):
    result = bench("--shape", "768x1024", "--repeats", "1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "4 one-thread workers over TCP on" in fact(result.stdout, "devices")
    assert fact(result.stdout, "array") == "768 x 1024 float32, 3.00 MiB, axes 1, 0"
    assert fact(result.stdout, "cache block").endswith("elements")
    assert fact(result.stdout, "local input slab") == "4 of 192 x 1024"
    assert fact(result.stdout, "local output slab") == "4 of 256 x 768"
    assert fact(result.stdout, "tile") == "16 of 192 x 256"
    assert fact(result.stdout, "mode") == "async"
    assert re.search(r"bandwidth, 2 x bytes / median │ +[\d.]+ GB/s", result.stdout)
    assert "All 786432 elements are where they belong." in result.stdout


def test_a_cluster_that_is_there(cluster):
    arguments = ["--scheduler", cluster.scheduler_address, "--shape", "80x60", "--repeats", "1"]
    result = CliRunner().invoke(p2p, ["bench", *arguments, "--rivals"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"4 workers of {cluster.scheduler_address}" in fact(result.stdout, "devices")
    assert "All 4800 elements are where they belong." in result.stdout
    assert "failed" not in result.stdout
    result = CliRunner().invoke(p2p, ["bench", *arguments, "--workers", "2"])
    assert "for a cluster that is started here" in result.stderr


def test_json_of_both_modes_and_the_rivals(bench, monkeypatch):
    def p2p_fails(method):
        def way(x, axes):
            if method == "p2p":
                raise RuntimeError("it failed") from TypeError("no CuPy here\nat all")
            return x.transpose(axes).rechunk((10, 60), method=method)

        return way

    monkeypatch.setattr(measure, "dask_rechunk", p2p_fails)
    args = ["--shape", "60x40", "--dtype", "i2", "--mode", "both", "--repeats", "2", "--rivals"]
    result = bench(*args, "--json", "-")
    assert result.exit_code == 0, result.output
    assert 'Dask "p2p" failed: TypeError: no CuPy here' in result.stderr
    assert re.search(r"async is [\d.]+ times as fast as sync", result.stderr)
    assert re.search(r"and [\d.]+ times without the time between tasks", result.stderr)
    report = json.loads(result.stdout)
    assert report["versions"]["dask-p2p"]
    assert len(report["devices"]) == report["workers"]
    assert report["hardware"]["gpus"] == []
    assert report["hardware"]["cpu"]
    assert (report["shape"], report["dtype"], report["mode"]) == ([60, 40], "<i2", "both")
    assert "commit" in report
    names = ["dask_p2p sync", "dask_p2p async", 'Dask "tasks"', 'Dask "p2p"']
    assert [way["name"] for way in report["ways"]] == names
    for way in report["ways"][:3]:
        assert (way["wrong_elements"], way["failed"], len(way["times_s"])) == (0, None, 2)
        assert way["bandwidth_gbs"] == pytest.approx(2 * 60 * 40 * 2 / way["median_s"] / 1e9)
    assert [way["one_by_one"] for way in report["ways"][:3]] == [True, False, False]
    for way in report["ways"][:2]:
        assert way["moved_bytes"] == way["least_bytes"]
        assert way["moved_bytes"] == sum(pair["bytes"] for pair in way["pairs"])
        assert {pair["transport"] for pair in way["pairs"]} == {"cma"}
        assert way["first_s"] > 0 < way["link_gbs"]
    assert report["ways"][3] == {"name": 'Dask "p2p"', "failed": "TypeError: no CuPy here"}


def test_json_file_and_other_axes(bench, tmp_path):
    file = tmp_path / "out.json"
    result = bench(
        *("--shape", "12x8x10", "--axes", "2,0,1", "--mode", "sync", "--repeats", "1"),
        *("--json", str(file)),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert (report["axes"], report["mode"]) == ([2, 0, 1], "sync")
    assert report["ways"][0]["wrong_elements"] == 0
    assert fact(result.stdout, "mode") == "sync"


def test_wrong_elements_are_status_1(bench, monkeypatch):
    monkeypatch.setattr(measure, "p2p_transpose", lambda x, axes: x.transpose(axes) + 1)
    result = bench("--shape", "20x20", "--repeats", "1")
    assert result.exit_code == 1
    assert result.stderr == "Error: of 400 elements some are wrong: 400 of dask_p2p async\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--shape", "7"], "cannot be cut into 8 slabs"),
        (["--shape", "7x9", "--axes", "0,1,2"], "in any order"),
        (["--mode", "fast"], "'fast' is not one of"),
        (["--repeats", "0"], "0 is not in the range"),
        (["--json", "no/such/folder.json"], "no such folder"),
        (["--shape", "10000000x10000000"], "are free"),
        (["--dtype", "V4"], "boolean, integer, float or complex"),
    ],
)
def test_wrong_usage(bench, args, words):
    result = bench("--workers", "8", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr.splitlines()[-1]


def test_trouble_with_a_cluster_is_one_line(monkeypatch):
    def fail(site):
        raise OSError("no more\nprocesses")

    monkeypatch.setattr(_measuring, "start", fail)
    result = CliRunner().invoke(p2p, ["bench", "--cpu", "--shape", "8x8"])
    assert (result.exit_code, result.stderr) == (1, "Error: OSError: no more processes\n")


def test_gpu_fields():
    import numpy as np

    job = command.Job(
        Site(4, ("0", "1", "2", "3"), None, 2**40),
        (768, 1024),
        np.dtype("f4"),
        (1, 0),
        ("async",),
        1,
        False,
    )
    found = dict(command._facts(job, ["H200"] * 4))
    assert found["devices"] == "4 workers, one a GPU: 4 x H200"
    assert found["CUDA kernel"].startswith("permute_")
    assert found["CUDA tile"].endswith("words")
    assert found["CUDA thread block"].endswith("threads")
    assert re.match(r"\d+ thread blocks", found["grid"])


def test_transports_of_pairs():
    def text(pairs):
        return _tables.transports_text(Exchange(0, dict.fromkeys(pairs, 1), 0.0, [], []))

    assert text([]) == "none, nothing moved"
    assert text([("a", "b", "ipc")]) == "ipc for 1 pair"
    pairs = [(r, h, "ipc") for r in "abc" for h in "abc" if r != h]
    assert text(pairs) == "ipc for all 6 pairs"
    pairs[0] = ("a", "b", "comm")
    assert text(pairs) == "ipc for 5 pairs; comm for 1 pair (0<-1)"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_terminals_only(monkeypatch, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, record=True)
    monkeypatch.setattr(_tables, "Console", lambda **_: console)
    with _tables.progress(2, "transposing") as step:
        step()
        step()
    assert ("2/2" in console.export_text()) is terminal


def test_the_same_options_mean_the_same(monkeypatch):
    assert _options.order_of_axes((-1, 0), (2, 3)) == (1, 0)
    assert _options.order_of_axes(None, (2, 3, 4)) == (2, 1, 0)


def test_rivals_on_gpus_have_a_cluster_of_their_own(monkeypatch, client):
    started = []

    def start(site, **options):
        started.append(options)
        return contextlib.nullcontext(client)

    monkeypatch.setattr(_measuring, "start", start)
    monkeypatch.setattr(_measuring, "find_spec", lambda name: True)
    site = _options.Site(2, ("0", "1"), None, 2**40)
    rivals = _measuring.rival_ways(site, ["tasks"])
    assert list(rivals) == ['Dask "tasks" over UCX']
    measured = _measuring.measure_on(
        site,
        {"ours": lambda x, axes: x.T},
        rivals,
        lambda: indexed_array((8, 6), (2, 6), "f4"),
        (1, 0),
        1,
        lambda y: 0,
        lambda client: lambda: None,
    )
    assert started == [{}, {"protocol": "ucx"}]
    assert [runs.name for runs in measured] == ["ours", 'Dask "tasks" over UCX']
    assert _measuring.rival_ways(_options.Site(4, (), None, 2**40), ["p2p"]).keys() == {
        'Dask "p2p"'
    }
