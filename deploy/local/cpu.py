"""One transpose on a cluster of this machine's CPUs. Run it: python cpu.py."""

from __future__ import annotations

import dask.array as da
from distributed import Client, LocalCluster

import dask_p2p

if __name__ == "__main__":
    with (
        # Processes, not threads: blocks move between processes. TCP, because inproc moves no data.
        LocalCluster(n_workers=4, threads_per_worker=1, protocol="tcp://") as cluster,
        Client(cluster) as client,
    ):
        print(f"{len(cluster.workers)} workers, dashboard {client.dashboard_link}")
        x = da.random.random((4_000, 4_000), chunks=(1_000, -1)).persist()
        y = dask_p2p.transpose(x).persist()
        print("every element is right:", bool((y == x.T).all().compute()))
        print(dask_p2p.last_runs(client))
