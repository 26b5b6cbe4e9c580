"""mpi4py: redistribution of a matrix from row slabs to column slabs.

`Alltoallw` sends subarrays in place. For `Alltoallv` a process packs its regions. `benchmarks.cuts`
compares both with `Context.redistribute`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.rivals.mpi_fft import run_once

__all__ = ["seconds"]


def seconds(side: int, processes: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of a redistribution by each of the two calls."""
    report = run_once(__name__, processes, side, rounds)
    if report.pop("wrong"):
        raise AssertionError("the columns are wrong")
    return {name: float(value) for name, value in report.items()}


def measure(side: int, rounds: int, world: Any) -> dict[str, Any]:
    """Time and check both calls."""
    from mpi4py import MPI

    bounds = [side * rank // world.size for rank in range(world.size + 1)]
    own, width = bounds[world.rank], bounds[world.rank + 1] - bounds[world.rank]
    rows = np.arange(side, dtype=float) + side * np.arange(own, own + width)[:, None]
    expected = side * np.arange(side, dtype=float)[:, None] + np.arange(own, own + width)
    columns = np.empty_like(expected)
    parts = [bounds[rank + 1] - bounds[rank] for rank in range(world.size)]

    def part(shape: tuple[int, int], size: tuple[int, int], start: tuple[int, int]) -> Any:
        return MPI.DOUBLE.Create_subarray(shape, size, start).Commit()

    ranks = range(world.size)
    sent = [part(rows.shape, (width, parts[r]), (0, bounds[r])) for r in ranks]
    parts_received = [part(columns.shape, (parts[r], width), (bounds[r], 0)) for r in ranks]
    ones, zeros = [1] * world.size, [0] * world.size

    def by_types() -> None:
        world.Alltoallw([rows, ones, zeros, sent], [columns, ones, zeros, parts_received])

    counts, starts = (
        [width * part_rows for part_rows in parts],
        [width * start for start in bounds[:-1]],
    )
    packed = np.empty(width * side)

    def by_packing() -> None:
        for start, size, first in zip(starts, counts, bounds[:-1], strict=True):
            region = rows[:, first : first + size // width]
            packed[start : start + size].reshape(region.shape)[...] = region
        # No unpacking: the rows arrive in the order of processes.
        world.Alltoallv([packed, counts], [columns, counts])

    def median_s(run: Callable[[], None]) -> float:
        times = []
        for _ in range(rounds + 1):
            world.Barrier()
            start_s = time.perf_counter()
            run()
            times.append(world.allreduce(time.perf_counter() - start_s, MPI.MAX))
        return float(np.median(times[1:]))

    report = {}
    wrong_count = 0
    for name, run in (("Alltoallw", by_types), ("Alltoallv", by_packing)):
        columns[...] = -1
        report[name] = median_s(run)
        wrong_count += world.allreduce(int((columns != expected).sum()))
    return {**report, "wrong": wrong_count}


if __name__ == "__main__":
    from mpi4py import MPI

    side, rounds = map(int, sys.argv[1:])
    report = measure(side, rounds, MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(report))
