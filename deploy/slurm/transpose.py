"""One transpose on a cluster: python transpose.py SCHEDULER_FILE WORKERS."""

from __future__ import annotations

import sys

import dask.array as da
from distributed import Client

import dask_p2p

if __name__ == "__main__":
    scheduler_file, workers = sys.argv[1], int(sys.argv[2])
    with Client(scheduler_file=scheduler_file, timeout=120) as client:
        client.wait_for_workers(workers, timeout=120)
        n = 1_000 * workers
        x = da.random.random((n, n), chunks=(1_000, -1)).persist()
        y = dask_p2p.transpose(x).persist()
        print("every element is right:", bool((y == x.T).all().compute()))
        print(dask_p2p.last_runs(client))
        print(dask_p2p.check(client))
