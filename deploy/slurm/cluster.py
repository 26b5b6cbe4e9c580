"""Jobs that come and go with their cluster, by dask-jobqueue: python cluster.py [--gpus].

This program runs where jobs are submitted, and the scheduler runs in it.
"""

from __future__ import annotations

import os
import sys

import dask
import dask.array as da
from dask_jobqueue import SLURMCluster
from distributed import Client

import dask_p2p

NODES = 2
WORKERS_PER_NODE = 8  # processors, or GPUs


def cpu_cluster(interface: str) -> SLURMCluster:
    """Return a cluster whose jobs have a node's processors, with one worker each."""
    return SLURMCluster(
        cores=WORKERS_PER_NODE,
        processes=WORKERS_PER_NODE,
        memory="64GiB",
        walltime="00:30:00",
        interface=interface,
        local_directory=os.environ.get("TMPDIR", "/tmp"),
    )


def gpu_cluster(interface: str) -> SLURMCluster:
    """Return a cluster whose jobs have a node's GPUs, with one worker each."""
    return SLURMCluster(
        # Of each worker; dask-cuda starts one for each GPU of the job.
        cores=1,
        processes=1,
        memory="32GiB",
        job_cpu=4 * WORKERS_PER_NODE,
        job_mem=f"{32 * WORKERS_PER_NODE}G",
        walltime="00:30:00",
        interface=interface,
        local_directory=os.environ.get("TMPDIR", "/tmp"),
        worker_command="dask_cuda.cli",
        worker_extra_args=["--rmm-pool-size", "60GiB", "--set-rmm-allocator-for-libs", "cupy"],
        job_extra_directives=[f"--gpus-per-node={WORKERS_PER_NODE}"],
    )


if __name__ == "__main__":
    gpus = "--gpus" in sys.argv
    make = gpu_cluster if gpus else cpu_cluster
    with (
        make(os.environ.get("INTERFACE", "ib0")) as cluster,
        Client(cluster) as client,
        dask.config.set({"array.backend": "cupy" if gpus else "numpy"}),
    ):
        print(cluster.job_script())
        cluster.scale(jobs=NODES)
        client.wait_for_workers(NODES * WORKERS_PER_NODE, timeout=600)
        n = 1_000 * NODES * WORKERS_PER_NODE
        x = da.random.random((n, n), chunks=(1_000, -1)).persist()
        y = dask_p2p.transpose(x).persist()
        print("every element is right:", bool((y == x.T).all().compute()))
        print(dask_p2p.last_runs(client))
