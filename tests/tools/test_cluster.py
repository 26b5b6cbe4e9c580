import importlib.util
import os
import sys
import types
from functools import partial
from unittest.mock import Mock

import dask.array as da
import distributed
import pytest
from distributed import Client, Nanny, Worker
from distributed.core import Status
from distributed.deploy.spec import SpecCluster

import dask_p2p
from dask_p2p.errors import InputError, RegistrationError
from dask_p2p.plugins.registration import workers_of
from dask_p2p.tools import cluster
from dask_p2p.tools.cluster import POOL_GRANULE_BYTES, usable_gpus
from tests.support import has_plugin, output_of


class Unstarted(distributed.LocalCluster):
    """A cluster that starts nothing, and shows the keywords that it was given."""

    def __init__(self, **kwargs):
        self.keywords = kwargs

    asynchronous = True  # as a cluster that is started later

    def __getitem__(self, name):
        return self.keywords[name]

    def __contains__(self, name):
        return name in self.keywords


class UnstartedCUDACluster(Unstarted):
    """The same, with keywords of `dask_cuda.LocalCUDACluster` of dask-cuda 26.10."""

    def __init__(
        self,
        CUDA_VISIBLE_DEVICES=None,  # noqa: N803
        n_workers=None,
        threads_per_worker=1,
        protocol=None,
        rmm_pool_size=None,
        rmm_managed_memory=False,
        rmm_async=False,
        rmm_allocator_external_lib_list=None,
        rmm_log_directory=None,
        pre_import=None,
        **kwargs,
    ):
        keywords = {**locals(), **kwargs}
        left_out = {"self", "kwargs", "__class__"}
        super().__init__(
            **{k: v for k, v in keywords.items() if k not in left_out and v is not None}
        )


#: Stands for pynvml: two GPUs with 10 and 20 GB free.
NVML = types.SimpleNamespace(
    nvmlInit=lambda: None,
    nvmlDeviceGetCount=lambda: 2,
    nvmlDeviceGetHandleByIndex=lambda index: (10_000_000_001, 20_000_000_001)[index],
    nvmlDeviceGetHandleByUUID={"GPU-a": 10_000_000_001, "GPU-b": 20_000_000_001}.__getitem__,
    nvmlDeviceGetMemoryInfo=lambda free_bytes: types.SimpleNamespace(free=free_bytes),
)


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs, CuPy and dask-cuda seem to be there."""
    module = types.ModuleType("dask_cuda")
    module.LocalCUDACluster = UnstartedCUDACluster
    monkeypatch.setitem(sys.modules, "pynvml", NVML)
    monkeypatch.setitem(sys.modules, "dask_cuda", module)
    monkeypatch.setitem(sys.modules, "distributed_ucxx", types.ModuleType("distributed_ucxx"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(cluster, "usable_gpus", list)


@pytest.mark.usefixtures("no_gpus")
def test_cpu_cluster():
    with dask_p2p.local_cluster(2) as running, Client(running) as client:
        workers = workers_of(client)
        assert running.scheduler_address.startswith("tcp://")
        assert len(workers) == 2
        for address, worker in workers.items():
            assert address.startswith("tcp://")
            assert worker["nthreads"] == 1
        assert len({*client.run(os.getpid).values()}) == 2
        assert len(cluster.device_names(client, "numpy")) == 2
        assert [*client.run(has_plugin).values()] == [True, True]
        running.scale(3)
        client.wait_for_workers(3)
        assert [*client.run(has_plugin).values()] == [True, True, True], "from its start"


PATIENCE = """
import dask, distributed
import dask_p2p

option = "distributed.deploy.lost-worker-timeout"
found = [dask.config.get(option)]
for _ in range(2):
    with dask_p2p.local_cluster(1, gpus=False, processes=False):
        found.append(dask.config.get(option))
print(*found, sep=", ")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "lost_worker_timeout"),
    [
        ({}, "15s, 5 minutes, 5 minutes"),
        ({"DASK_DISTRIBUTED__DEPLOY__LOST_WORKER_TIMEOUT": "20 s"}, "20 s, 20 s, 20 s"),
    ],
)
def test_nannies_have_time_to_restart_workers(variables, lost_worker_timeout):
    """After Dask's timeout a cluster would stop the nanny, and stay without the worker."""
    assert output_of("-c", PATIENCE, **variables).strip() == lost_worker_timeout


@pytest.mark.usefixtures("no_gpus")
def test_a_cluster_that_cannot_be_registered_is_closed(monkeypatch):
    refuse = Mock(side_effect=RegistrationError("another version"))
    monkeypatch.setattr(cluster, "register_cluster", refuse)
    with pytest.raises(RegistrationError, match="another version"):
        dask_p2p.local_cluster(1)
    assert refuse.call_args.args[0].status == Status.closed


