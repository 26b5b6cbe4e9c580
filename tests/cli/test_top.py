from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import dask.array as da
import pytest
from click.testing import CliRunner

import dask_p2p
from dask_p2p.cli import p2p, top
from dask_p2p.monitoring.records import Fallback, Stage
from dask_p2p.monitoring.runs import runs_of
from dask_p2p.registration import workers_of
from tests.monitoring.test_records import record
from tests.support import persisted


def run(*args):
    return CliRunner().invoke(p2p, ["top", *map(str, args)])


@pytest.fixture
def address(cluster, client):
    """Of a cluster that has moved something."""
    x = persisted(client, da.ones((64, 48), chunks=(16, 48)))
    persisted(client, dask_p2p.transpose(x))
    return cluster.scheduler_address


def test_one_look(address, client):
    result = run("--scheduler", address, "--once", "--runs", 1)
    assert result.exit_code == 0, result.output
    (run_,) = dask_p2p.last_runs(client, n=1)
    lines = [line.split() for line in result.output.splitlines()]
    assert any({"transpose", "48", "64", "float64"} <= set(line) for line in lines)
    names = {worker.removeprefix("tcp://") for worker in workers_of(client)}
    pairs = {(line[0], line[1]) for line in lines if line and line[0] in names}
    assert {(f"tcp://{a}", f"tcp://{b}") for a, b in pairs} == {pair[:2] for pair in run_.pairs}


def shown(runs, columns=200):
    from rich.console import Console

    console = Console(width=columns, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(top._view(runs, columns))
    return console.export_text()


def test_what_is_shown():
    stages = (Stage("b", "cma", 3_000_000, 0.1, 0.001), Stage("c", "ipc", 1000, 0.1, None))
    runs = runs_of([record(0, 1.0, stages, fallbacks=(Fallback("c", "pinned", "why"),))])
    lines = [" ".join(line.split()) for line in shown(runs).splitlines()]
    assert "a b cma 1 2.86 MiB 3" in lines
    assert "a c ipc 1 0.98 kiB - pinned" in lines
    assert all(name in shown(runs) for name in ("dtype", "4 x 2", "attempts"))
    narrow = shown(runs, 80)
    assert "dtype" not in narrow
    assert "4 x 2" in narrow
    many = tuple(Stage(f"w{i}", "cma", i, 0.1, 0.001) for i in range(40))
    text = shown(runs_of([record(0, 1.0, many)]))
    assert "and 10 more links" in text
    assert "w39" in text
    assert "w9" not in text
    assert "No run yet" in shown(runs_of([]))


def read_until(terminal, deadline_s):
    ready, _, _ = select.select([terminal], [], [], max(0, deadline_s - time.monotonic()))
    assert ready
    return os.read(terminal, 65536)


def test_a_terminal_until_ctrl_c(address):
    """It draws more than once, and leaves the terminal as it was."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "dask", "p2p", "top", "--scheduler", address]
    running = subprocess.Popen(
        [*command, "--interval", "0.1"],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"},
    )
    os.close(child)
    text = b""
    deadline_s = time.monotonic() + 60
    try:
        while text.count(b" transpose") < 3:
            text += read_until(parent, deadline_s)
        running.send_signal(signal.SIGINT)
        with suppress(OSError):  # once its end is closed
            while True:
                text += read_until(parent, deadline_s)
        assert running.wait(30) == 0, text
    finally:
        running.kill()
        running.wait()
        os.close(parent)
    assert b"Traceback" not in text
    assert text.count(b"\x1b[?1049h") == text.count(b"\x1b[?1049l") == 1


def test_wrong_use():
    assert "Missing option '--scheduler'" in run().output
    assert run("--scheduler", "tcp://127.0.0.1:1", "--interval", "0").exit_code == 2
    result = run("--scheduler", "no address", "--once")
    assert result.exit_code == 1
    assert "no scheduler answers at no address" in result.output
