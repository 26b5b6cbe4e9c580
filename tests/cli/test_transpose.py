from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time

import click
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console
from skimage import data

from dask_p2p.cli import _options, p2p
from dask_p2p.cli import transpose as command

pytestmark = pytest.mark.programs


@pytest.fixture
def image(tmp_path, monkeypatch):
    """A real file in the current folder."""
    monkeypatch.chdir(tmp_path)
    np.save("in.npy", data.astronaut())
    return data.astronaut()


@pytest.fixture
def dask(cluster):
    """Run the command with the tests' cluster, and return its exit status and outputs."""

    def run(*args, here=True):
        scheduler = ["--scheduler", cluster.scheduler_address] if here else []
        return CliRunner().invoke(p2p, ["transpose", *args, *scheduler])

    return run


def one_line(result, *words):
    """Check that it failed as it should."""
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    for word in words:
        assert word in lines[0]
    assert "Traceback" not in result.output


def test_image(dask, image):
    result = dask("in.npy", "out.npy", "--axes", "2,0,1", "--memory", "500kB")
    assert result.exit_code == 0, result.output
    np.testing.assert_array_equal(np.load("out.npy"), image.transpose(2, 0, 1))
    for word in ("in.npy", "out.npy", "512 x 512 x 3", "3 x 512 x 512", "uint8", "768.00 kiB"):
        assert word in result.stdout
    assert "6, each below 488.28 kiB" in result.stdout
    assert "GB/s" in result.stdout
    assert result.stderr == ""  # no bar where there is no terminal


def test_the_number_of_passes_is_told_before_the_first(dask, image):
    result = dask("in.npy", "out.npy", "--memory", "500kB")
    assert result.stdout.startswith("Reading and writing in 6 passes ...\n")
    assert dask("in.npy", "one.npy").stdout.startswith("Reading and writing in 1 pass ...\n")
    assert image.nbytes == 768 * 1024


@pytest.mark.usefixtures("image")
def test_memory_that_is_of_no_use_is_refused(dask):
    one_line(dask("in.npy", "out.npy", "--memory", "100B"), "in.npy", "at least", "1000 passes")
    one_line(dask("in.npy", "out.npy", "--memory", "1PiB"), "1.00 PiB", "workers may use", "less")
    assert os.listdir() == ["in.npy"]


def test_chunks_of_an_npy_file_make_no_difference(dask, image):
    result = dask("in.npy", "out.npy", "--chunks", "10,10,1")
    assert "has no chunks" in result.stdout
    np.testing.assert_array_equal(np.load("out.npy"), image.transpose())


def test_zarr_and_quiet(dask, image):
    zarr = pytest.importorskip("zarr")
    result = dask("in.npy", "out.zarr", "--chunks", "2,100,-1", "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    out = zarr.open_array("out.zarr", mode="r")
    assert out.chunks == (2, 100, 512)
    np.testing.assert_array_equal(out[...], image.transpose())


@pytest.mark.usefixtures("image")
def test_one_size_for_all_axes(dask):
    zarr = pytest.importorskip("zarr")
    assert dask("in.npy", "out.zarr", "--chunks", "100").exit_code == 0
    assert zarr.open_array("out.zarr", mode="r").chunks == (3, 100, 100)


def test_force(dask, image):
    assert dask("in.npy", "out.npy").exit_code == 0
    before = os.stat("out.npy")
    one_line(dask("in.npy", "out.npy", "--axes", "0,1,2"), "already there; --force replaces it")
    assert os.stat("out.npy") == before
    assert dask("in.npy", "out.npy", "--axes", "0,1,2", "--force").exit_code == 0
    np.testing.assert_array_equal(np.load("out.npy"), image)


@pytest.mark.usefixtures("image")
def test_trouble_is_one_line(dask):
    np.save("objects.npy", np.array([{}]), allow_pickle=True)
    np.savez("in.npz", a=np.zeros(3))
    with open("cut.npy", "wb") as cut, open("in.npy", "rb") as whole:
        cut.write(whole.read(1000))
    with open("text.npy", "w") as file:
        file.write("hello")
    os.mkdir("folder")
    one_line(dask("none.npy", "out.npy"), "none.npy", "No such file")
    one_line(dask("cut.npy", "out.npy"), "truncated", "786560", "1000")
    one_line(dask("text.npy", "out.npy"), "no .npy file")
    one_line(dask("objects.npy", "out.npy"), "Python objects")
    one_line(dask("in.npz", "out.npy"), ".npz")
    one_line(dask("folder", "out.npy"), "no Zarr array")
    one_line(dask("in.npy", "out.tif"), ".npy or .zarr")
    one_line(dask("in.npy", "in.npy", "--force"), "input itself")
    one_line(dask("in.npy", "no/out.npy"), "no folder")
    one_line(dask("in.npy", "out.npy", "--axes", "0,1"), "3 dimensions")
    one_line(dask("in.npy", "out.npy", "--chunks", "0"), "chunks")
    assert not [name for name in os.listdir() if "out" in name or "partial" in name]


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize(
    "args",
    [
        [],
        ["in.npy", "out.npy", "--axes", "a"],
        ["in.npy", "out.npy", "--axes", "0,"],
        ["in.npy", "out.npy", "--chunks", "big"],
        ["in.npy", "out.npy", "--memory", "lots"],
        ["in.npy", "out.npy", "--memory", "0"],
        ["in.npy", "out.npy", "--workers", "0"],
        ["in.npy", "out.npy", "--workers", "2", "--scheduler", "tcp://a:1"],
    ],
)
def test_wrong_usage(dask, args):
    result = dask(*args, here=False)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "tcp://no.such.host.invalid:8786", "no address", "what://a:1"]
)
def test_scheduler_that_does_not_answer(dask, monkeypatch, address):
    monkeypatch.setattr(_options, "_CONNECT_S", 0.5)
    result = dask("in.npy", "out.npy", "--scheduler", address, here=False)
    one_line(result, f"no scheduler answers at {address}")
    assert os.listdir() == ["in.npy"]


