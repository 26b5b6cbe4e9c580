"""A cluster of dask-jobqueue jobs that start and end with it: python cluster.py --help.

This program runs where jobs are submitted, and contains the scheduler.
"""

from __future__ import annotations

import argparse
import os

import dask
import dask.array as da
from dask.utils import parse_bytes
from dask_jobqueue import SLURMCluster
from distributed import Client

import dask_p2p


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description="Transpose a matrix on Slurm jobs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--gpus", action="store_true", help="give each worker a GPU")
    parser.add_argument("--nodes", type=int, default=2, help="number of jobs, with one node each")
    parser.add_argument("--workers", type=int, default=8, help="workers a node: its CPUs or GPUs")
    parser.add_argument("--memory", default="8GiB", help="memory of a worker")
    parser.add_argument("--time", default="00:30:00", help="time limit of a job")
    parser.add_argument("--pool", default="60GiB", help="pool of a GPU, a multiple of 2 MiB")
    parser.add_argument("--interface", help="interface of the fast network; else Dask's choice")
    return parser.parse_args()


def cpu_cluster(args: argparse.Namespace) -> SLURMCluster:
    """Return a cluster whose jobs have one worker for each CPU of a node."""
    return SLURMCluster(
        cores=args.workers,
        processes=args.workers,
        memory=args.workers * parse_bytes(args.memory),
        walltime=args.time,
        interface=args.interface,
        local_directory=os.environ.get("TMPDIR", "/tmp"),
    )


def gpu_cluster(args: argparse.Namespace) -> SLURMCluster:
    """Return a cluster whose jobs have one worker for each GPU of a node."""
    node_bytes = args.workers * parse_bytes(args.memory)
    return SLURMCluster(
        # For one worker; dask-cuda starts a worker for each GPU of the job.
        cores=1,
        processes=1,
        memory=args.memory,
        job_cpu=4 * args.workers,
        job_mem=f"{node_bytes >> 20}M",
        walltime=args.time,
        interface=args.interface,
        local_directory=os.environ.get("TMPDIR", "/tmp"),
        worker_command="dask_cuda.cli",
        worker_extra_args=["--rmm-pool-size", args.pool, "--set-rmm-allocator-for-libs", "cupy"],
        job_extra_directives=[f"--gpus-per-node={args.workers}"],
    )


if __name__ == "__main__":
    args = arguments()
    make = gpu_cluster if args.gpus else cpu_cluster
    with (
        make(args) as cluster,
        Client(cluster) as client,
        dask.config.set({"array.backend": "cupy" if args.gpus else "numpy"}),
    ):
        print(cluster.job_script())
        cluster.scale(jobs=args.nodes)
        client.wait_for_workers(args.nodes * args.workers, timeout=600)
        n = 1_000 * args.nodes * args.workers
        x = da.random.random((n, n), chunks=(1_000, -1)).persist()
        y = dask_p2p.transpose(x).persist()
        print("every element is right:", bool((y == x.T).all().compute()))
        print(dask_p2p.last_runs(client))
