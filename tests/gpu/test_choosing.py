"""The transports of blocks between GPUs, and the report of `check` about them."""

import os
import sys
import warnings

import numpy as np
import pytest
from distributed import Client

import dask_p2p
from dask_p2p.backends import device
from dask_p2p.backends import device as driver
from dask_p2p.cli.cluster import indexed_array
from dask_p2p.plugins.registration import workers_of
from tests.backends.support import cupy
from tests.gpu.support import POOL, check_transpose, gpu_client, on_gpu, on_host, warnings_of
from tests.support import persisted, used

pytestmark = pytest.mark.gpu(2)


def test_check_finds_nothing_in_the_way(client):
    dask_p2p.register(client)
    report = dask_p2p.check(client)
    assert [link.transport for link in report.links] == ["ipc", "ipc"]
    # The links reach hundreds of GB/s. A busy host makes these figures much smaller.
    assert all(link.gbs > 2 and link.latency_s < 5 for link in report.links)
    assert report.problems == []
    for worker in report.workers:
        assert (worker["kind"], worker["cupy_uses_rmm"]) == ("cupy", True)
        assert worker["pool_bytes"] % 2**21 == 0
        assert worker["link_gbs"] is None or worker["link_gbs"] > 10
        assert min(worker["host_link"]) > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rmm_pool_size": 2**30 + 256}, "not a multiple of 2 MiB"),
        (
            {"rmm_pool_size": 2**30, "rmm_allocator_external_lib_list": None},
            "not allocate from RMM's pool",
        ),
        ({"rmm_async": True, "rmm_allocator_external_lib_list": ["cupy"]}, "cannot share memory"),
        ({"rmm_managed_memory": True}, "cannot share memory"),
    ],
    ids=["odd pool", "two pools", "async", "managed"],
)
def test_check_names_what_is_in_the_way(settings, words):
    with dask_p2p.local_cluster(2, gpus=True, **settings) as cluster, Client(cluster) as client:
        report = dask_p2p.check(client)
    problems = [problem for problem in report.problems if words in problem.fault]
    assert len(problems) == 1, str(report)
    assert len(problems[0].workers) == 2
    assert "rmm_pool_size" in problems[0].cure
    assert all(link.error is None for link in report.links)


@pytest.mark.parametrize("setting", ["rmm_async", "rmm_managed_memory"])
def test_an_allocator_that_ipc_cannot_share_falls_back_with_one_warning(setting):
    x = np.arange(400 * 300.0).reshape(400, 300)
    options = {setting: True, "rmm_allocator_external_lib_list": ["cupy"]}
    with (
        dask_p2p.local_cluster(2, gpus=True, **options) as cluster,
        Client(cluster) as client,
        warnings.catch_warnings(record=True, action="default") as caught,
    ):
        a = persisted(client, on_gpu(x, (100, 300)))
        for _ in range(2):
            y = persisted(client, dask_p2p.transpose(a))
            np.testing.assert_array_equal(y.compute().get(), x.T)
            assert used(client, y) <= {"ucx", "comm"}
            del y
        p2p_warnings = warnings_of(client, caught)
    assert len(p2p_warnings) == 1
    assert "cannot be shared by CUDA IPC" in p2p_warnings[0]
    assert "rmm_pool_size" in p2p_warnings[0]


def refuse_handles(dask_worker):
    """As in virtual machines and containers that share a GPU."""

    def refuse(address):
        raise cupy.cuda.runtime.CUDARuntimeError(801)  # cudaErrorNotSupported

    cupy.cuda.runtime.ipcGetMemHandle = refuse


def lose_bindings(dask_worker):
    sys.modules["cuda.bindings"] = None


@pytest.mark.parametrize("trouble", [refuse_handles, lose_bindings])
def test_where_memory_cannot_be_shared_another_way_is_taken(trouble):
    x = np.arange(400 * 300.0).reshape(400, 300)
    with gpu_client() as client, warnings.catch_warnings(record=True, action="default") as caught:
        client.run(trouble)
        a = persisted(client, on_gpu(x, (100, 300)))
        y = persisted(client, dask_p2p.transpose(a))
        # As NumPy blocks: without the bindings Dask itself cannot send CuPy's.
        np.testing.assert_array_equal(on_host(y), x.T)
        assert used(client, y) <= {"ucx", "comm"}
        p2p_warnings = warnings_of(client, caught)
    # Without the bindings the GPU is unknown: an obstacle, as for a worker without a GPU.
    assert len(p2p_warnings) == (trouble is refuse_handles)
    assert all("CUDA IPC does not share memory here" in text for text in p2p_warnings)


def uuid(dask_worker):
    return driver.uuid(device.current_device()).hex()


def devices(dask_worker):
    blocks = [block for block in dask_worker.data.values() if isinstance(block, cupy.ndarray)]
    return {block.device.id for block in blocks}


@pytest.mark.usefixtures("two_gpus")
def test_permuted_devices(monkeypatch):
    """To each worker its own GPU is number 0, whatever the order of the others is."""
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(reversed(visible[:2])))
    shape = (1030, 770)
    with dask_p2p.local_cluster(gpus=True, **POOL) as cluster, Client(cluster) as client:
        workers = workers_of(client)
        pynvml.nvmlInit()
        for worker, uuids in client.run(uuid).items():
            number = int(workers[worker]["name"])  # dask-cuda names workers after their GPUs
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            assert uuids == pynvml.nvmlDeviceGetUUID(handle).removeprefix("GPU-").replace("-", "")
        x = persisted(client, indexed_array(shape, (300, 770), "f4", kind="cupy"))
        check_transpose(client, x, "ipc")
        # A block is on the GPU that it names, also if it was made from a block of another GPU.
        assert client.run(devices) == {worker: {0} for worker in workers}
