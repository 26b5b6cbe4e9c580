"""One transpose on a cluster of this machine's GPUs, one worker each. Run it: python gpu.py."""

from __future__ import annotations

import dask
import dask.array as da
from dask_cuda import LocalCUDACluster
from distributed import Client

import dask_p2p

if __name__ == "__main__":
    with (
        LocalCUDACluster(
            # For Dask's own messages: faster than UCX for scheduling. Blocks use NVLink regardless.
            protocol="tcp",
            # A multiple of 2 MiB: workers map other pools in seconds instead of milliseconds.
            rmm_pool_size="60GiB",
            # Otherwise CuPy's own pool competes with RMM's for the memory.
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
