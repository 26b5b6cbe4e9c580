"""Clusters where another version of the package runs at one side, or none at all."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner
from distributed import Client

import dask_p2p
from dask_p2p.cli import p2p
from dask_p2p.errors import P2PWarning, RegistrationError
from dask_p2p.plugins.registration import workers_of
from dask_p2p.versions import own_version
from tests.support import indexed, output_of, own_client, result_of, worker_process

pytestmark = pytest.mark.programs

ROOT = os.path.dirname(os.path.dirname(dask_p2p.__file__))
OTHER = "9.9"

CLIENT = """
import sys, dask.array as da, numpy as np, dask_p2p
from distributed import Client
assert dask_p2p.__file__.startswith(sys.argv[2]), dask_p2p.__file__
x = np.arange(1, 481).reshape(40, 12)  # no array of the tests has these keys
with Client(sys.argv[1]) as client:
    try:
        print(dask_p2p.transpose(da.from_array(x, chunks=(10, 12))).compute().shape)
    except Exception as exc:
        print(f"{type(exc).__name__}: {exc}")
"""

LACKING = """
import sys
sys.modules["dask_p2p"] = None  # which nothing can import
from distributed import LocalCluster
with LocalCluster(
    n_workers=2, processes=False, protocol="tcp://", dashboard_address=":0"
) as cluster:
    print(cluster.scheduler_address, flush=True)
    sys.stdin.read()
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
def other_version(tmp_path_factory):
    """A folder with a package that differs from this one in its version."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(Path(ROOT, "dask_p2p"), folder / "dask_p2p")
    metadata = folder / f"dask_p2p-{OTHER}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: dask-p2p\nVersion: {OTHER}\n", "utf-8")
    return str(folder)


def path_with(folder):
    """A value of PYTHONPATH for processes that have the package in a folder, and the tests."""
    return os.pathsep.join([folder, ROOT])


@contextmanager
def cluster_of(program, path):
    """The address of a cluster in a process of its own, with the package that lies there."""
    process = subprocess.Popen(
        [sys.executable, program, path],
        env={**os.environ, "PYTHONPATH": path_with(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate("", timeout=200)


@pytest.fixture
def before():
    """A graph that is older than any client, and so registers nothing."""
    return x_and_lazy()[1]


@pytest.fixture
def bare():
    """A client of a cluster of this version, without its plugins."""
    with own_client() as client:
        yield client


@pytest.fixture
def programs(tmp_path):
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "cluster.py").write_text(CLUSTER)
    return tmp_path


def x_and_lazy():
    x = indexed((40, 12))
    return x, dask_p2p.transpose(da.from_array(x, chunks=(10, 12)))


@pytest.fixture
def lacking(tmp_path):
    """A client of a cluster whose processes cannot import the package."""
    program = tmp_path / "lacking.py"
    program.write_text(LACKING)
    with cluster_of(program, ROOT) as address, Client(address) as client:
        yield client


def test_a_cluster_without_the_package(lacking):
    for function in (dask_p2p.register, dask_p2p.check):
        with pytest.raises(RegistrationError, match=r"expected dask_p2p .* on the scheduler, got"):
            function(lacking)
    assert dask_p2p.last_runs(lacking) == ()
    result = CliRunner().invoke(p2p, ["check", "--scheduler", lacking.scheduler.address])
    assert result.exit_code == 1
    assert result.output.startswith("Error: expected dask_p2p ")


def test_installed_for_a_cluster_without_the_package(lacking):
    """Dask goes on as it did, and tells why once."""
    x = da.from_array(indexed((40, 12)), chunks=(10, 12))
    words = "Dask's own function is used: expected dask_p2p"
    with dask_p2p.install() as used:
        with pytest.warns(P2PWarning, match=words) as caught:
            y = x.rechunk((-1, 3), method="p2p")
        assert len(caught) == 1
        z = x.map_overlap(np.negative, 1).rechunk((-1, 4), method="p2p")
        np.testing.assert_array_equal(result_of(lacking, lacking.compute(y)), indexed((40, 12)))
        np.testing.assert_array_equal(result_of(lacking, lacking.compute(z)), -indexed((40, 12)))
    assert used.count == 0


def test_a_client_of_another_version_harms_nobody(bare, other_version, programs):
    precious = bare.scatter({"a": 1, "b": 2}, broadcast=True)
    workers = set(workers_of(bare))
    for _ in range(2):  # the second time with the plugins, which the end of this registers
        arguments = programs / "client.py", bare.scheduler.address, other_version
        output = output_of(*arguments, PYTHONPATH=path_with(other_version))
        assert output.startswith("RegistrationError: expected values of dask_p2p ")
        assert all(f"dask_p2p {version}" in output for version in (own_version(), OTHER))
        assert set(workers_of(bare)) == workers
        assert bare.gather(precious) == {"a": 1, "b": 2}
        x, y = x_and_lazy()
        np.testing.assert_array_equal(result_of(bare, bare.compute(y)), x.T)


def test_a_scheduler_that_lacks_what_the_plugin_is_read_by_is_named(other_version, programs):
    def hide():
        sys.modules["dask_p2p.versions"] = None

    with cluster_of(programs / "cluster.py", other_version) as address, Client(address) as client:
        client.run_on_scheduler(hide)
        versions = f"dask_p2p {own_version()} .*on the scheduler, got dask_p2p {OTHER}"
        with pytest.raises(RegistrationError, match=f"expected {versions}"):
            x_and_lazy()


def test_a_worker_of_another_version_is_named_and_not_lost(before, bare, other_version):
    workers = set(workers_of(bare))
    path = path_with(other_version)
    with worker_process(bare.scheduler.address, cwd=other_version, PYTHONPATH=path):
        bare.wait_for_workers(3, timeout=200)
        (stranger,) = set(workers_of(bare)) - workers
        precious = bare.scatter({"a": 1}, workers=[stranger])
        with pytest.raises(
            RegistrationError, match=f"got worker {stranger}: dask_p2p {OTHER}"
        ) as refused:
            x_and_lazy()
        assert str(refused.value).count(OTHER) == 1, "not the other way round, too"
        y = bare.compute(before, workers=[stranger])
        with pytest.raises(RegistrationError, match="dask_p2p"):
            result_of(bare, y)
        assert bare.gather(precious) == {"a": 1}
        assert stranger in workers_of(bare)
