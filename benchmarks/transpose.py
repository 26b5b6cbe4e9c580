"""Time `dask_p2p.transpose` beside Dask's own ways and rivals, in one run; print, write JSON.

On GPUs Dask's way is measured on a cluster whose protocol is UCX, its fastest; this package's on
the cluster that `dask_p2p.local_cluster` makes; what needs no Dask after both are closed, see
`benchmarks/rivals`. On CPUs all share one cluster, and only ratios mean anything. Every result is
checked element by element.

    python benchmarks/transpose.py --workers 8 --size 32768 --size 131072 --json results.json
    python benchmarks/transpose.py --bytes 64GiB --dtype float32 --dtype complex128 --cases
    python benchmarks/transpose.py --cpu --size 10000 --dtype float64
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from pathlib import Path
from statistics import median
from typing import Any

import click
import dask
import numpy as np
from dask.utils import parse_bytes
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
from dask_p2p.registration import workers_of

ROOT = Path(__file__).resolve().parents[1]
OURS = "dask_p2p"
OVER_UCX = "dask_p2p, ucx"
BY_MESSAGES = "dask_p2p, comm"
LOW_LATENCY = ", low latency"
NO_OP = "one no-op layer"
LIMIT = "copy engines (limit)"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """An array to transpose."""

    name: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    axes: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Of the whole array."""
        return prod(self.shape) * int(np.dtype(self.dtype).itemsize)


def even_matrix(size: int, workers: int, dtype: str) -> Case:
    """Return the square matrix in one row slab a worker that all ways are compared with."""
    chunks = (split_evenly(size, workers), (size,))
    return Case("even matrix", (size, size), chunks, (1, 0), dtype)


def cliffs(size: int, workers: int, dtype: str) -> list[Case]:
    """Return arrays of as many bytes that could be slower by the byte than the even matrix."""
    whole, shape = (size,), (size, size)
    box = box_shape(size)
    slabs = (split_evenly(box[0], workers), (box[1],), (box[2],))
    return [
        Case("4 blocks a worker", shape, (split_evenly(size, 4 * workers), whole), (1, 0), dtype),
        Case("uneven blocks", shape, (split_unevenly(size, workers), whole), (1, 0), dtype),
        Case("box, axes 2, 1, 0", box, slabs, (2, 1, 0), dtype),
        Case("box, axes 1, 0, 2", box, slabs, (1, 0, 2), dtype),
    ]


def split_unevenly(length: int, parts: int) -> tuple[int, ...]:
    """Split a length into parts that are in turn a quarter longer and shorter than even ones.

    By an odd number, so that no boundary falls on one of a kernel's tiles.

    >>> split_unevenly(4096, 4)
    (1281, 767, 1281, 767)
    """
    sizes = list(split_evenly(length, parts))
    for first in range(0, parts - 1, 2):
        shift = sizes[first + 1] // 4 | 1
        sizes[first] += shift
        sizes[first + 1] -= shift
    return tuple(sizes)


def box_shape(size: int) -> tuple[int, int, int]:
    """Return the sides of a box with about as many elements as a square matrix of `size` rows.

    >>> box_shape(131072)
    (2560, 2560, 2621)
    """
    side = max(1, round(size ** (2 / 3)))
    if side > 64:
        side -= side % 64
    return side, side, size**2 // side**2