@pytest.mark.usefixtures("image")
def test_an_unforeseen_exception_is_one_line_too(dask, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("dask_p2p.files.prepare", fail)
    one_line(dask("in.npy", "out.npy"), "RuntimeError: two lines")


@pytest.mark.parametrize("terminal", [True, False])
def test_bar_on_terminals_only(monkeypatch, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, record=True)
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    with command._progress(2048, quiet=False) as advance:
        advance(1024)
        advance(1024)
    assert ("2.0/2.0 KiB" in console.export_text()) is terminal


def test_help_loads_no_command():
    code = (
        "import sys; from click.testing import CliRunner; from dask_p2p.cli import p2p;"
        "r = CliRunner().invoke(p2p, ['--help']); assert r.exit_code == 0; print(r.output);"
        "heavy = {'rich', 'zarr', 'dask_p2p.files', 'dask_p2p.cli.transpose'};"
        "print('loaded', heavy & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "transpose  Transpose a file" in result.stdout
    assert "loaded set()" in result.stdout, result.stdout + result.stderr


def test_no_such_command():
    result = CliRunner().invoke(p2p, ["nothing"])
    assert result.exit_code == 2
    assert "No such command" in result.stderr


def test_the_group_wants_commands(monkeypatch):
    monkeypatch.setattr(command, "transpose", None)
    with pytest.raises(TypeError, match="no click command"):
        p2p.get_command(click.Context(p2p), "transpose")


PROGRAM = [sys.executable, "-m", "dask", "p2p", "transpose"]


def test_the_program_starts_a_cluster_of_its_own(image):
    done = subprocess.run(
        [*PROGRAM, "in.npy", "out.npy", "--axes", "2,0,1", "--workers", "2"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "GB/s" in done.stdout
    np.testing.assert_array_equal(np.load("out.npy"), image.transpose(2, 0, 1))


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_the_program_leaves_nothing_when_it_is_stopped(how):
    started = subprocess.Popen(
        [*PROGRAM, "in.npy", "out.zarr", "--workers", "1", "--memory", "4kB", "--chunks", "8"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with started, contextlib.ExitStack() as stack:
        stack.callback(started.kill)
        deadline_s = time.monotonic() + 30
        while not [name for name in os.listdir() if "partial" in name]:
            assert time.monotonic() < deadline_s
            assert started.poll() is None
            time.sleep(0.05)
        time.sleep(0.3)
        if how == "Ctrl-C":  # a terminal sends it to all processes
            os.killpg(started.pid, signal.SIGINT)
        else:
            started.send_signal(signal.SIGTERM)
        out, err = started.communicate(timeout=30)
    assert (started.returncode, err.strip()) == (1, "Aborted!")
    assert re.fullmatch(r"Reading and writing in \d+ passes \.\.\.\n", out)
    assert os.listdir() == ["in.npy"]


def test_the_program_tells_a_workers_trouble_in_one_line(image):
    # A limit that the file itself stays under, but not the space that would be reserved.
    limited = ["bash", "-c", 'ulimit -f 300; exec "$@"', "bash", *PROGRAM]
    noise = np.random.default_rng(0).integers(0, 255, image.shape, np.uint8)
    np.save("noise.npy", noise)
    done = subprocess.run(
        [*limited, "noise.npy", "out.zarr", "--workers", "1", "--quiet"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: cannot write out.zarr (worker on ")
    assert "File too large" in line
    assert sorted(os.listdir()) == ["in.npy", "noise.npy"]
