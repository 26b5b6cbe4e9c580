"""Redistribution of a matrix inside a section, compared with mpi4py and a layer of the graph.

    python -m benchmarks.cuts --members 2 --members 4 --json FILE

A square of float64 lies in slabs of rows, one a worker with one thread. `Context.redistribute`
turns it into slabs of columns, in each order of messages, with and without reading other ranks'
memory; and into the transpose in slabs of rows. All ways take turns in each round. A time is the
slowest rank's, from a common start. Results are checked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import dask
import dask.array as da
import numpy as np
from distributed import Client, wait

import dask_p2p
from benchmarks.environment import environment
from benchmarks.growth import write
from benchmarks.rivals import mpi_cut
from benchmarks.sections import seconds
from dask_p2p.plans.ranks import ORDERS

__all__ = ["main"]

#: Ways inside a section: keywords of `redistribute`; true if ranks may read others' memory.
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "read": ({"partition": (1,)}, True),
    "transposed, read": ({"partition": (0,), "axes": (1, 0)}, True),
    **{f"messages, {order}": ({"partition": (1,), "exchange": order}, False) for order in ORDERS},
    "transposed, messages": ({"partition": (0,), "axes": (1, 0)}, False),
}
LAYER = "a layer of dask_p2p.transpose"


def timed(ctx: Any, x: Any, ways: Sequence[str], rounds: int) -> Any:
    """Return the seconds of each way and round in the first elements of rank 0's rows."""
    outs = [ctx.redistribute(x, **WAYS[way][0]) for way in ways]
    times = []
    for _ in range(rounds):
        for way, out in zip(ways, outs, strict=True):
            ctx.barrier()
            start_s = time.perf_counter()
            ctx.redistribute(x, **WAYS[way][0], out=out)
            times.append(ctx.allreduce(time.perf_counter() - start_s, "max"))
    x[0, : len(times)] = times
    return x


def of_sections(x: Any, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way inside a section."""
    found: dict[str, list[float]] = {}
    for reads, transports in ((True, "auto"), (False, ["comm"])):
        ways = [way for way, (_, may_read) in WAYS.items() if may_read == reads]
        with dask.config.set({"p2p.transports.order": transports}):
            y: Any = dask_p2p.spmd(timed, x, ways=ways, rounds=rounds, ranks=x.numblocks[0])
        count = len(ways) * rounds
        times = y[0, :count].compute().reshape(rounds, len(ways))
        found |= {way: times[:, number].tolist() for number, way in enumerate(ways)}
    return found


def layer_seconds(x: Any, number: int) -> float:
    """Return the seconds of a transpose as a layer, of another array each time."""
    x = x.map_blocks(_again, number).persist()
    wait(x)
    return seconds(lambda x, _: dask_p2p.transpose(x), x, 1)


def _again(block: Any, number: int) -> Any:
    return block


def count_wrong(x: Any) -> int:
    """Count the elements that differ from the input after a round trip."""
    shape = x.shape

    def back(ctx: Any, x: Any, keywords: dict[str, Any]) -> Any:
        redistributed = ctx.redistribute(x, **keywords)
        axes = keywords.get("axes")
        final_shape = shape if axes is None else shape[::-1]
        return ctx.redistribute(
            redistributed, from_partition=keywords["partition"], axes=axes, shape=final_shape
        )

    partitions = [keywords for keywords, _ in WAYS.values()]
    results = [dask_p2p.spmd(back, x, keywords=k, ranks=x.numblocks[0]) for k in partitions]
    return sum(int((y != x).sum().compute()) for y in results)


@click.command(context_settings={"show_default": True})
@click.option("--side", default=4096, help="Side of the square.")
@click.option("--members", "numbers", multiple=True, type=int, default=(2, 4))
@click.option("--rounds", default=5, help="Rounds in each repeat.")
@click.option("--repeats", default=3, help="Repeats after the first.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(side: int, numbers: Sequence[int], rounds: int, repeats: int, path: Path | None) -> None:
    """Time a redistribution inside a section, and by other ways."""
    from distributed import LocalCluster

    rows = []
    for number in numbers:
        with (
            LocalCluster(n_workers=number, threads_per_worker=1, dashboard_address=":0") as cluster,
            Client(cluster) as client,
        ):
            dask_p2p.register(client)
            rng = da.random.default_rng(0)
            x = client.persist(rng.random((side, side), chunks=(-(-side // number), side)))
            if count := count_wrong(x):
                raise click.ClickException(f"{count} elements are wrong")
            times: dict[str, list[float]] = {}
            for repeat in range(repeats + 1):
                section_times = of_sections(x, rounds)
                section_times[LAYER] = [
                    layer_seconds(x, repeat * rounds + i) for i in range(rounds)
                ]
                if find_spec("mpi4py") is not None:
                    for name, each_s in mpi_cut.seconds(side, number, rounds).items():
                        section_times[f"mpi4py, {name}"] = [each_s]
                for way, times_s in section_times.items():
                    if repeat:
                        times.setdefault(way, []).extend(times_s)
        for way, each in times.items():
            print(
                f"{number} ranks {way:>32}: median {np.median(each) * 1e3:8.2f} ms, "
                f"least {min(each) * 1e3:8.2f} ms",
                flush=True,
            )
        rows.append({"ranks": number, "times_s": times})
    write(path, {**environment(), "side": side, "rounds": rounds, "repeats": repeats, "rows": rows})


if __name__ == "__main__":
    main()
