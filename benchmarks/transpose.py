"""Time `dask_p2p.transpose` beside Dask's own ways, in one run; print a table, write JSON.

On GPUs Dask's way is measured on a cluster whose protocol is UCX, its fastest; this package's on
the cluster that `dask_p2p.local_cluster` makes. On CPUs all share one cluster, and only ratios
mean anything. Every result is checked element by element.

    python benchmarks/transpose.py --workers 8 --size 32768 --size 131072 --json results.json
    python benchmarks/transpose.py --cpu --size 10000 --dtype float64
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import click
from distributed import Client, wait
from rich.console import Console
from rich.table import Table

import dask_p2p
from dask_p2p.cluster import usable_gpus
from dask_p2p.environment import environment
from dask_p2p.indexed import count_wrong, indexed_array
from dask_p2p.layout import split_evenly
from dask_p2p.measure import (
    Runs,
    bandwidth_gbs,
    dask_rechunk,
    measure,
    p2p_transpose,
    place_blocks,
)

AXES = (1, 0)


def no_op(x: Any, axes: tuple[int, ...]) -> Any:
    """Return one layer that does nothing: what Dask itself takes."""
    return x.map_blocks(
        lambda block: block[:1], meta=x._meta, chunks=((1,) * x.numblocks[0], x.chunks[1])
    )


def enable_statistics() -> None:
    """Have RMM note the most that is allocated at a time."""
    import rmm.statistics

    rmm.statistics.enable_statistics()
    rmm.statistics.push_statistics()


def peak_bytes() -> tuple[int, int]:
    """Return what is allocated now, and the most since the last call."""
    import rmm.statistics

    now = rmm.statistics.pop_statistics()
    rmm.statistics.push_statistics()
    return now.current_bytes, now.peak_bytes


class Session:
    """One cluster, and what is measured on it."""

    def __init__(self, client: Client, dtype: str, kind: str, repeats: int) -> None:
        self.client = client
        self.dtype = dtype
        self.kind = kind
        self.repeats = repeats

    def run(
        self, size: int, ways: dict[str, Callable[..., Any]], memory: bool
    ) -> list[dict[str, Any]]:
        """Measure these ways at one size."""
        workers = len(self.client.scheduler_info(n_workers=-1)["workers"])
        shape, chunks = (size, size), (split_evenly(size, workers), (size,))
        x = place_blocks(
            self.client, lambda: indexed_array(shape, chunks, self.dtype, kind=self.kind)
        )
        rows = []
        for name, way in ways.items():
            check = None if way is no_op else self._check(shape)
            try:
                runs = measure(self.client, name, way, x, AXES, self.repeats, check)
            except Exception as exc:  # a rival that fails is a result too
                rows.append(
                    {"way": name, "size": size, "failed": f"{type(exc).__name__}: {exc}"[:300]}
                )
                continue
            row = summary(runs, size, x.nbytes)
            if memory and way is p2p_transpose:
                row["memory"] = self._memory(x)
            rows.append(row)
        return rows

    def _check(self, shape: tuple[int, int]) -> Callable[[Any], int]:
        return lambda y: int(count_wrong(y, shape, AXES, kind=self.kind).compute())

    def _memory(self, x: Any) -> dict[str, int]:
        """Most that a worker allocates beyond its input and output blocks, bytes."""
        self.client.run(enable_statistics)
        self.client.run(peak_bytes)
        y = self.client.persist(p2p_transpose(x, AXES))
        wait(y)
        # What lay there before statistics were on does not count in them: it is the input.
        seen = self.client.run(peak_bytes)
        block_bytes = y.nbytes // y.numblocks[0]
        return {
            "block_bytes": block_bytes,
            "most_beyond_blocks_bytes": max(peak for _, peak in seen.values()) - block_bytes,
        }


def summary(runs: Runs, size: int, nbytes: int) -> dict[str, Any]:
    """Put the runs of one way into a row of the report."""
    exchanges = runs.exchanges
    return {
        "way": runs.name,
        "size": size,
        "matrix_bytes": nbytes,
        "first_s": runs.first_s,
        "times_s": runs.times_s,
        "median_s": runs.median_s,
        "bandwidth_gbs": bandwidth_gbs(nbytes, runs.median_s),
        "wrong": runs.wrong,
        "exchange_s": [max(e.tasks_s) for e in exchanges],
        "span_s": [e.span_s for e in exchanges],
        "link_gbs": runs.link_gbs,
        "transports": sorted({t for e in exchanges for _, _, t in e.pairs}),
        "moved_bytes": exchanges[-1].moved_bytes if exchanges else None,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """Make the table that people compare."""
    made = Table(title="Square matrix in row slabs, transposed into row slabs; times in ms")
    for column in (
        "size",
        "way",
        "first",
        "median",
        "best",
        "GB/s",
        "exchange",
        "link GB/s",
        "wrong",
        "faster by",
    ):
        made.add_column(column, justify="left" if column == "way" else "right")
    ours = {
        row["size"]: row["median_s"]
        for row in rows
        if row["way"] == "dask_p2p" and "median_s" in row
    }
    for row in rows:
        if "failed" in row:
            made.add_row(str(row["size"]), row["way"], "failed: " + row["failed"][:60])
            continue
        exchange = sorted(row["exchange_s"])
        made.add_row(
            str(row["size"]),
            row["way"],
            f"{row['first_s'] * 1e3:.1f}",
            f"{row['median_s'] * 1e3:.2f}",
            f"{min(row['times_s']) * 1e3:.2f}",
            f"{row['bandwidth_gbs']:.1f}",
            f"{exchange[len(exchange) // 2] * 1e3:.2f}" if exchange else "",
            f"{row['link_gbs']:.1f}" if exchange else "",
            "" if row["wrong"] is None else str(row["wrong"]),
            f"{row['median_s'] / ours[row['size']]:.2f}" if row["size"] in ours else "",
        )
    return made


@click.command()
@click.option(
    "--workers", type=int, default=None, help="Workers, one a GPU. Default: all GPUs, or 4."
)
@click.option("--size", "sizes", type=int, multiple=True, default=(8192,), help="Rows; repeatable.")
@click.option("--dtype", default="float32")
@click.option("--repeats", default=9, help="Timed runs after the first.")
@click.option("--cpu", is_flag=True, help="CPU workers, even where there are GPUs.")
@click.option("--rivals/--no-rivals", default=True)
@click.option("--protocol", default=None, help="Dask's protocol for this package's cluster.")
@click.option("--commit", default=None, help="Of the code, where it cannot be asked of git.")
@click.option("--json", "path", type=click.Path(dir_okay=False), default=None)
def main(
    workers: int | None,
    sizes: tuple[int, ...],
    dtype: str,
    repeats: int,
    cpu: bool,
    rivals: bool,
    protocol: str | None,
    commit: str | None,
    path: str | None,
) -> None:
    """Measure, print a table, write JSON."""
    gpus = False if cpu else len(usable_gpus()) > 1
    kind = "cupy" if gpus else "numpy"
    ours = {"dask_p2p": p2p_transpose, "one no-op layer": no_op}
    theirs = {"dask tasks": dask_rechunk("tasks"), "dask p2p": dask_rechunk("p2p")}
    rows: list[dict[str, Any]] = []
    plans = [(protocol, ours if gpus or not rivals else {**ours, **theirs})]
    if gpus and rivals:
        plans.append(("ucx", {"dask tasks": theirs["dask tasks"]}))
    started = time.time()
    for chosen, ways in plans:
        extra = {} if chosen is None else {"protocol": chosen}
        with (
            dask_p2p.local_cluster(workers, gpus=gpus, **extra) as cluster,
            Client(cluster) as client,
        ):
            session = Session(client, dtype, kind, repeats)
            for size in sizes:
                measured = session.run(size, ways, memory=gpus)
                name = cluster.scheduler_address.partition(":")[0]
                rows.extend({**row, "protocol": name} for row in measured)
    rows.sort(key=lambda row: row["size"])
    Console(width=140).print(table(rows))
    if path is not None:
        report = {
            "started": started,
            "dtype": dtype,
            "workers": workers,
            "kind": kind,
            "rows": rows,
        }
        report.update(environment())
        if commit is not None:
            report["commit"] = commit
        with open(path, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
