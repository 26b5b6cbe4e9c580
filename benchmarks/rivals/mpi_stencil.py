"""A five-point stencil by mpi4py: persistent requests, and the kernel of `benchmarks.sections`.

`seconds` starts `mpiexec` for each run, to take turns with other ways: waiting MPI processes keep a
core busy.
"""

from __future__ import annotations

import json
import sys
import time
from math import inf
from typing import Any

import numpy as np

from benchmarks.rivals.mpi_fft import run_once

__all__ = ["IN_A_ROW", "five_points", "least_noted", "noted", "seconds"]

IN_A_ROW = 5  # consecutive steps; the fastest show the undisturbed cost
_began_s: list[float] = []  # start times of steps in this process


def five_points(u: Any, out: Any) -> None:
    """Fill `out` with the mean of the four neighbours of each element."""
    np.add(u[:-2, 1:-1], u[2:, 1:-1], out=out)
    out += u[1:-1, :-2]
    out += u[1:-1, 2:]
    out *= 0.25


def noted(u: Any, out: Any) -> None:
    """Call `five_points`, and record its start time."""
    _began_s.append(time.perf_counter())
    five_points(u, out)


def least_noted() -> float:
    """Return the seconds of a step in the fastest consecutive steps; clear the record."""
    began_s = [*_began_s]
    _began_s.clear()
    pairs = zip(began_s, began_s[IN_A_ROW:], strict=False)
    return min((last - first for first, last in pairs), default=inf) / IN_A_ROW


def seconds(
    side: int, processes: int, steps: int, exchanges: bool = True, figure: str = "seconds"
) -> float:
    """Return the seconds of a step on stacked squares, one for each process.

    Parameters
    ----------
    side, processes, steps
        Side of a square, number of processes, number of steps.
    exchanges
        False: without halo exchange, for the kernel's own time.
    of
        "seconds": mean of all steps. "least_s": mean of the fastest consecutive steps.
    """
    report = run_once(__name__, processes, side, steps, int(exchanges))
    if report["wrong"]:
        raise AssertionError("the halo is wrong")
    return float(report[figure])


def measure(side: int, steps: int, exchanges: bool, world: Any) -> dict[str, Any]:
    """Make the steps once to warm up, and once for the time."""
    from mpi4py import MPI

    up, down = ((world.rank + by) % world.size for by in (-1, 1))
    row = MPI.DOUBLE.Create_contiguous(side).Commit()

    def requests(u: Any) -> list[Any]:
        flat, width = u.reshape(-1), side + 2

        def at(line: int) -> list[Any]:
            return [flat[line * width + 1 :], 1, row]

        return [
            world.Send_init(at(1), up, 1),
            world.Recv_init(at(side + 1), down, 1),
            world.Send_init(at(side), down, 2),
            world.Recv_init(at(0), up, 2),
        ]

    arrays = [np.full((side + 2, side + 2), float(world.rank)) for _ in range(2)]
    prepared = [requests(u) for u in arrays]

    def fill(level: int) -> None:
        u = arrays[level]
        if exchanges:
            MPI.Prequest.Startall(prepared[level])
        u[1:-1, 0], u[1:-1, -1] = u[1:-1, -2], u[1:-1, 1]  # periodic along the undivided axis
        if exchanges:
            MPI.Prequest.Waitall(prepared[level])

    fill(0)
    is_wrong = exchanges and not (arrays[0][0, 1:-1] == up).all()
    elapsed_s = 0.0
    for _ in range(2):
        least_noted()
        world.Barrier()
        start_s = time.perf_counter()
        for step in range(steps):
            noted(arrays[step % 2], arrays[1 - step % 2][1:-1, 1:-1])
            fill(1 - step % 2)
        elapsed_s = world.allreduce(time.perf_counter() - start_s, MPI.MAX)
    return {
        "seconds": elapsed_s / steps,
        "least_s": world.allreduce(least_noted(), MPI.MAX),
        "wrong": world.allreduce(int(is_wrong)),
    }


if __name__ == "__main__":
    from mpi4py import MPI

    side, steps, exchanges = map(int, sys.argv[1:])
    report = measure(side, steps, bool(exchanges), MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(report))
