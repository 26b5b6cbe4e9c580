import contextlib
import os
import re
import signal
import subprocess
import sys
from glob import glob
from types import SimpleNamespace
from unittest.mock import Mock

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner, _NamedTextIOWrapper
from distributed import Event, wait
from skimage import data

import dask_p2p
from dask_p2p.cli import cluster as command
from dask_p2p.cli import p2p
from dask_p2p.tools import check as diagnosis
from tests.support import BOUND_S, output_of, persisted, run_command, spread
from tests.tools.test_check import GOOD, LINK
from tests.transports.loopback import wait_until

pytestmark = pytest.mark.programs


@pytest.fixture
def image(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("in.npy", data.astronaut())
    return data.astronaut()


@pytest.fixture
def dask(cluster):
    """Run a command with the tests' cluster, and return its exit status and outputs."""

    def run(*args, on_test_cluster=True, command="transpose"):
        scheduler = ["--scheduler", cluster.scheduler_address] if on_test_cluster else []
        return CliRunner().invoke(p2p, [command, *args, *scheduler])

    return run


def one_line(result, *words):
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    for word in words:
        assert word in line


def test_image(dask, image):
    result = dask("in.npy", "out.npy", "--axes", "2,0,1")
    assert result.exit_code == 0, result.output
    np.testing.assert_array_equal(np.load("out.npy"), image.transpose(2, 0, 1))
    assert result.stdout.startswith("out.npy: 3 x 512 x 512 of uint8, 768.00 kiB in ")
    assert result.stdout.endswith(" GB/s\n")
    assert result.stderr == ""  # no bar where there is no terminal


def test_zarr_and_quiet(dask, image):
    zarr = pytest.importorskip("zarr")
    result = dask("in.npy", "out.zarr", "--chunks", "2,100,-1", "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    out = zarr.open_array("out.zarr", mode="r")
    assert out.chunks == (2, 100, 512)
    np.testing.assert_array_equal(out[...], image.transpose())


def test_rechunk(dask, image):
    zarr = pytest.importorskip("zarr")
    assert dask("in.npy", "out.zarr", "--chunks", "100", command="rechunk").exit_code == 0
    out = zarr.open_array("out.zarr", mode="r")
    assert out.chunks == (100, 100, 3)
    np.testing.assert_array_equal(out[...], image)
    zeros = np.zeros(3)
    np.save("out.npy", zeros)
    one_line(dask("out.zarr", "out.npy", command="rechunk"), "there; --overwrite replaces it")
    np.testing.assert_array_equal(np.load("out.npy"), zeros)
    assert dask("out.zarr", "out.npy", "--overwrite", command="rechunk").exit_code == 0
    np.testing.assert_array_equal(np.load("out.npy"), image)


@pytest.mark.usefixtures("image")
def test_trouble_is_one_line(dask):
    np.savez("in.npz", a=np.zeros(3))
    os.mkdir("folder")
    one_line(dask("none.npy", "out.npy"), "none.npy", "No such file")
    one_line(dask("in.npz", "out.npy"), ".npz")
    one_line(dask("folder", "out.npy"), "cannot read folder")
    one_line(dask("in.npy", "out.tif"), ".npy or .zarr")
    one_line(dask("in.npy", "in.npy"), "already there")
    one_line(dask("in.npy", "no/out.npy"), "cannot write no/out.npy", "No such file")
    one_line(dask("in.npy", "out.npy", "--axes", "0,1"), "permutation of the 3 axes")
    one_line(dask("in.npy", "out.zarr", "--chunks", "0"), "0 is not a valid size")
    one_line(dask("in.npy", "out.zarr", "--chunks", "5,5"), "shape (3, 512, 512)", "chunks=(5, 5)")
    one_line(dask("in.npy", "out.zarr", "--chunks", "5,5,5,5"), "each of 3 axes", "4 sizes")
    assert sorted(os.listdir()) == ["folder", "in.npy", "in.npz"]


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize(
    "args",
    [
        [],
        ["in.npy", "out.npy", "--axes", "a"],
        ["in.npy", "out.npy", "--axes", "0,"],
        ["in.npy", "out.zarr", "--chunks", "big"],
        ["in.npy", "out.npy", "--chunks", "5"],
        ["in.npy", "out.npy", "--workers", "0"],
        ["in.npy", "out.npy", "--workers", "2", "--scheduler", "tcp://a:1"],
    ],
)
def test_wrong_usage(dask, args):
    result = dask(*args, on_test_cluster=False)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "tcp://no.such.host.invalid:8786", "no address", "what://a:1"]
)
def test_scheduler_that_does_not_answer(dask, monkeypatch, address):
    monkeypatch.setattr("dask_p2p.cli.CONNECT_S", 0.5)
    result = dask("in.npy", "out.npy", "--scheduler", address, on_test_cluster=False)
    one_line(result, f"no scheduler answers at {address}")
    assert os.listdir() == ["in.npy"]


