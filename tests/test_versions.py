"""Clusters where another version of the package runs at one side: the first one, which is real."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

import dask_p2p
from dask_p2p.errors import RegistrationError
from dask_p2p.registration import workers_of
from tests.support import indexed, result_of

pytestmark = pytest.mark.programs

ROOT = os.path.dirname(os.path.dirname(dask_p2p.__file__))
FIRST = "b3fac44"  # the last commit before values had a format

CLIENT = """
import sys, dask.array as da, numpy as np, dask_p2p
from distributed import Client
assert dask_p2p.__file__.startswith(sys.argv[2]), dask_p2p.__file__
x = np.arange(480).reshape(40, 12)
before = dask_p2p.transpose(da.from_array(x, chunks=(10, 12)))
with Client(sys.argv[1]) as client:
    for make in (lambda: before, lambda: dask_p2p.transpose(da.from_array(x, chunks=(10, 12)))):
        try:
            print(client.compute(make()).result(timeout=60).shape)
        except Exception as exc:
            print(f"{type(exc).__name__}: {exc}")
"""

CLUSTER = """
import sys, dask_p2p
from distributed import Client, LocalCluster
if __name__ == "__main__":
    assert dask_p2p.__file__.startswith(sys.argv[1]), dask_p2p.__file__
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            dask_p2p.register(client)
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A folder with the first version."""
    folder = tmp_path_factory.mktemp("first")
    archive = subprocess.run(
        ["git", "archive", FIRST, "dask_p2p"], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"commit {FIRST} is not here: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return str(folder)


def python(program, path, *args, **kwargs):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([path, ROOT])}
    command = [sys.executable, str(program), *args]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, **kwargs)


@contextmanager
def cluster_of(program, path):
    """The address of a cluster in a process of its own, with the package that lies there."""
    process = python(program, path, path, stdin=subprocess.PIPE)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate("", timeout=60)


@contextmanager
def worker_process(address, path):
    """A worker with the package that lies there."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([path, ROOT])}
    command = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--no-dashboard"]
    process = subprocess.Popen(
        [*command, "--nthreads", "1", "--no-nanny"], env=env, cwd=path, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def before():
    """A graph that is older than any client, and so registers nothing."""
    return x_and_lazy()[1]


@pytest.fixture
def bare():
    """A client of a cluster of this version, without its plugins."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def programs(tmp_path):
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "cluster.py").write_text(CLUSTER)
    return tmp_path


def x_and_lazy():
    x = indexed((40, 12))
    return x, dask_p2p.transpose(da.from_array(x, chunks=(10, 12)))


def test_a_client_of_the_first_version_harms_nobody(bare, first, programs):
    precious = bare.scatter({"a": 1, "b": 2}, broadcast=True)
    workers = set(workers_of(bare))
    for _ in range(2):  # the second time with the plugins, which the end of this registers
        process = python(programs / "client.py", first, bare.scheduler.address, first)
        said, _ = process.communicate(timeout=100)
        assert len(said.splitlines()) == 2, said
        for line in said.splitlines():
            assert line.startswith("InputError: expected values of dask_p2p ")
            assert "(no format)" in line
        assert set(workers_of(bare)) == workers
        assert bare.gather(precious) == {"a": 1, "b": 2}
        x, y = x_and_lazy()
        np.testing.assert_array_equal(result_of(bare, bare.compute(y)), x.T)


def test_a_cluster_of_the_first_version_is_not_harmed(first, programs):
    x, before = x_and_lazy()
    with (
        cluster_of(programs / "cluster.py", first) as address,
        Client(address) as client,
    ):
        precious = client.scatter({"a": 1, "b": 2}, broadcast=True)
        workers = set(workers_of(client))
        for _ in range(2):
            with pytest.raises(
                RegistrationError, match=r"expected dask_p2p .* on the scheduler, got"
            ):
                x_and_lazy()
        with pytest.raises(RuntimeError, match="different environments"):  # Dask's own
            result_of(client, client.compute(before))
        assert set(workers_of(client)) == workers
        assert client.gather(precious) == {"a": 1, "b": 2}
        process = python(programs / "client.py", first, address, first)
        said, _ = process.communicate(timeout=100)
        assert said.splitlines() == [str(x.T.shape)] * 2


def test_a_worker_of_the_first_version_is_named_and_not_lost(before, bare, first):
    there = set(workers_of(bare))
    with worker_process(bare.scheduler.address, first):
        bare.wait_for_workers(3, timeout=60)
        (old,) = set(workers_of(bare)) - there
        precious = bare.scatter({"a": 1}, workers=[old])
        with pytest.raises(RegistrationError, match=f"got worker {old}: dask_p2p"):
            x_and_lazy()
        y = bare.compute(before, workers=[old])
        with pytest.raises(RegistrationError, match=old):
            result_of(bare, y)
        assert bare.gather(precious) == {"a": 1}
        assert old in workers_of(bare)
