"""The cost of graphs of many blocks, simulated without data or measured.

``python benchmarks/growth.py simulate`` prints the cost for Dask's scheduler of a transpose of
10,000 slabs on 1,000 workers, in one pass, in groups, and in two and three passes through
intermediate grids. ``python benchmarks/growth.py measure`` transposes an array in 64 to 1,000 slabs
on 4 workers, with and without groups and by Dask's own ways.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import click

# Dask 2026.7.1 on one otherwise idle core: `benchmarks/README.md`, "Growth".
EDGE_S = 35e-6
EDGE_BYTES = 1000
TASK_S = 500e-6
TASK_BYTES = 3000


@dataclass(frozen=True)
class Cost:
    """The cost of one way to transpose."""

    way: str
    tasks: int
    edges: int
    scheduler_s: float
    scheduler_bytes: int
    moved: float  # bytes moved between workers, as a multiple of the array
    stages: int  # holders that a task reads from, one after another, over all layers


def cost(way: str, tasks: int, edges: int, moved: float, stages: int) -> Cost:
    """Return the cost of a graph with these numbers of tasks and edges."""
    seconds = tasks * TASK_S + edges * EDGE_S
    return Cost(way, tasks, edges, seconds, tasks * TASK_BYTES + edges * EDGE_BYTES, moved, stages)


def simulated(blocks: int, workers: int) -> list[Cost]:
    """Return the cost of a transpose of `blocks` slabs by each way."""
    from dask_p2p.plans import group_blocks, redistribution

    sizes = (1,) * blocks
    plan = redistribution((sizes, (blocks,)), (1, 0), (sizes, (blocks,)))
    groups = len(group_blocks(plan, None, lambda: workers).chunks[0])
    elsewhere = 1 - 1 / workers
    costs = [
        cost("one pass", blocks, blocks**2, elsewhere, workers),
        cost(f"{groups} groups", groups + blocks, groups * blocks + blocks, elsewhere, workers),
    ]
    for passes in (2, 3):
        # In each pass a task reads the blocks of one row of the previous grid.
        branches = ceil(blocks ** (1 / passes))
        tasks, edges = passes * blocks, passes * blocks * branches
        way = f"{passes} passes of {branches}"
        costs.append(cost(way, tasks, edges, passes * elsewhere, passes * min(branches, workers)))
    return costs


def measured(client: Any, blocks: int, side: int, way: str) -> dict[str, Any]:
    """Transpose a square array in `blocks` slabs; return the times."""
    import dask
    import dask.array as da
    from distributed import wait

    import dask_p2p

    x = client.persist(da.random.random((side, side), chunks=(ceil(side / blocks), side)))
    wait(x)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    if way in ("auto", "one pass"):
        with dask.config.set({"p2p.groups": "auto" if way == "auto" else 0}):
            y = dask_p2p.transpose(x, chunks=x.chunks)
    else:
        y = x.T.rechunk(x.chunks, method=way)
    y = client.persist(y)
    wait(y)
    wall_s = time.perf_counter() - started_s
    # The scheduler of a local cluster runs in this process.
    return {
        "blocks": blocks,
        "way": way,
        "wall_s": wall_s,
        "client_and_scheduler_s": time.process_time() - cpu_s,
    }


@click.group()
def main() -> None:
    """Simulate or measure the cost of graphs of many blocks."""


@main.command()
@click.option("--blocks", default=10_000, show_default=True)
@click.option("--workers", default=1_000, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def simulate(blocks: int, workers: int, path: Path | None) -> None:
    """Count tasks and edges without data or a cluster."""
    costs = simulated(blocks, workers)
    print(f"{blocks} slabs -> {blocks} slabs on {workers} workers")
    for total in costs:
        print(
            f"{total.way:>18}: {total.tasks:>7,} tasks, {total.edges:>11,} edges, scheduler "
            f"{total.scheduler_s:8.1f} s, {total.scheduler_bytes / 1e9:7.2f} GB; moved "
            f"{total.moved:.2f} times, in {total.stages} stages"
        )
    write(
        path,
        {"blocks": blocks, "workers": workers, "rows": [asdict(total) for total in costs]},
    )


@main.command()
@click.option("--blocks", multiple=True, type=int, default=(64, 128, 256, 512, 1000))
@click.option("--side", default=4000, show_default=True, help="Side of the float64 square.")
@click.option("--way", multiple=True, default=("auto", "one pass", "tasks", "p2p"))
@click.option("--repeats", default=3, show_default=True, help="Runs after the first one.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def measure(
    blocks: tuple[int, ...], side: int, way: tuple[str, ...], repeats: int, path: Path | None
) -> None:
    """Transpose an array in growing numbers of slabs; the ways take turns."""
    from distributed import Client

    import dask_p2p

    rows = []
    for count in blocks:
        for repeat in range(repeats + 1):
            for name in way:
                with dask_p2p.local_cluster(4) as cluster, Client(cluster) as client:
                    dask_p2p.register(client)
                    row = measured(client, count, side, name)
                if repeat:
                    rows.append(row)
                    print(
                        f"{count:>5} {name:>9}: wall {row['wall_s']:6.2f} s, client and scheduler "
                        f"{row['client_and_scheduler_s']:5.2f} s",
                        flush=True,
                    )
    write(path, {"side": side, "rows": rows})


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result as JSON, if there is a path."""
    if path is not None:
        path.write_text(json.dumps({"started": time.time(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
