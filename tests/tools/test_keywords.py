from __future__ import annotations

import os
import sys
import types
from functools import partial

import pytest
from distributed import Client, LocalCluster, Nanny, Worker
from distributed.deploy.spec import SpecCluster

import dask_p2p
from dask_p2p.errors import InputError
from dask_p2p.tools import cluster
from dask_p2p.tools.cluster import _check_keywords, _classes
from tests.tools.unstarted import UnstartedCUDACluster


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
    with dask_p2p.local_cluster(1, gpus=False, **options) as cluster, Client(cluster) as client:
        assert cluster.name == "mine"
        ((variable, limit, total),) = client.run(
            lambda dask_worker: (
                os.environ.get("OF_THE_NANNY"),
                dask_worker.rpc.limit,
                dask_worker.state.total_resources,
            )
        ).values()
        assert (variable, limit, total) == ("1", 17, {"of_the_worker": 3})


@pytest.mark.parametrize(
    "keywords",
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
def test_keywords_that_some_class_takes(keywords):
    _check_keywords(_classes(LocalCluster, keywords), {*keywords})


@pytest.mark.usefixtures("two_gpus")
def test_keywords_of_gpu_workers():
    keywords = {"rmm_log_directory": "/tmp", "lifetime": "1 h", "env": {}, "silence_logs": False}
    cluster = dask_p2p.local_cluster(**keywords, pre_import="cupy")
    assert cluster["lifetime"] == "1 h"
    assert dask_p2p.local_cluster(worker_class=OwnWorker, flavour=1, env={})["flavour"] == 1
    classes = "UnstartedCUDACluster, Nanny, Worker"
    with pytest.raises(InputError, match=f"{classes}, got rmm_pool; .* is rmm_pool_size. Correct"):
        dask_p2p.local_cluster(rmm_pool=1)


@pytest.mark.parametrize(
    ("keywords", "message"),
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
def test_unknown_keywords(monkeypatch, keywords, message):
    def start(self, **kwargs):
        raise AssertionError("a cluster starts")

    monkeypatch.setattr(SpecCluster, "__init__", start)
    with pytest.raises(InputError, match=message):
        dask_p2p.local_cluster(**{"gpus": False, **keywords})
