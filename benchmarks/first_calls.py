"""First calls on new clusters: the registration of the plugins, and transposes by three ways.

    python -m benchmarks.first_calls --workers 4 --repeats 7 --json FILE

Each time is that of the first call on a cluster of its own, whose workers have made the input. All
ways take turns. The processor time of a worker is that of its process; the client and the
scheduler share the main process. Python caches the bytecode of the package first, as pip does.
"""

from __future__ import annotations

import compileall
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import dask.array as da
from distributed import Client, LocalCluster, wait

import dask_p2p
from benchmarks.environment import environment
from benchmarks.growth import write

__all__ = ["main"]

_SETTLE_S = 0.3
FIELDS = ("wall", "worker", "main")  # wall time; processor times of a worker and the main process

#: Ways by name: functions of the input, whose result is computed if it is an array.
WAYS: dict[str, Callable[[Any], Any]] = {
    "registration": lambda x: dask_p2p.register(),
    "dask_p2p": lambda x: dask_p2p.transpose(x),
    "dask tasks": lambda x: x.T.rechunk(x.chunks, method="tasks"),
    "dask p2p": lambda x: x.T.rechunk(x.chunks, method="p2p"),
}


def processor_s() -> float:
    """Return the processor time that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def first_call(call: Callable[[Any], Any], workers: int, side: int) -> dict[str, float]:
    """Return the times of a call on a new cluster, by the names in `FIELDS`, in seconds."""
    options: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(n_workers=workers, **options) as cluster, Client(cluster) as client:
        x = da.random.default_rng(0).random((side, side), chunks=(-(-side // workers), side))
        x = client.persist(x)
        wait(x)
        time.sleep(_SETTLE_S)
        client.run(processor_s)  # the second such call imports nothing
        before_s, main_s, start_s = client.run(processor_s), processor_s(), time.perf_counter()
        made = call(x)
        if made is not None:
            made = client.persist(made)
            wait(made)
        wall_s, main_s = time.perf_counter() - start_s, processor_s() - main_s
        after_s = client.run(processor_s)
        worker_s = fmean(after_s[address] - before_s[address] for address in after_s)
    return dict(zip(FIELDS, (wall_s, worker_s, main_s), strict=True))


@click.command(context_settings={"show_default": True})
@click.option("--workers", default=4, help="Workers with one thread each.")
@click.option("--side", default=4096, help="Rows and columns of the matrix, in row slabs.")
@click.option("--repeats", default=5, help="Clusters for each way.")
@click.option("--way", "ways", multiple=True, type=click.Choice([*WAYS]), default=[*WAYS])
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(workers: int, side: int, repeats: int, ways: tuple[str, ...], path: Path | None) -> None:
    """Time the first call on new clusters, by each way."""
    compileall.compile_dir(os.path.dirname(dask_p2p.__file__), quiet=1)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            found[way].append(first_call(WAYS[way], workers, side))
    for way, runs in found.items():
        columns = {name: sorted(run[name] * 1e3 for run in runs) for name in FIELDS}
        texts = (
            f"{name} {times[0]:7.1f} least, {times[len(times) // 2]:7.1f} median"
            for name, times in columns.items()
        )
        print(f"{way:>12}, ms: {'; '.join(texts)}", flush=True)
    rows = [{"way": way, "times_s": runs} for way, runs in found.items()]
    write(path, {**environment(), "workers": workers, "side": side, "rows": rows})


if __name__ == "__main__":
    main()
