"""First calls on new clusters: the registration, transposes by three ways, and an iteration.

    python -m benchmarks.first_calls --workers 4 --repeats 7 --json FILE
    python -m benchmarks.first_calls --gpus --new-cache --workers 2 --json FILE

Each time is that of the first call on a cluster of its own, whose workers have made the input. All
ways take turns. `local_cluster` starts the clusters, and registers the plugins. The processor time
of a worker is that of its process; the client and the scheduler share the main process. Python
caches the bytecode of the package first, as pip does. With ``--new-cache`` each cluster compiles
all kernels, as on a new machine.
"""

from __future__ import annotations

import compileall
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import click
import dask.array as da
from distributed import Client, futures_of, wait

import dask_p2p
from benchmarks.environment import environment
from benchmarks.growth import write

__all__ = ["main"]

_SETTLE_S = 0.3
_CACHE = "CUPY_CACHE_DIR"
FIELDS = ("wall", "worker", "main")  # wall time; processor times of a worker and the main process


def averaged(u: Any) -> Any:
    """Return the average of four neighbours, from a block with halos."""
    return (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4


#: Ways by name: functions of the input, whose result is computed if it is an array.
WAYS: dict[str, Callable[[Any], Any]] = {
    "registration": lambda x: dask_p2p.register(),
    "dask_p2p": lambda x: dask_p2p.transpose(x),
    "dask tasks": lambda x: x.T.rechunk(x.chunks, method="tasks"),
    "dask p2p": lambda x: x.T.rechunk(x.chunks, method="p2p"),
    "iterate": lambda x: dask_p2p.iterate(averaged, x, depth=1, steps=10, boundary="periodic"),
}


def processor_s() -> float:
    """Return the processor time that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def first_call(
    call: Callable[[Any], Any], workers: int, side: int, gpus: bool = False
) -> dict[str, float]:
    """Return the times of a call on a new cluster, by the names in `FIELDS`, in seconds."""
    options: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": ":0"}
    started = partial(dask_p2p.local_cluster, workers, gpus=gpus, **options)
    with started() as cluster, Client(cluster) as client:
        x = da.random.default_rng(0).random((side, side), chunks=(-(-side // workers), side))
        if gpus:
            import cupy

            x = x.map_blocks(cupy.asarray)
        x = client.persist(x)
        wait(x)
        time.sleep(_SETTLE_S)
        client.run(processor_s)  # the second such call imports nothing
        before_s, main_s, start_s = client.run(processor_s), processor_s(), time.perf_counter()
        result = call(x)
        if result is not None:
            result = client.persist(result)
            wait(result)
            assert {future.status for future in futures_of(result)} == {"finished"}
        wall_s, main_s = time.perf_counter() - start_s, processor_s() - main_s
        after_s = client.run(processor_s)
        worker_s = fmean(after_s[address] - before_s[address] for address in after_s)
    return dict(zip(FIELDS, (wall_s, worker_s, main_s), strict=True))


@contextmanager
def _kernels_of_their_own() -> Iterator[None]:
    """Give the processes that start now an empty cache of kernels."""
    before = os.environ.get(_CACHE)
    with TemporaryDirectory() as folder:
        os.environ[_CACHE] = folder
        try:
            yield
        finally:
            os.environ.pop(_CACHE)
            if before is not None:
                os.environ[_CACHE] = before


@click.command(context_settings={"show_default": True})
@click.option("--workers", default=4, help="Workers with one thread each.")
@click.option("--side", default=4096, help="Rows and columns of the matrix, in row slabs.")
@click.option("--repeats", default=5, help="Clusters for each way.")
@click.option("--way", "ways", multiple=True, type=click.Choice([*WAYS]), default=[*WAYS])
@click.option("--gpus", is_flag=True, help="A worker for each GPU, with CuPy blocks.")
@click.option("--new-cache", is_flag=True, help="Give each cluster an empty cache of kernels.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(
    workers: int,
    side: int,
    repeats: int,
    ways: tuple[str, ...],
    gpus: bool,
    new_cache: bool,
    path: Path | None,
) -> None:
    """Time the first call on new clusters, by each way."""
    compileall.compile_dir(os.path.dirname(dask_p2p.__file__), quiet=1)
    measurements: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            with _kernels_of_their_own() if new_cache else nullcontext():
                measurements[way].append(first_call(WAYS[way], workers, side, gpus))
    for way, runs in measurements.items():
        columns = {name: sorted(run[name] * 1e3 for run in runs) for name in FIELDS}
        texts = (
            f"{name} {times[0]:7.1f} least, {times[len(times) // 2]:7.1f} median"
            for name, times in columns.items()
        )
        print(f"{way:>12}, ms: {'; '.join(texts)}", flush=True)
    rows = [{"way": way, "times_s": runs} for way, runs in measurements.items()]
    parameters = {"workers": workers, "side": side, "gpus": gpus, "new_cache": new_cache}
    write(path, {**environment(), **parameters, "rows": rows})


if __name__ == "__main__":
    main()