@pytest.mark.usefixtures("image")
def test_an_unforeseen_exception_is_one_line_too(dask, monkeypatch):
    fail = Mock(side_effect=RuntimeError("two\nlines"))
    monkeypatch.setattr("dask_p2p.cli.files.write_blocks", fail)
    one_line(dask("in.npy", "out.npy"), "cannot write out.npy: two lines")
    assert os.listdir() == ["in.npy"]


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize("terminal", [True, False])
def test_bar_on_terminals_only(dask, monkeypatch, terminal):
    monkeypatch.setattr(_NamedTextIOWrapper, "isatty", lambda stream: terminal)
    result = dask("in.npy", "out.zarr", "--chunks", "100")
    assert result.exit_code == 0
    assert ("100%" in result.stderr) is terminal
    assert terminal or not result.stderr


def test_help_loads_no_command():
    code = (
        "import sys; from click.testing import CliRunner; from dask_p2p.cli import p2p;"
        "r = CliRunner().invoke(p2p, ['--help']); assert r.exit_code == 0; print(r.output);"
        "heavy = {'zarr', 'dask_p2p.cli.cluster', 'dask_p2p.cli.files'};"
        "print('loaded', heavy & set(sys.modules))"
    )
    output = output_of("-c", code)
    assert "transpose  Transpose the array of a file" in output
    assert "loaded set()" in output


BEGUN = ".*.partial"
BLOCK = f"{BEGUN}/*/c/*"
PROGRAM = [sys.executable, "-m", "dask", "p2p", "transpose"]


