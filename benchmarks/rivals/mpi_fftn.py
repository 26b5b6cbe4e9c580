"""mpi4py-fft on CPUs: Fourier transform of a complex cube in slabs along all axes.

`seconds` starts `mpiexec` for each run, to take turns with other ways: waiting MPI processes keep a
core busy. The processes make a plan, run once to warm up, and once for the time.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from benchmarks.measure import Case
from benchmarks.rivals.mpi_fft import WAY, run_once

__all__ = ["WAY", "seconds"]


def seconds(case: Case, processes: int) -> float:
    """Start the processes, and return the slowest one's seconds for its second transform."""
    report = run_once(__name__, processes, case.shape[0])
    if report["wrong"]:
        raise AssertionError(f"{report['wrong']} elements are wrong")
    return float(report["seconds"])


def measure(side: int, world: Any) -> dict[str, Any]:
    """Transform a plane wave, whose spectrum has one element other than zero."""
    import mpi4py_fft
    from mpi4py import MPI

    plan = mpi4py_fft.PFFT(world, (side,) * 3, dtype=np.complex128, grid=(-1, 1, 1))
    x, y = mpi4py_fft.newDistArray(plan, False), mpi4py_fft.newDistArray(plan, True)
    turns = [2j * np.pi * np.arange(side) * k / side for k in (1, 2, 3)]
    x[...] = np.exp(turns[0][x.local_slice()[0], None, None] + turns[1][:, None] + turns[2])
    elapsed_s = 0.0
    for _ in range(2):
        world.Barrier()
        start_s = time.perf_counter()
        plan.forward(x, y, normalize=False)
        elapsed_s = world.allreduce(time.perf_counter() - start_s, MPI.MAX)
    rows = y.local_slice()[1]
    expected = np.zeros((side,) * 3)[:, rows]
    if rows.start <= 2 < rows.stop:
        expected[1, 2 - rows.start, 3] = side**3
    wrong_count = world.allreduce(int((abs(y - expected) > 1e-12 * side**3).sum()))
    return {"seconds": elapsed_s, "wrong": wrong_count}


if __name__ == "__main__":
    from mpi4py import MPI

    report = measure(int(sys.argv[1]), MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(report))
