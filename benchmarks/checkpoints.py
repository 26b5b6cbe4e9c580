"""Time of a checkpoint inside a section, compared with a copy of the same size.

    python -m benchmarks.checkpoints --mib 256 --mib 1024 --json FILE

Two workers on one host, with one thread each, hold an array of ``--mib`` MiB each, and work
concurrently. The first checkpoints allocate memory that later ones use again, so they are reported
separately.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import dask.array as da
import numpy as np

import dask_p2p
from benchmarks.environment import environment
from benchmarks.growth import write

__all__ = ["main"]

_WORKERS, _FIRST, _COLUMNS = 2, 2, 4096
COPY, FIRST, LATER = "a copy, to memory that is there", "first checkpoints", "checkpoints"


def timed(ctx: Any, x: Any, repeats: int) -> Any:
    """Return the seconds of copies, then of checkpoints: one row a rank."""
    to = np.zeros_like(x)

    def seconds(compute: Any, *args: Any) -> float:
        ctx.barrier()
        start_s = time.perf_counter()
        compute(*args)
        ctx.barrier()
        return time.perf_counter() - start_s

    copies = [seconds(np.copyto, to, x) for _ in range(repeats + 1)][1:]
    checkpoints = [seconds(ctx.checkpoints.save, n + 1, [x]) for n in range(_FIRST + repeats)]
    x[0, : 2 * repeats + _FIRST] = copies + checkpoints
    return x


def measured(mib: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each run on the slower rank."""
    rows = max(1, mib * 2**20 // 8 // _COLUMNS)
    x = da.ones((_WORKERS * rows, _COLUMNS), chunks=(rows, _COLUMNS))
    y: Any = dask_p2p.spmd(timed, x, ranks=_WORKERS, repeats=repeats)
    slower = y[::rows, : 2 * repeats + _FIRST].compute().max(axis=0).tolist()
    first = slower[repeats : repeats + _FIRST]
    return {COPY: slower[:repeats], FIRST: first, LATER: slower[repeats + _FIRST :]}


@click.command(context_settings={"show_default": True})
@click.option("--mib", "sizes", multiple=True, type=int, default=(256,), help="State of a rank.")
@click.option("--repeats", default=5, help="Runs of each.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(sizes: Sequence[int], repeats: int, path: Path | None) -> None:
    """Time checkpoints inside a section, and copies of the same size."""
    from distributed import Client, LocalCluster

    rows = []
    with (
        LocalCluster(n_workers=_WORKERS, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster),
    ):
        for mib in sizes:
            times = measured(mib, repeats)
            for name, times_s in times.items():
                print(
                    f"{mib:>5} MiB {name:>32}: median {median(times_s) * 1e3:9.3f} ms", flush=True
                )
            ratio = median(times[LATER]) / median(times[COPY])
            print(f"{mib:>5} MiB {'checkpoint / copy':>32}: {ratio:8.2f}", flush=True)
            rows.append({"state_mib": mib, "seconds": times, "checkpoint / copy": ratio})
    write(path, {**environment(), "workers": _WORKERS, "repeats": repeats, "rows": rows})


if __name__ == "__main__":
    main()
