"""Workers on hosts with ssh access: python cluster.py [--gpus] SCHEDULER HOST [HOST ...]."""

from __future__ import annotations

import argparse

import dask
import dask.array as da
from distributed import Client, SSHCluster

import dask_p2p

GPU = {"rmm_pool_size": "60GiB", "rmm_allocator_external_lib_list": ["cupy"]}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", action="store_true", help="one worker for each GPU of a host")
    parser.add_argument("--each", type=int, default=4, help="workers, or GPUs, a host")
    parser.add_argument("--port", type=int, default=22, help="port of the ssh servers")
    parser.add_argument("--python", help="Python on the hosts; default: the one that runs this")
    parser.add_argument("hosts", nargs="+", help="the scheduler's host, then the workers' hosts")
    args = parser.parse_args()

    cluster = SSHCluster(
        args.hosts,
        connect_options={"port": args.port},
        worker_class="dask_cuda.CUDAWorker" if args.gpus else "distributed.Nanny",
        worker_options=GPU if args.gpus else {"n_workers": args.each, "nthreads": 1},
        scheduler_options={"port": 0, "dashboard_address": ":8787"},
        remote_python=args.python,
    )
    backend = "cupy" if args.gpus else "numpy"
    with cluster, Client(cluster) as client, dask.config.set({"array.backend": backend}):
        workers = args.each * (len(args.hosts) - 1)
        client.wait_for_workers(workers, timeout=120)
        print(f"{workers} workers, dashboard {client.dashboard_link}")
        n = 1_000 * workers
        x = da.random.random((n, n), chunks=(1_000, -1)).persist()
        y = dask_p2p.transpose(x).persist()
        print("every element is right:", bool((y == x.T).all().compute()))
        print(dask_p2p.last_runs(client))
