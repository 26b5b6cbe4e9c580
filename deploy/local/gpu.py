"""A cluster of this machine's GPUs, one worker each, and one transpose. Run it: python gpu.py."""

from __future__ import annotations

import dask
import dask.array as da
from dask_cuda import LocalCUDACluster
from distributed import Client

import dask_p2p

if __name__ == "__main__":
    with (
        LocalCUDACluster(
            # Dask's own messages; it is quicker to schedule than UCX. Blocks go over NVLink anyway.
            protocol="tcp",
            # A multiple of 2 MiB, or others map the pool in seconds instead of milliseconds.
            rmm_pool_size="60GiB",
            # Else CuPy's own pool competes with RMM's for the memory.
            rmm_allocator_external_lib_list=["cupy"],
        ) as cluster,
        Client(cluster) as client,
        dask.config.set({"array.backend": "cupy"}),
    ):
        n = 2_048 * len(cluster.workers)
        print(f"{len(cluster.workers)} workers, dashboard {client.dashboard_link}")
        x = da.random.random((n, n), chunks=(2_048, -1)).persist()
        y = dask_p2p.transpose(x).persist()
        print("every element is right:", bool((y == x.T).all().compute()))
        print(dask_p2p.last_runs(client))
