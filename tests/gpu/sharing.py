"""Clusters whose workers share one GPU: tests of two GPUs on one, by `--share-gpu`.

All transfers between processes are the same. Two GPUs also have links between them, and one may
have free memory while the other has none: these are not tested.
"""

from tests.gpu.support import POOL


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