@pytest.mark.usefixtures("no_gpus")
async def test_an_asynchronous_cluster():
    async with (
        dask_p2p.local_cluster(1, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        x = dask_p2p.transpose(da.ones((4, 4), chunks=(2, 4)))
        assert await client.compute(x.sum()) == 16


def test_overrides_win(monkeypatch, two_gpus):
    monkeypatch.setattr(distributed, "LocalCluster", Unstarted)
    assert dask_p2p.local_cluster(gpus=False)["n_workers"] == 4
    keywords = dask_p2p.local_cluster(3, gpus=False, threads_per_worker=5, protocol="tls://")
    assert (keywords["n_workers"], keywords["threads_per_worker"]) == (3, 5)
    assert keywords["protocol"] == "tls://"
    keywords = dask_p2p.local_cluster(rmm_pool_size="1 GiB", protocol="ucx")
    assert (keywords["rmm_pool_size"], keywords["protocol"]) == ("1 GiB", "ucx")
    assert "rmm_pool_size" not in dask_p2p.local_cluster(rmm_async=True)


@pytest.mark.usefixtures("no_gpus")
def test_no_gpus():
    with pytest.raises(InputError, match=r"expected 1 usable GPU.*found 0.*gpus=False"):
        dask_p2p.local_cluster(gpus=True)
    with pytest.raises(InputError, match="expected 3 usable"):
        dask_p2p.local_cluster(3, gpus=True)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("n_workers", [-1, 0, "four", 2.5, True])
def test_numbers_of_workers_that_are_none(n_workers):
    for gpus in (None, True, False):
        with pytest.raises(
            InputError, match=f"number of workers, at least 1, got .*={n_workers!r}"
        ):
            dask_p2p.local_cluster(n_workers, gpus=gpus)


@pytest.mark.usefixtures("two_gpus")
def test_gpu_cluster():
    keywords = dask_p2p.local_cluster()
    assert keywords["CUDA_VISIBLE_DEVICES"] == ["0", "1"]
    chosen = {"n_workers": 2, "threads_per_worker": 1, "protocol": "tcp"}
    assert keywords.keywords.items() >= chosen.items()
    assert keywords["rmm_allocator_external_lib_list"] == ["cupy"]
    assert [importlib.import_module(name) for name in keywords["pre_import"].split(",")]
    assert keywords["rmm_pool_size"] % POOL_GRANULE_BYTES == 0
    assert 7_990_000_000 < keywords["rmm_pool_size"] <= 8_000_000_000
    assert dask_p2p.local_cluster(1, gpus=True)["CUDA_VISIBLE_DEVICES"] == ["0"]
    with pytest.raises(InputError, match=r"expected 3 usable GPU.*found 2\. Check nvidia-smi"):
        dask_p2p.local_cluster(3)


@pytest.mark.usefixtures("two_gpus")
def test_the_pool_is_for_the_gpus_that_are_used(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    keywords = dask_p2p.local_cluster(gpus=True)
    assert keywords["CUDA_VISIBLE_DEVICES"] == ["GPU-b"]
    assert 15_990_000_000 < keywords["rmm_pool_size"] <= 16_000_000_000


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        (None, ["0", "1"]),
        ("", []),
        ("-1", []),
        ("1", ["1"]),
        ("0,7,1", ["0"]),
        ("0,-1,1", ["0"]),
        ("GPU-a,MIG-b", ["GPU-a", "MIG-b"]),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_visible_devices(monkeypatch, setting, names):
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert usable_gpus() == names


@pytest.mark.usefixtures("two_gpus")
def test_without_a_driver_there_are_no_gpus(monkeypatch):
    monkeypatch.setattr(NVML, "nvmlInit", lambda: 1 / 0)
    assert usable_gpus() == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert usable_gpus() == []


@pytest.mark.gpu(2)
def test_gpu_names():
    # A pool of its own size: the default is most of what other tests leave.
    with dask_p2p.local_cluster(2, rmm_pool_size=2**30) as running, Client(running) as client:
        names = cluster.device_names(client, "cupy")
        assert len(names) == 2
        assert all(names)


# --- keywords


class OwnNanny(Nanny):
    def __init__(self, *args, colour=None, **kwargs):
        super().__init__(*args, **kwargs)


class OwnWorker(Worker):
    def __init__(self, *args, flavour=None, **kwargs):
        super().__init__(*args, **kwargs)


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


@pytest.fixture
def not_started(monkeypatch):
    def start(self, **kwargs):
        self.status = Status.closed
        raise AssertionError("a cluster starts")

    monkeypatch.setattr(SpecCluster, "__init__", start)


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
@pytest.mark.usefixtures("not_started")
def test_keywords_that_some_class_takes(keywords):
    with pytest.raises(AssertionError, match="a cluster starts"):
        dask_p2p.local_cluster(gpus=False, **keywords)


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
@pytest.mark.usefixtures("not_started")
def test_unknown_keywords(keywords, message):
    with pytest.raises(InputError, match=message):
        dask_p2p.local_cluster(**{"gpus": False, **keywords})
