"""Simulations with plain NumPy expressions: two ranks on two cores, and one NumPy process.

    python -m benchmarks.solvers --json FILE

Gray-Scott has two fields of 1024 x 1024, lattice Boltzmann nine of 256 x 768. Ways take turns in
each round. The fastest 50 steps in a row count, so that other programs on the cores matter little.

- "saved" writes frames of all fields every 50 steps, and checkpoints every ten seconds.
- "watched" has a line of `dask_p2p.progress`.

Then halos: eight fields in one message, and one field. At last the processor time of all processes
while steps sleep, with and without a line of progress.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import click
import dask
import dask.array as da
import numpy as np

import dask_p2p
from benchmarks import simulated
from benchmarks.environment import environment
from benchmarks.growth import write
from benchmarks.rivals.mpi_messages import least_s
from benchmarks.simulated import PROGRAMS, Arrays, by_numpy, least_noted

__all__ = ["main"]

NUMPY, OURS, SAVED, WATCHED = "NumPy", "iterate", "iterate, saved", "iterate, watched"
ALONE, _NAP_S = "iterate, asleep", 0.05
ONE, EIGHT = "halo of one field", "halos of eight fields"
_EVERY_CHECKPOINT = "10 s"
_RANKS, _ROUNDS, _EXCHANGES = 2, 200, 50


def divided(fields: Arrays) -> Arrays:
    """Return Dask arrays in two slabs along the last axis but one."""
    return {
        name: da.from_array(a, chunks=(*a.shape[:-2], a.shape[-2] // _RANKS, a.shape[-1]))
        for name, a in fields.items()
    }


def by_iterate(name: str, fields: Arrays, steps: int, **options: Any) -> Any:
    """Return the lazy fields after some steps."""
    step, _, depth = PROGRAMS[name]
    settings = {"boundary": "periodic", "ranks": _RANKS, **options}
    return dask_p2p.iterate(step, fields, depth, steps, **settings)


def step_s(client: Any, lazy: Any, is_watched: bool = False) -> float:
    """Return the seconds of a step on the slowest worker."""
    from distributed import wait

    client.run(least_noted)
    (result,) = dask.persist(lazy)
    if is_watched:
        dask_p2p.progress(result, file=io.StringIO())
    wait(result)
    least_by_worker: dict[str, float] = client.run(least_noted)
    return max(least_by_worker.values())


def saved_s(client: Any, make: Callable[..., Any]) -> float:
    """Return the seconds of a step with frames and checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        frames = dask_p2p.Save(f"{folder}/frames", simulated.IN_A_ROW)
        states = dask_p2p.Checkpoint(f"{folder}/states", _EVERY_CHECKPOINT)
        return step_s(client, make(save=frames, checkpoint=states))


def numpy_s(name: str, fields: Arrays, steps: int) -> float:
    """Return the seconds of a step in this process."""
    least_noted()
    by_numpy(name, fields, steps)
    return least_noted()


