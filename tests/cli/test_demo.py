import contextlib
import re
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from dask_p2p import cli as _options
from dask_p2p.cli import ClusterSpec, choose_cluster, default_side, p2p
from dask_p2p.cli import cluster as command
from tests.support import output_of

pytestmark = pytest.mark.programs

GIB = 2**30


def wrong_of(text, way):
    """Return the count of wrong elements, which is the last but one of the figures of a way."""
    line = next(line for line in text.splitlines() if line.startswith(f"{way}  "))
    return line.split()[-2]


@pytest.fixture
def demo(client, monkeypatch):
    """Run the command with the tests' cluster, of four workers."""
    monkeypatch.setattr(_options, "own_cluster", lambda *_, **__: contextlib.nullcontext(client))
    return lambda *args: CliRunner().invoke(p2p, ["demo", "--cpu", *args])


def test_demo(demo, client):
    result = demo("--size", "203")
    assert (result.exit_code, result.stderr) == (0, "")
    text = result.stdout
    assert "Started 4 one-thread workers over TCP on" in text
    assert f"Dashboard: {client.dashboard_link}" in text
    text = " ".join(text.split())
    assert "203 x 203 float64, 321.95 kiB" in text
    assert "All 41209 elements are where they belong." in text
    assert {wrong_of(result.stdout, f"dask{way}") for way in ("_p2p", " tasks", " p2p")} == {"0"}
    for head in ("first", "median", "GB/s", "wrong", "times as long"):
        assert f"{head}: " in text or f"{head}, " in text, "the table's head is explained"
    assert text.rpartition(". ")[2].startswith("Next: https://github.com/dask-p2p")
    moved = re.search(r"Moved (.+), least possible (.+); pairs of workers by transport: cma", text)
    assert moved[1] == moved[2]


def test_wrong_elements_are_status_1(demo, monkeypatch):
    monkeypatch.setattr(command, "transpose", lambda x: x.T + 1)
    result = demo("--size", "20")
    assert result.exit_code == 1
    assert wrong_of(result.stdout, "dask_p2p") == "400"
    assert wrong_of(result.stdout, "dask tasks") == "0"
    assert result.stderr == "Error: some elements are wrong: 400 of 400 of dask_p2p\n"
    assert "elements are where they belong" not in result.stdout


def test_an_exception_is_one_line(demo, monkeypatch):
    monkeypatch.setattr(command, "transpose", Mock(side_effect=RuntimeError("two\nlines")))
    result = demo("--size", "20")
    assert (result.exit_code, result.stderr) == (1, "Error: RuntimeError: two lines\n")


def test_a_way_of_dasks_that_fails_is_left_out(demo, monkeypatch):
    monkeypatch.setattr(command, "_rechunk", Mock(side_effect=RuntimeError("it failed\nlong ago")))
    result = demo("--size", "20")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "dask tasks failed: RuntimeError: it failed\n" in result.stdout
    assert "All 400 elements are where they belong." in result.stdout


def test_ways_on_gpus_have_the_clusters_that_are_best_for_them(monkeypatch):
    """Dask's own p2p fails with CuPy blocks, and its tasks are quickest over UCX."""
    for spec, clusters in ((True, [{}, {"protocol": "ucx"}]), (None, [{}, {}])):
        monkeypatch.setattr(command, "find_spec", lambda name, spec=spec: spec)
        clusters_and_methods = command.methods(on_gpus=True)
        assert [options for options, _ in clusters_and_methods] == clusters
        ways = [way for _, methods in clusters_and_methods for way in methods]
        assert ways == ["dask_p2p", "dask tasks"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--size", "0"], "0 is not in the range"),
        (["--workers", "0"], "0 is not in the range"),
        (["--size", "3"], "cannot be split into 4 slabs"),
        (["--size", "100000000"], "are free"),
    ],
)
def test_wrong_usage(demo, args, words):
    result = demo(*args)
    assert result.exit_code == 2
    assert words in result.stderr.splitlines()[-1]


def test_the_default_matrix_fits():
    assert default_side(ClusterSpec(4, (), None, 64 * GIB), 8) == 6000
    assert default_side(ClusterSpec(2, ("0", "1"), None, 280 * GIB), 4) == 32768
    assert default_side(ClusterSpec(2, ("0", "1"), None, 16 * GIB), 4) == 23170
    assert default_side(ClusterSpec(4, (), None, GIB), 8) == 4096
    assert default_side(ClusterSpec(4, (), None, 8), 8) == 4


def test_gpus_are_chosen_where_there_is_more_than_one(monkeypatch):
    gpu_names = ["0", "1", "2"]
    monkeypatch.setattr("dask_p2p.tools.cluster.usable_gpus", lambda: gpu_names)
    monkeypatch.setattr("dask_p2p.tools.cluster.free_gpu_bytes", lambda names: [GIB] * len(names))
    assert choose_cluster(None, cpu=False) == ClusterSpec(3, ("0", "1", "2"), None, 3 * GIB)
    assert choose_cluster(2, cpu=False).gpus == ("0", "1")
    assert choose_cluster(2, cpu=False).kind == "cupy"
    assert choose_cluster(9, cpu=True).gpus == ()
    gpu_names[1:] = []
    spec = choose_cluster(None, cpu=False)
    assert (spec.workers, spec.kind) == (4, "numpy")
    assert spec.note.startswith("There is one usable GPU only")


def test_more_workers_than_gpus(monkeypatch):
    monkeypatch.setattr("dask_p2p.tools.cluster.usable_gpus", lambda: ["0", "1"])
    result = CliRunner().invoke(p2p, ["demo", "--workers", "3"])
    assert result.exit_code == 2
    assert "there are 2 usable GPUs for 3 workers" in result.stderr


@pytest.mark.gpu(2)
def test_on_gpus():
    output = output_of("-m", "dask", "p2p", "demo", "--size", "2048", "--workers", "2")
    assert "2 workers, one per GPU" in output
    assert [wrong_of(output, way) for way in ("dask_p2p", "dask tasks")] == ["0", "0"]
