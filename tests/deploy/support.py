"""Running what deployment files say, as it is there."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p
from tests.docs.pages import ROOT
from tests.support import BOUND_S, has_plugin, import_path, indexed, run_command
from tests.transports.loopback import wait_until

DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent


def environment(**variables):
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    # Workers are forked off a process that has imported everything, and nobody looks what they do.
    quick = {
        "DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver",
        "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    }
    return {**os.environ, **quick, "PYTHONPATH": import_path(), "PATH": path, **variables}


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def is_valid(path, schema):
    """Return whether a file is what one of the schemas demands that check-jsonschema has."""
    command = [BIN / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", path]
    return run_command(*command).returncode == 0


def output_of(*command, timeout_s=100, cwd=None, **variables):
    process = run_command(*command, env=environment(**variables), cwd=cwd, timeout_s=timeout_s)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@contextmanager
def running(folder, *commands, **variables):
    """Run commands at a time; what they say is in files of a folder."""
    logs = [folder / f"{number}.log" for number in range(len(commands))]
    processes = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("w") as file:
                process = subprocess.Popen(
                    command,
                    env=environment(**variables),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            processes.append(process)
        try:
            yield
        except BaseException:
            print(*(log.read_text() for log in logs), sep="\n---\n")  # noqa: T201  # for pytest
            raise
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)


def transpose_on(address, workers, **kwargs):
    """Transpose on a cluster that has the plugin before a client asks for it."""
    x = indexed((40, 12))
    y = dask_p2p.transpose(da.from_array(x, chunks=(10, 12)))  # before there is a client
    with Client(address, timeout=BOUND_S, **kwargs) as client:
        client.wait_for_workers(workers, timeout=BOUND_S)
        # The scheduler gives it to those that have joined.
        wait_until(lambda: [*client.run(has_plugin).values()] == [True] * workers)
        np.testing.assert_array_equal(client.compute(y).result(timeout=BOUND_S), x.T)
