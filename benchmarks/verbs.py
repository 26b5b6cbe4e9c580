"""Times of public functions on two GPUs, to compare two versions of the package in turn.

    PYTHONPATH=OLD python benchmarks/verbs.py old >> results.jsonl
    PYTHONPATH=NEW python benchmarks/verbs.py new >> results.jsonl

The program calls public functions only, so any version can be on the path. It prints a line of JSON
for each case: medians of nine runs from `persist()` to `wait()`, after two warm-up runs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, wait

import dask_p2p

_RUNS = 9
_PAUSE_S = 0.15


def filled(block: Any) -> Any:
    """Return a CuPy block of numbers below 1000, in the shape of a NumPy block."""
    import cupy

    return cupy.arange(block.size, dtype="f4").reshape(block.shape) % 1000


def made(client: Any, shape: Sequence[int], chunks: Sequence[int]) -> Any:
    """Make an array on the GPUs, with equal numbers of neighbouring blocks a worker."""
    import cupy

    workers = sorted(client.nthreads())
    empty = da.empty(tuple(shape), chunks=tuple(chunks), dtype="f4")
    blocks = empty.numblocks

    def worker_of(key: Any) -> list[str]:
        number = int(np.ravel_multi_index(key[1 : 1 + len(blocks)], blocks))
        return [workers[number * len(workers) // int(np.prod(blocks))]]

    with dask.annotate(workers=worker_of, allow_other_workers=True):
        x = empty.map_blocks(filled, meta=cupy.empty((0,) * len(shape), "f4"), dtype="f4")
    x = client.persist(x, optimize_graph=False)  # keeps the annotation
    wait(x)
    return x


def cases(client: Any) -> Iterator[tuple[str, Any, Callable[[Any], Any], list[str] | str]]:
    """Yield each case: its name, array, operation and order of transports."""
    for rows in (32768, 65536):
        for blocks in (1, 4):  # a worker
            x = made(client, (rows, rows), (rows // (2 * blocks), rows))
            for transport in ("ipc", "ucx"):
                name = f"transpose, {rows} rows, {blocks} blocks a worker, {transport}"
                yield name, x, dask_p2p.transpose, [transport]
    rows = 65536
    for name, shape, before, after in (
        ("rows to columns", (rows, rows), (rows // 2, rows), (rows, rows // 2)),
        ("4 x 4 to rows", (rows, rows), (rows // 4, rows // 4), (rows // 2, rows)),
        ("pencils", (2048, 2048, 1024), (1024, 2048, 1024), (2048, 1024, 1024)),
    ):
        x = made(client, shape, before)
        yield f"{name}, 16 GiB", x, partial(dask_p2p.rechunk, chunks=after), "auto"


def main(version: str) -> None:
    """Print the results of all cases."""
    with dask_p2p.local_cluster(2, gpus=True) as cluster, Client(cluster) as client:
        for name, x, operation, order in cases(client):
            walls_s, exchanges_s, moved_bytes = [], [], 0
            for _ in range(_RUNS + 2):
                with dask.config.set({"p2p.transports.order": order}):
                    start_s = time.perf_counter()
                    y = client.persist(operation(x))
                    wait(y)
                walls_s.append(time.perf_counter() - start_s)
                run = dask_p2p.last_runs(client)[0]
                exchanges_s.append(run.longest_task_s)
                moved_bytes = run.moved_bytes
                del y
                time.sleep(_PAUSE_S)
            result = {
                "version": version,
                "case": name,
                "wall_ms": round(statistics.median(walls_s[2:]) * 1e3, 2),
                "exchange_ms": round(statistics.median(exchanges_s[2:]) * 1e3, 2),
                "moved_bytes": moved_bytes,
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