@contextlib.contextmanager
def writing(*command, path=BLOCK):
    """Run a command in a session of its own, and give it once a path is there."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, start_new_session=True) as process:
        try:
            wait_until(lambda: process.poll() is not None or glob(path))
            yield process
        finally:
            process.kill()


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize(
    ("how", "path"), [("Ctrl-C", BEGUN), ("SIGTERM", BLOCK), ("a terminal that closes", BLOCK)]
)
def test_the_program_leaves_nothing_when_it_is_stopped(how, path):
    # With 2,048 blocks it is far from its end, however late the signal comes on a busy machine.
    command = [*PROGRAM, "in.npy", "out.zarr", "--workers", "1", "--chunks", "3,8,16"]
    with writing(*command, path=path) as process:
        if how == "SIGTERM":
            process.terminate()
        elif how == "Ctrl-C":  # a terminal sends it to all processes
            os.killpg(process.pid, signal.SIGINT)
        else:  # its shell sends it to all processes, then it itself
            os.killpg(process.pid, signal.SIGHUP)
            os.killpg(process.pid, signal.SIGHUP)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err.strip()) == (1, "Aborted!")
    assert out == ""
    assert os.listdir() == ["in.npy"]


@pytest.mark.usefixtures("image")
def test_the_program_goes_on_under_nohup():
    command = ["nohup", *PROGRAM, "in.npy", "out.zarr", "--workers", "1", "--chunks", "32"]
    with writing(*command) as process:
        os.killpg(process.pid, signal.SIGHUP)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "GB/s" in out
    assert sorted(os.listdir()) == ["in.npy", "out.zarr"]


def test_the_program_tells_a_workers_trouble_in_one_line(image):
    limited = ["bash", "-c", 'ulimit -f 300; exec "$@"', "bash", *PROGRAM]
    noise = np.random.default_rng(0).integers(0, 255, image.shape, np.uint8)
    np.save("noise.npy", noise)
    process = run_command(*limited, "noise.npy", "out.zarr", "--workers", "1", "--quiet")
    assert (process.returncode, process.stdout) == (1, "")
    # Descriptors of blocks do not fit either; blocks are sent by messages then, with a warning.
    (line,) = (line for line in process.stderr.splitlines() if line.startswith("Error"))
    assert line.startswith("Error: cannot write out.zarr: ")
    assert "File too large" in line
    assert "Traceback" not in process.stderr
    assert sorted(os.listdir()) == ["in.npy", "noise.npy"]


def test_runs_are_those_of_the_page(client, dask):
    x = spread(client, da.ones((64, 64), chunks=(16, 64)))
    persisted(client, dask_p2p.rechunk(x, (64, 16)))
    persisted(client, dask_p2p.iterate(lambda u: u[1:-1], x, {0: 1}, 12, boundary=0.0, ranks=2))
    head, section, rechunk = dask("--count", "2", command="runs").stdout.splitlines()
    assert head.split()[:4] == ["start", "operation", "shape", "dtype"]
    assert "fallbacks" not in head, "no run has any"
    assert re.search("p2p-iterate .* 12 of 12", section)
    assert re.search("p2p-rechunk .* 4 of 1 x 4 .* done", rechunk)


def wait_for_event(block):
    Event("runs").wait(BOUND_S)
    return block


def test_a_table_is_printed_again_until_ctrl_c(client, dask, monkeypatch):
    x = spread(client, da.ones((64, 64), chunks=(16, 64)))
    event = Event("runs", client=client)
    y = dask_p2p.map_overlap(wait_for_event, x, {0: 1}, "periodic", dtype=float).persist()
    pauses_s = []

    def finish_then_stop(seconds):
        pauses_s.append(seconds)
        if len(pauses_s) == 2:
            raise KeyboardInterrupt
        event.set()
        wait(y)

    monkeypatch.setattr(command, "time", SimpleNamespace(sleep=finish_then_stop))
    wait_until(lambda: any(run.under_way for run in dask_p2p.last_runs(client, 1)))
    result = dask("--count", "1", "--watch", "0.5", command="runs")
    _, before, _, after = result.stdout.splitlines()
    assert re.search("0 of 4 x 1 .*%", before)
    assert re.search("4 of 4 x 1 .* done", after)
    assert pauses_s == [0.5, 0.5]


@pytest.mark.parametrize("name", ["runs", "check"])
def test_no_scheduler(name):
    result = CliRunner().invoke(p2p, [name, "--scheduler", "no address"])
    one_line(result, "no scheduler answers at no address")


def check(*args):
    return CliRunner().invoke(p2p, ["check", *args])


def test_a_cluster_that_it_starts():
    result = check("--workers", "2", "--cpu")
    assert result.exit_code == 0, result.output
    for words in ("Transport", "cma", "GB/s"):
        assert words in result.output
    # A busy machine may make one way look slow.
    assert "No problems found." in result.output or "times as fast" in result.output


def test_one_worker_makes_no_pair():
    result = check("--workers", "1", "--cpu")
    assert result.exit_code == 0, result.output
    assert "No pair of workers to check" in result.output
    assert "No problems found." not in result.output
    assert "GB/s" not in result.output


def test_problems_and_links_that_do_not_work(cluster, monkeypatch):
    broken = diagnosis.Link("b", "a", None, 0.0, 0.0, {}, "TransferError: no answer")
    problem = diagnosis.Problem(("a", "b"), "something is slow", "Do this")
    report = diagnosis.Report([GOOD, GOOD | {"address": "b"}], [LINK, broken], [problem])
    monkeypatch.setattr(diagnosis, "check", lambda client: report)
    result = check("--scheduler", cluster.scheduler_address)
    assert result.exit_code == 1
    assert "Worker 0, 1: something is slow. Do this." in result.output
    assert "NVIDIA H200" in result.output
    assert "should carry 450 GB/s one way" in result.output


def test_wrong_use():
    assert CliRunner().invoke(p2p, ["runs"]).exit_code == 2
    result = check("--scheduler", "tcp://127.0.0.1:1", "--workers", "2")
    assert "for a cluster on this machine" in result.output
