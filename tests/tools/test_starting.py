from __future__ import annotations

import os
import subprocess
import sys
import types
from functools import partial

import pytest
from distributed import Client, Nanny, Worker
from distributed.deploy.spec import SpecCluster

import dask_p2p
from dask_p2p.errors import InputError, StartError
from dask_p2p.tools import cluster, starting
from tests.support import BOUND_S, import_path
from tests.tools.unstarted import UnstartedCUDACluster

SCRIPT = """
import dask_p2p
from distributed import Client

print("imported as", __name__)
cluster = dask_p2p.local_cluster(2, gpus=False)
client = Client(cluster)
print(client.submit(sum, [1, 2]).result())
"""
ASYNCHRONOUS = """
import asyncio
import dask_p2p

async def main():
    await dask_p2p.local_cluster(1, gpus=False, asynchronous=True)

asyncio.run(main())
"""
GUARDED = SCRIPT.replace("cluster =", 'if __name__ == "__main__":\n  cluster =').replace(
    "\nclient =", "\n  client ="
)
GUARDED = GUARDED.replace("\nprint(client", "\n  print(client")


class OwnNanny(Nanny):
    def __init__(self, *args, colour=None, **kwargs):
        super().__init__(*args, **kwargs)


class OwnWorker(Worker):
    def __init__(self, *args, flavour=None, **kwargs):
        super().__init__(*args, **kwargs)


@pytest.fixture
def two_gpus(monkeypatch):
    module = types.ModuleType("dask_cuda")
    module.LocalCUDACluster = UnstartedCUDACluster
    monkeypatch.setitem(sys.modules, "dask_cuda", module)
    monkeypatch.setattr(cluster, "usable_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(cluster, "free_gpu_bytes", lambda names: [2**30 for _ in names])


def test_each_class_gets_its_keywords():
    options = {
        "name": "mine",  # of LocalCluster
        "env": {"OF_THE_NANNY": "1"},
        "resources": {"of_the_worker": 3},
        "connection_limit": 17,  # of Server
    }
    with dask_p2p.local_cluster(1, gpus=False, **options) as made, Client(made) as client:
        assert made.name == "mine"
        ((found, limit, total),) = client.run(
            lambda dask_worker: (
                os.environ.get("OF_THE_NANNY"),
                dask_worker.rpc.limit,
                dask_worker.state.total_resources,
            )
        ).values()
        assert (found, limit, total) == ("1", 17, {"of_the_worker": 3})


@pytest.mark.parametrize(
    "given",
    [
        {"scheduler_kwargs": {}, "worker_dashboard_address": ":0", "security": None},
        {"preload_nanny": [], "worker_port": 0, "config": {}, "quiet": True},
        {"lifetime": "1 h", "plugins": (), "data": dict, "local_directory": "/tmp", "validate": 1},
        {"timeout": 3, "serializers": None, "needs_workdir": True},
        {"processes": False, "executor": None},
        {"worker_class": OwnNanny, "colour": 1, "lifetime": 2},
        {"worker_class": OwnWorker, "flavour": 1},
        {"worker_class": partial(Nanny, worker_class=OwnWorker), "flavour": 1, "env": {}},
        {"worker_class": "distributed.Nanny", "lifetime": 2},
        {"worker_class": lambda *args, **kwargs: OwnNanny(*args, **kwargs), "any": 1},
    ],
)
def test_keywords_that_some_class_takes(given):
    from distributed import LocalCluster

    starting._check_keywords(LocalCluster, given, {*given})


@pytest.mark.usefixtures("two_gpus")
def test_keywords_of_gpu_workers():
    given = {"rmm_log_directory": "/tmp", "lifetime": "1 h", "env": {}, "silence_logs": False}
    made = dask_p2p.local_cluster(**given, pre_import="cupy")
    assert made["lifetime"] == "1 h"
    assert dask_p2p.local_cluster(worker_class=OwnWorker, flavour=1, env={})["flavour"] == 1
    classes = "UnstartedCUDACluster, Nanny, Worker"
    with pytest.raises(InputError, match=f"{classes}, got rmm_pool; .* is rmm_pool_size. Correct"):
        dask_p2p.local_cluster(rmm_pool=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 2}, "keyword of LocalCluster, Nanny, Worker, got workers.* is n_workers"),
        ({"gpu": True}, "got gpu; the nearest is gpus. Correct"),
        ({"nthreads": 2}, "got nthreads; the nearest is threads_per_worker"),
        ({"memory_limits": 2}, "the nearest is memory_limit"),
        ({"rmm_pool_size": 2}, "got rmm_pool_size; the nearest is gpus. Add gpus=True"),
        ({"env": {}, "processes": False}, "keyword of LocalCluster, Worker, got env"),
        ({"worker_class": OwnNanny, "color": 1}, "LocalCluster, OwnNanny, Worker, got color.*colo"),
        ({"worker_class": OwnWorker, "env": {}}, "keyword of LocalCluster, OwnWorker, got env"),
    ],
)
def test_unknown_keywords(monkeypatch, given, message):
    def start(self, **kwargs):
        raise AssertionError("a cluster starts")

    monkeypatch.setattr(SpecCluster, "__init__", start)
    with pytest.raises(InputError, match=message):
        dask_p2p.local_cluster(**{"gpus": False, **given})


