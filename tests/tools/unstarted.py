"""Clusters that start nothing, with the parameters of the true classes."""

from __future__ import annotations

import distributed


class Unstarted(distributed.LocalCluster):
    def __init__(self, **kwargs):
        self.given = kwargs

    asynchronous = True  # as a cluster that is started later

    def __getitem__(self, name):
        return self.given[name]

    def __contains__(self, name):
        return name in self.given


class UnstartedCUDACluster(Unstarted):
    """`dask_cuda.LocalCUDACluster` of dask-cuda 26.10."""

    def __init__(
        self,
        CUDA_VISIBLE_DEVICES=None,  # noqa: N803
        n_workers=None,
        threads_per_worker=1,
        memory_limit="auto",
        device_memory_limit="default",
        enable_cudf_spill=False,
        cudf_spill_stats=0,
        local_directory=None,
        protocol=None,
        enable_tcp_over_ucx=None,
        enable_infiniband=None,
        enable_nvlink=None,
        enable_rdmacm=None,
        rmm_pool_size=None,
        rmm_maximum_pool_size=None,
        rmm_managed_memory=False,
        rmm_async=False,
        rmm_allocator_external_lib_list=None,
        rmm_release_threshold=None,
        rmm_log_directory=None,
        rmm_track_allocations=False,
        log_spilling=False,
        pre_import=None,
        **kwargs,
    ):
        names = {
            "CUDA_VISIBLE_DEVICES": CUDA_VISIBLE_DEVICES,
            "n_workers": n_workers,
            "threads_per_worker": threads_per_worker,
            "protocol": protocol,
            "rmm_pool_size": rmm_pool_size,
            "rmm_allocator_external_lib_list": rmm_allocator_external_lib_list,
            "pre_import": pre_import,
        }
        super().__init__(
            **{name: value for name, value in names.items() if value is not None}, **kwargs
        )
