"""Blocks, kernels, checks and clusters for tests on GPUs."""

from contextlib import contextmanager

import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p
from dask_p2p.cli.cluster import count_wrong
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import P2PWarning
from dask_p2p.plugins.dask_internals import warn_client
from tests.backends.support import cupy
from tests.faults.support import BOUND_S
from tests.support import persisted, used
from tests.transports.loopback import wait_until

POOL = {"rmm_pool_size": 8 * 2**30}


@contextmanager
def gpu_client(**options):
    with (
        dask_p2p.local_cluster(2, gpus=True, **{**POOL, **options}) as cluster,
        Client(cluster) as client,
    ):
        yield client


def on_gpu(x, chunks):
    return da.from_array(x, chunks=chunks).map_blocks(cupy.asarray)


def on_host(y):
    """The values of CuPy blocks: only those have get()."""
    return y.map_blocks(lambda block: block.get(), meta=np.empty((0,) * y.ndim)).compute()


def assert_right(client, y, shape):
    """Check each element of the transpose of an `indexed_array` of CuPy blocks."""
    wrong_count = client.compute(count_wrong(y, shape, (1, 0), kind="cupy"))
    assert int(wrong_count.result(timeout=BOUND_S)) == 0


def check_transpose(client, x, transport=None):
    """Transpose an `indexed_array` of CuPy blocks; check each element, and the transport."""
    y = persisted(client, dask_p2p.transpose(x))
    assert int(count_wrong(y, x.shape, (1, 0), kind="cupy").compute()) == 0
    if transport is not None:
        assert used(client, y) == {transport}


def free_all_blocks():
    cupy.get_default_memory_pool().free_all_blocks()


def ipc_counts(client):
    """Blocks kept by descriptor directories, and mappings that are open, on each worker."""

    def count(dask_worker):
        ipc = dask_worker.plugins[PLUGIN_NAME].context.router.transports["ipc"]
        return len(ipc.directory), len(ipc.mappings)

    return client.run(count)


HOLD = r"""
extern "C" __global__ void hold(const volatile int* go_on, volatile int* found, long long ns) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (!*go_on && now - start < ns);
    *found = *go_on;
}
"""


def has_one_gpu_each():
    """Return whether two workers have a GPU each: not with `--share-gpu`."""
    return cupy.cuda.runtime.getDeviceCount() > 1


class HeldKernel:
    """A kernel that runs until this process ends it, or until a time limit."""

    def __init__(self, stream):
        import cupyx

        self._go_on, self._found = (cupyx.zeros_pinned((1,), "i4") for _ in range(2))
        pointers = [np.uintp(flag.ctypes.data) for flag in (self._go_on, self._found)]
        kernel = cupy.RawKernel(HOLD, "hold")
        kernel((1,), (1,), (*pointers, np.int64(BOUND_S * 10**9)), stream=stream)

    def release(self):
        self._go_on[0] = 1

    @property
    def was_let_go(self):
        """True if this process ended the kernel, and not the time limit."""
        return bool(self._found[0])


def warnings_of(client, caught):
    """Return the texts of this package's warnings that workers have sent so far."""

    def send_last(dask_worker):
        warn_client(dask_worker, f"the last of {dask_worker.address}")

    def texts():
        return [str(item.message) for item in caught if issubclass(item.category, P2PWarning)]

    last = {f"the last of {worker}" for worker in client.run(send_last)}
    wait_until(lambda: last <= {*texts()}, BOUND_S)
    return [text for text in texts() if text not in last]


def shared_cluster(n_workers=2, *, gpus=True, **kwargs):
    from dask_cuda import LocalCUDACluster

    class SharedCluster(LocalCUDACluster):
        def new_worker_spec(self):
            specs, self.worker_spec = self.worker_spec, {}
            try:
                [spec] = super().new_worker_spec().values()
            finally:
                self.worker_spec = specs
            return {next(n for n in range(len(specs) + 1) if n not in specs): spec}

    options = {
        "CUDA_VISIBLE_DEVICES": [0],
        "n_workers": n_workers,
        "threads_per_worker": 1,
        "protocol": "tcp",
        "dashboard_address": ":0",
    }
    if not kwargs.get("rmm_async") and not kwargs.get("rmm_managed_memory"):
        options |= POOL | {"rmm_allocator_external_lib_list": ["cupy"]}
    return SharedCluster(**options | kwargs)