def rows_of(matrix_bytes: int, dtype: str) -> int:
    """Return the rows of a square matrix of about so many bytes, a multiple of 1024 if large.

    >>> rows_of(2**36, "float32"), rows_of(2**36, "float16")
    (131072, 185344)
    """
    rows = isqrt(matrix_bytes // np.dtype(dtype).itemsize)
    return rows - rows % 1024 if rows > 1024 else rows


def p2p_with(**options: Any) -> Callable[..., Any]:
    """Return this package's way with some of its options changed: dots are written as two _."""
    changes = {
        f"p2p.{name.replace('__', '.').replace('_', '-')}": value for name, value in options.items()
    }

    def way(x: Any, axes: tuple[int, ...]) -> Any:
        with dask.config.set(changes):
            return p2p_transpose(x, axes)

    return way


#: Other ways to move the same tiles, shown beside the one that is chosen.
VARIANTS = {
    "dask_p2p, kernels read in place": p2p_with(transports__ipc__staging_bytes="0 B"),
    "dask_p2p, 96 MiB of staging": p2p_with(transports__ipc__staging_bytes="96 MiB"),
    "dask_p2p, 384 MiB of staging": p2p_with(transports__ipc__staging_bytes="384 MiB"),
    "dask_p2p, one transfer at a time": p2p_with(mode="sync"),
}


def no_op(x: Any, axes: tuple[int, ...]) -> Any:
    """Return one layer that does nothing: what Dask itself takes."""
    return x.map_blocks(
        lambda block: block[:1], meta=x._meta, chunks=((1,) * x.numblocks[0], *x.chunks[1:])
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

    def __init__(self, client: Client, kind: str, repeats: int) -> None:
        self.client = client
        self.kind = kind
        self.repeats = repeats
        self.workers = len(workers_of(client))
        self.protocol = client.scheduler.address.partition(":")[0]

    def run(self, case: Case, ways: dict[str, Callable[..., Any]], memory: bool) -> list[Row]:
        """Measure these ways with one array."""
        # Fusion of tasks, of which there is nothing here, forgets where they should run.
        with dask.config.set({"optimization.fuse.active": False}):
            x = place_blocks(self.client, lambda: self._make(case))
        rows = []
        for name, way in ways.items():
            check = None if way is no_op else self._check(case)
            row = {"way": name, "size": case.shape[0], "dtype": case.dtype}
            try:
                runs = measure(self.client, name, way, x, case.axes, self.repeats, check)
            except Exception as exc:  # a rival that fails is a result too
                row["failed"] = f"{type(exc).__name__}: {exc}"[:300]
            else:
                row |= summary(runs, x.nbytes)
                if memory and way is p2p_transpose:
                    row["memory"] = self._memory(x, case.axes)
            rows.append({**row, "protocol": self.protocol})
        return rows

    def _make(self, case: Case) -> Any:
        """Return the lazy array, with as many neighbouring blocks for each worker."""
        addresses = sorted(workers_of(self.client))
        workers, blocks = len(addresses), len(case.chunks[0])

        def place(key: tuple[str, int]) -> str:  # sent to the scheduler, with all that it uses
            return str(addresses[key[1] * workers // blocks])

        with dask.annotate(workers=place):
            return indexed_array(case.shape, case.chunks, case.dtype, kind=self.kind)

    def _check(self, case: Case) -> Callable[[Any], int]:
        return lambda y: int(count_wrong(y, case.shape, case.axes, kind=self.kind).compute())

    def _memory(self, x: Any, axes: tuple[int, ...]) -> dict[str, int]:
        """Most that a worker allocates beyond its input and output blocks, bytes."""
        self.client.run(enable_statistics)
        self.client.run(peak_bytes)
        y = self.client.persist(p2p_transpose(x, axes))
        wait(y)
        # What lay there before statistics were on does not count in them: it is the input.
        seen = self.client.run(peak_bytes)
        block_bytes = y.nbytes // y.numblocks[0]
        return {
            "block_bytes": block_bytes,
            "most_beyond_blocks_bytes": max(peak for _, peak in seen.values()) - block_bytes,
        }


def summary(runs: Runs, nbytes: int) -> Row:
    """Return what a row of the report says of the runs of one way."""
    exchanges = runs.exchanges
    return {
        "matrix_bytes": nbytes,
        "first_s": runs.first_s,
        "times_s": runs.times_s,
        "median_s": runs.median_s,
        "bandwidth_gbs": bandwidth_gbs(nbytes, runs.median_s),
        "wrong": runs.wrong,
        "before_s": [e.before_s for e in exchanges],
        "exchange_s": [max(e.tasks_s) for e in exchanges],
        "span_s": [e.span_s for e in exchanges],
        "after_s": [e.after_s for e in exchanges],
        "link_gbs": runs.link_gbs,
        "transports": sorted({t for e in exchanges for _, _, t in e.pairs}),
        "moved_bytes": exchanges[-1].moved_bytes if exchanges else None,
    }


def compare_with_even(case: Case, row: Row, even: Row) -> Row:
    """Add what an array is, and its times by the byte over those of the even matrix."""
    made = {**row, "case": case.name, "shape": case.shape, "axes": case.axes}
    made["blocks"] = [len(lengths) for lengths in case.chunks]
    if row.get("span_s") and even.get("span_s"):
        bytes_ratio = even["matrix_bytes"] / row["matrix_bytes"]
        made["median_to_even"] = row["median_s"] / even["median_s"] * bytes_ratio
        # From the first task's start to the last one's end: a worker may have several.
        made["span_to_even"] = median(row["span_s"]) / median(even["span_s"]) * bytes_ratio
    return made


def run_rivals(
    gpus: int, dtype: str, sizes: Sequence[int], repeats: int, timeout_s: int
) -> list[Row]:
    """Measure what needs no Dask, in processes of their own."""
    command = [sys.executable, "-m", "benchmarks.rivals", "--gpus", str(gpus), "--dtype", dtype]
    command += ["--repeats", str(repeats), "--timeout", str(timeout_s)]
    command += [word for size in sizes for word in ("--size", str(size))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        done = subprocess.run([*command, "--json", str(path)], cwd=ROOT, check=False)
        if path.exists():
            return list(json.loads(path.read_text("utf-8")))
    reason = f"python -m benchmarks.rivals ended with {done.returncode}"
    return [{"way": "rivals", "size": s, "dtype": dtype, "failed": reason} for s in sizes]


def table(rows: Sequence[Row]) -> Table:
    """Make the table that people compare."""
    made = Table(title="Square matrix in row slabs, transposed into row slabs; times in ms")
    for column in (
        "rows",
        "dtype",
        "way",
        "first",
        "median",
        "best",
        "GB/s",
        "before",
        "exchange",
        "after",
        "link GB/s",
        "wrong",
        "faster by",
        "of limit",
    ):
        made.add_column(column, justify="left" if column in ("way", "dtype") else "right")
    ours, limits = medians(rows, OURS), medians(rows, LIMIT)
    for row in rows:
        where = row["size"], row["dtype"]
        if "failed" in row:
            made.add_row(*map(str, where), row["way"], "failed: " + row["failed"][:60])
            continue
        made.add_row(
            *map(str, where),
            row["way"],
            f"{row['first_s'] * 1e3:.1f}",
            f"{row['median_s'] * 1e3:.2f}",
            f"{min(row['times_s']) * 1e3:.2f}",
            f"{row['bandwidth_gbs']:.1f}",
            *(median_ms(row.get(part)) for part in ("before_s", "exchange_s", "after_s")),
            f"{row['link_gbs']:.1f}" if row["link_gbs"] else "",
            "" if row["wrong"] is None else str(row["wrong"]),
            f"{row['median_s'] / ours[where]:.2f}" if where in ours else "",
            f"{limits[where] / row['median_s']:.1%}" if where in limits else "",
        )
    return made


def cases_table(rows: Sequence[Row]) -> Table:
    """Make the table of arrays that might be slower by the byte."""
    made = Table(title="dask_p2p; times in ms, and by the byte over those of the even matrix")
    columns = ("shape", "dtype", "case", "median", "span", "no-op", "wrong")
    for column in (*columns, "to even", "span to even"):
        made.add_column(column, justify="left" if column in ("case", "dtype") else "right")
    for row in rows:
        head = " x ".join(map(str, row["shape"])), row["dtype"], row["case"]
        if "failed" in row:
            made.add_row(*head, "failed: " + row["failed"][:60])
            continue
        made.add_row(
            *head,
            f"{row['median_s'] * 1e3:.2f}",
            median_ms(row["span_s"]),
            median_ms([row["no_op_s"]] if row.get("no_op_s") else None),
            str(row["wrong"]),
            *(f"{row[k]:.2f}" if k in row else "" for k in ("median_to_even", "span_to_even")),
        )
    return made


def medians(rows: Sequence[Row], way: str) -> dict[tuple[int, str], float]:
    """Return the median times of one way, by size and dtype."""
    return {
        (row["size"], row["dtype"]): row["median_s"]
        for row in rows
        if row["way"] == way and "failed" not in row
    }


def median_ms(times_s: Sequence[float] | None) -> str:
    """Return the median of some times for a table, nothing if there are none."""
    return f"{median(times_s) * 1e3:.2f}" if times_s else ""


@click.command()
@click.option(
    "--workers", type=int, default=None, help="Workers, one a GPU. Default: all GPUs, or 4."
)
@click.option("--size", "sizes", type=int, multiple=True, help="Rows; repeatable. Default: 8192.")
@click.option(
    "--bytes",
    "all_bytes",
    multiple=True,
    metavar="BYTES",
    help="Of the matrix, such as 64GiB, in place of its rows: as many for each dtype; repeatable.",
)
@click.option("--dtype", "dtypes", multiple=True, default=("float32",), help="Repeatable.")
@click.option("--repeats", default=9, help="Timed runs after the first.")
@click.option("--cpu", is_flag=True, help="CPU workers, even where there are GPUs.")
@click.option(
    "--rivals/--no-rivals", default=True, help="Dask's own ways; on GPUs those without Dask too."
)
@click.option("--rival-timeout", "timeout_s", default=120, help="Of each one without Dask, s.")
@click.option("--cases", is_flag=True, help="Several and uneven blocks and boxes too.")
@click.option("--variants", is_flag=True, help="This package with other options too, on GPUs.")
@click.option("--protocol", default=None, help="Dask's protocol for this package's cluster.")
@click.option("--commit", default=None, help="Of the code, where it cannot be asked of git.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), default=None)
def main(
    workers: int | None,
    sizes: tuple[int, ...],
    all_bytes: tuple[str, ...],
    dtypes: tuple[str, ...],
    repeats: int,
    cpu: bool,
    rivals: bool,
    timeout_s: int,
    cases: bool,
    variants: bool,
    protocol: str | None,
    commit: str | None,
    path: Path | None,
) -> None:
    """Measure, print a table, write JSON."""
    gpus = False if cpu else len(usable_gpus()) > 1
    sizes_of = sizes_by_dtype(dtypes, sizes, all_bytes)
    with_floor = {OURS: p2p_transpose, NO_OP: no_op}
    ours = dict(with_floor)
    theirs = {f"dask {method}": dask_rechunk(method) for method in ("tasks", "p2p")}
    if gpus:
        ours[OVER_UCX] = p2p_with(transports__order=["ucx"])
        ours |= VARIANTS if variants else {}
    else:
        ours[BY_MESSAGES] = p2p_with(transports__order=["comm"])
    plans = [(protocol, False, ours if gpus or not rivals else {**ours, **theirs})]
    if gpus:
        quick = {f"{name}{LOW_LATENCY}": ours[name] for name in (OURS, NO_OP)}
        plans.append((protocol, True, quick))
    if gpus and rivals:
        plans.append(("ucx", False, {"dask tasks": theirs["dask tasks"]}))
    rows: list[Row] = []
    special: list[Row] = []
    report: Row = {"started": time.time(), "kind": "cupy" if gpus else "numpy"}
    report |= {"rows": rows, "cases": special, **environment()}
    if commit is not None:
        report["commit"] = commit
    for chosen, low_latency, ways in plans:
        extra = {} if chosen is None else {"protocol": chosen}
        with (
            dask.config.set({"p2p.low-latency": low_latency}),
            dask_p2p.local_cluster(workers, gpus=gpus, **extra) as cluster,
            Client(cluster) as client,
        ):
            session = Session(client, report["kind"], repeats)
            report["workers"] = session.workers
            for dtype, size in ((d, s) for d, found in sizes_of.items() for s in found):
                measured = session.run(even_matrix(size, session.workers, dtype), ways, gpus)
                rows += measured
                if cases and OURS in ways:
                    for case in cliffs(size, session.workers, dtype):
                        row, floor = session.run(case, with_floor, memory=False)
                        row["no_op_s"] = floor.get("median_s")
                        special.append(compare_with_even(case, row, measured[0]))
                write(report, path)  # what comes next may end in an error
    if gpus and rivals:
        for dtype, found in sizes_of.items():
            rows += run_rivals(report["workers"], dtype, found, repeats, timeout_s)
    rows.sort(key=lambda row: (dtypes.index(row["dtype"]), row["size"]))
    console = Console(width=160)
    console.print(table(rows))
    if special:
        console.print(cases_table(special))
    write(report, path)


def sizes_by_dtype(
    dtypes: Sequence[str], sizes: Sequence[int], all_bytes: Sequence[str]
) -> Mapping[str, list[int]]:
    """Return the rows of the matrices of each dtype, in ascending order."""
    if not sizes and not all_bytes:
        sizes = (8192,)
    parsed = [parse_bytes(text) for text in all_bytes]
    return {
        dtype: sorted({*sizes, *(rows_of(matrix_bytes, dtype) for matrix_bytes in parsed)})
        for dtype in dtypes
    }


def write(report: Row, path: Path | None) -> None:
    """Write what was measured."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
