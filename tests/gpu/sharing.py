"""Clusters whose workers share one GPU: tests of two GPUs run with `--share-gpu` where one is.

Whatever crosses processes is the same. What only two GPUs show is not there: links between them,
and memory that one of them has left while the other has not.
"""

from __future__ import annotations

from tests.gpu.support import POOL


def shared_cluster(n_workers=2, *, gpus=True, **kwargs):
    """Stand for `dask_p2p.local_cluster`."""
    from dask_cuda import LocalCUDACluster

    class SharedCluster(LocalCUDACluster):
        def new_worker_spec(self):
            """Return what it is for the first worker, by the name of the next one."""
            there, self.worker_spec = self.worker_spec, {}
            try:
                [spec] = super().new_worker_spec().values()
            finally:
                self.worker_spec = there
            return {next(n for n in range(len(there) + 1) if n not in there): spec}

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
