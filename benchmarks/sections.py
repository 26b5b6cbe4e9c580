"""A step of a five-point stencil by `iterate`, compared with mpi4py and `map_overlap`.

    python -m benchmarks.sections --side 512 --side 1024 --json FILE

Two workers with one thread each have a square of float64 each. All ways take turns in each round.
Where all steps are one layer, the time of a step is the difference between many steps and one,
divided by the number of steps. Results are checked against NumPy. The five fastest consecutive
steps, less the kernel's, are the undisturbed cost of an exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import click
import dask.array as da
import numpy as np

import dask_p2p
from benchmarks.environment import environment
from benchmarks.growth import write
from benchmarks.rivals import mpi_stencil
from benchmarks.rivals.mpi_stencil import five_points, least_noted, noted

__all__ = ["main"]

OURS, KERNEL, MPI = "dask_p2p.iterate", "the kernel alone", "mpi4py"
OUR_LAYERS, DASK_LAYERS = "dask_p2p.map_overlap", "dask.array.map_overlap"
LEAST = ", five steps in a row"
FIXED, OUR_LAYER = "dask_p2p.iterate, one step", "dask_p2p.map_overlap, one layer"


def with_halo(u: Any) -> Any:
    """Return the step's result with a halo, which `map_overlap` trims."""
    out = u.copy()
    five_points(u, out[1:-1, 1:-1])
    return out


def iterated(x: Any, steps: int, step: Callable[..., Any] = five_points) -> Any:
    """Return the lazy result of `steps` steps in one layer."""
    return dask_p2p.iterate(step, x, 1, steps, boundary="periodic")


def least_of(client: Any, x: Any, steps: int) -> float:
    """Return the seconds of a step in the fastest consecutive steps of `iterate`."""
    client.run(least_noted)
    seconds(partial(iterated, step=noted), x, steps)
    least_by_worker: dict[str, float] = client.run(least_noted)
    return max(least_by_worker.values())


def layers(map_overlap: Callable[..., Any], x: Any, steps: int) -> Any:
    """Return the lazy result of `steps` layers."""
    for _ in range(steps):
        x = map_overlap(with_halo, x, depth=1, boundary="periodic")
    return x


def seconds(make: Callable[[Any, int], Any], x: Any, steps: int) -> float:
    """Return the seconds to compute the result of `make`, which stays on the workers."""
    from distributed import wait

    start_s = time.perf_counter()
    y = make(x, steps).persist()
    wait(y)
    elapsed_s = time.perf_counter() - start_s
    y.map_blocks(_failure).sum().compute()  # raises the error of a failed block
    return elapsed_s


def _failure(block: Any) -> Any:
    return block[:0]


def counts(side: int) -> tuple[int, int]:
    """Return the numbers of steps and of layers that take about a second."""
    return min(6400, max(20, 400 * 512**2 // side**2)), min(40, max(2, 10 * 512 // side))


def ways(client: Any, x: Any) -> dict[str, Callable[[], float]]:
    """Return by way a function that measures the seconds of a step."""
    workers, side = x.numblocks[0], x.shape[1]
    steps, few_steps = counts(side)

    def of_many(make: Callable[[Any, int], Any], step_count: int) -> float:
        return (seconds(make, x, step_count + 1) - seconds(make, x, 1)) / step_count

    def of_layers(map_overlap: Callable[..., Any]) -> float:
        return seconds(partial(layers, map_overlap), x, few_steps) / few_steps

    measurements: dict[str, Callable[[], float]] = {
        OURS: partial(of_many, iterated, steps),
        OURS + LEAST: partial(least_of, client, x, steps),
        FIXED: partial(seconds, iterated, x, 1),
        OUR_LAYER: partial(seconds, partial(layers, dask_p2p.map_overlap), x, 1),
        OUR_LAYERS: partial(of_layers, dask_p2p.map_overlap),
        DASK_LAYERS: partial(of_layers, da.map_overlap),
    }
    if find_spec("mpi4py") is not None:
        run = partial(mpi_stencil.seconds, side, workers, steps)
        for suffix, figure in (("", "seconds"), (LEAST, "least_s")):
            measurements[MPI + suffix] = partial(run, of=figure)
            measurements[KERNEL + suffix] = partial(run, exchanges=False, of=figure)
    return measurements


def count_wrong(x: Any) -> int:
    """Count the elements that differ from NumPy's result for the whole array."""
    values = x.compute()
    for _ in range(3):
        halo_array = np.pad(values, 1, "wrap")
        five_points(halo_array, values)
    return int((iterated(x, 3).compute() != values).sum())


def ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """Return ratios of the medians, this package against the other ways."""
    medians = {way: median(times_s) for way, times_s in times.items()}
    quotients = {f"{way} / ours": medians[way] / medians[OURS] for way in (OUR_LAYERS, DASK_LAYERS)}
    quotients |= {
        f"ours / {way}": medians[OURS] / medians[way] for way in (MPI, KERNEL) if way in medians
    }
    return quotients | {"one step / one layer": medians[FIXED] / medians[OUR_LAYER]}


def exchanges(times: dict[str, list[float]]) -> dict[str, float]:
    """Return the seconds of an exchange: the time of consecutive steps less the kernel's."""
    least_s = {way: min(times[way + LEAST]) for way in (OURS, MPI, KERNEL) if way + LEAST in times}
    return {
        way: least_s[way] - least_s[KERNEL]
        for way in least_s
        if way != KERNEL and KERNEL in least_s
    }


@click.command(context_settings={"show_default": True})
@click.option(
    "--side", "sides", multiple=True, type=int, default=(512, 1024), help="A square's side."
)
@click.option("--workers", default=2, help="Workers of one thread, with a square each.")
@click.option("--repeats", default=5, help="Rounds after the first.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(sides: Sequence[int], workers: int, repeats: int, path: Path | None) -> None:
    """Time a step of a stencil with all steps in one layer, and by other ways."""
    from distributed import Client, LocalCluster

    rows = []
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        dask_p2p.register(client)
        for side in sides:
            shape, rng = (side * workers, side), da.random.default_rng(0)
            x = client.persist(rng.random(shape, chunks=(side, side)))
            if count := count_wrong(x):
                raise click.ClickException(f"{count} elements are wrong")
            measured = ways(client, x)
            times: dict[str, list[float]] = {way: [] for way in measured}
            for repeat in range(repeats + 1):
                for way, measure in measured.items():
                    step_s = measure()
                    if repeat:
                        times[way].append(step_s)
            for way, times_s in times.items():
                print(
                    f"{side:>5} {way:>32}: median {median(times_s) * 1e3:9.3f} ms, "
                    f"least {min(times_s) * 1e3:9.3f} ms",
                    flush=True,
                )
            rows.append({"side": side, "step_s": times, "ratios": ratios(times)})
            rows[-1]["exchange_s"] = found = exchanges(times)
            for way, exchange_s in found.items():
                print(f"{side:>5} {way:>32}: exchange {exchange_s * 1e6:9.1f} us")
            for name, ratio in rows[-1]["ratios"].items():  # type: ignore[attr-defined]
                print(f"{side:>5} {name:>42}: {ratio:8.2f}", flush=True)
    write(path, {**environment(), "workers": workers, "repeats": repeats, "rows": rows})


if __name__ == "__main__":
    main()