def of_program(client: Any, name: str, side: int, steps: int, repeats: int) -> dict[str, float]:
    """Return the least seconds of a step by each way, after a check of the values."""
    from distributed import wait

    first = PROGRAMS[name][1](side)
    fields = dask.persist(divided(first))[0]
    wait(fields)
    (result,) = dask.compute(by_iterate(name, fields, 3))
    expected = by_numpy(name, first, 3)
    if not all(np.array_equal(result[key], expected[key]) for key in expected):
        raise click.ClickException(f"{name}: other values than NumPy's")
    make = partial(by_iterate, name, fields, steps)
    ways: dict[str, Callable[[], float]] = {
        NUMPY: partial(numpy_s, name, first, steps),
        OURS: lambda: step_s(client, make()),
        SAVED: partial(saved_s, client, make),
        WATCHED: lambda: step_s(client, make(), is_watched=True),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, measure in ways.items():
            times[way].append(measure())
    return {way: min(times_s) for way, times_s in times.items()}


# --- halos


def exchanged(ctx: Any, x: Any) -> Any:
    """Return a rank's seconds of an exchange of one halo, and of eight."""
    arrays = [ctx.with_halo(x) for _ in range(8)]

    def exchange(some: Any) -> float:
        def call() -> None:
            ctx.update_halo(*some, copy=False)

        return least_s(ctx.barrier, call, _ROUNDS, _EXCHANGES)

    return np.array([exchange(arrays[:1]), exchange(arrays)])


def of_halos() -> dict[str, float]:
    """Return the least seconds of both exchanges, for fields of 64 x 128 a rank."""
    x = da.zeros((128, 128), chunks=(64, 128))
    rank_times: Any = dask_p2p.spmd(
        exchanged, x, outputs=dask_p2p.PerRank(np.zeros(2)), ranks=_RANKS
    )
    one_s, eight_s = rank_times.compute().max(axis=0).tolist()
    return {ONE: one_s, EIGHT: eight_s}


# --- progress


def sleeping(u: Any) -> Arrays:
    """Do nothing in a step."""
    time.sleep(_NAP_S)
    return {"u": u}


def processor_s(client: Any) -> float:
    """Return the processor time of this process, which has the scheduler, and of all workers."""
    of_workers: dict[str, float] = client.run(time.process_time)
    return time.process_time() + sum(of_workers.values())


def of_progress(client: Any, naps: int, repeats: int) -> dict[str, float]:
    """Return the least processor time by a second of a run, without and with a line of progress."""
    x, least_s = da.zeros(2, chunks=1), dict.fromkeys((ALONE, WATCHED), inf)
    for _ in range(repeats):
        for way in least_s:
            lazy = dask_p2p.iterate(sleeping, {"u": x}, 0, naps, ranks=_RANKS)
            before_s, start_s = processor_s(client), time.perf_counter()
            step_s(client, lazy, way == WATCHED)
            elapsed_s = time.perf_counter() - start_s
            least_s[way] = min(least_s[way], (processor_s(client) - before_s) / elapsed_s)
    return least_s


@click.command(context_settings={"show_default": True})
@click.option("--side", default=1024, help="Side of Gray-Scott's fields.")
@click.option("--steps", default=200, help="Steps of a run.")
@click.option("--repeats", default=5, help="Rounds.")
@click.option("--naps", default=200, help="Steps that sleep for 50 ms.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(side: int, steps: int, repeats: int, naps: int, path: Path | None) -> None:
    """Time steps of simulations, and exchanges of halos."""
    from distributed import Client, LocalCluster

    options: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": ":0"}
    rows: dict[str, dict[str, float]] = {}
    with LocalCluster(n_workers=_RANKS, **options) as cluster, Client(cluster) as client:
        dask_p2p.register(client)
        for name in PROGRAMS:
            rows[name] = times = of_program(client, name, side, steps, repeats)
            for way, each_s in times.items():
                print(f"{name:>18}, {way:>18}: {each_s * 1e3:8.3f} ms a step", flush=True)
            print(f"{name:>18}, iterate / NumPy: {times[OURS] / times[NUMPY]:.2f}")
            for way in (SAVED, WATCHED):
                print(f"{name:>18}, {way} / iterate: {times[way] / times[OURS]:.3f}", flush=True)
        rows["halos"] = times = of_halos()
        print(f"{ONE}: {times[ONE] * 1e6:.1f} us, {EIGHT}: {times[EIGHT] * 1e6:.1f} us")
        of_progress(client, naps // 10, 1)  # warms up
        rows["progress"] = times = of_progress(client, naps, repeats)
        for way, each_s in times.items():
            print(f"{way}: {each_s:.4f} s of processor time a second", flush=True)
    write(path, {**environment(), "side": side, "steps": steps, "repeats": repeats, "rows": rows})


if __name__ == "__main__":
    main()