def ran(command, **options):
    env = {**os.environ, "PYTHONPATH": import_path()}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=BOUND_S, **options
    )


@pytest.mark.programs
def test_a_script_without_a_main_guard(tmp_path):
    script = tmp_path / "first.py"
    script.write_text(SCRIPT)
    done = ran([sys.executable, str(script)])
    assert done.returncode == 1
    assert done.stdout.count("imported as __mp_main__") == 2
    *frames, error = done.stderr.strip().splitlines()
    assert error.startswith("dask_p2p.errors.StartError: expected workers that start, but ")
    assert f"imported {script}, the main program." in error
    assert 'below `if __name__ == "__main__":`.' in error
    assert done.stderr.count("Traceback") == 1
    assert len(frames) < 15


@pytest.mark.programs
def test_an_asynchronous_script_without_a_main_guard(tmp_path):
    script = tmp_path / "first.py"
    script.write_text(ASYNCHRONOUS)
    done = ran([sys.executable, str(script)])
    assert done.returncode == 1
    assert f"other processes can import, but {script} starts a cluster then. Start it below" in (
        done.stderr
    )


@pytest.mark.programs
def test_a_script_with_a_main_guard(tmp_path):
    script = tmp_path / "second.py"
    script.write_text(GUARDED)
    done = ran([sys.executable, str(script)])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "3"


@pytest.mark.programs
def test_a_script_from_a_pipe():
    done = ran([sys.executable], input=GUARDED)
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    assert error.endswith("Save the program in a file, and run that.")


@pytest.mark.programs
def test_other_processes_that_import_the_program(tmp_path):
    script = tmp_path / "third.py"
    script.write_text(
        "import multiprocessing\n"
        "import dask_p2p\n"
        'if __name__ == "__main__":\n'
        '    process = multiprocessing.get_context("spawn").Process(target=print)\n'
        "    process.start()\n"
        "    process.join()\n"
        "else:\n"
        "    dask_p2p.local_cluster(2, gpus=False)\n"
    )
    done = ran([sys.executable, str(script)])
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("dask_p2p.errors.StartError: expected a program that other processes")
    assert f"but {script} starts a cluster" in error


@pytest.mark.parametrize("problem", ["Cluster failed to start: port 1 is in use", "no GPU"])
def test_other_errors_of_the_start_remain(problem):
    class Failing(UnstartedCUDACluster):
        def __init__(self, **kwargs):
            raise RuntimeError(problem)

    with pytest.raises(RuntimeError, match=problem) as caught:
        starting.started(Failing, {"n_workers": 1}, {})
    assert not isinstance(caught.value, StartError)
