"""``dask p2p`` commands on a cluster: `demo` times transposes, `check` links, `runs` lists runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from math import prod
from statistics import median
from typing import Any

import click
import dask
import numpy as np
from dask.utils import format_bytes
from distributed import wait

from dask_p2p import cli
from dask_p2p.backends import backend_named
from dask_p2p.errors import REPOSITORY, install_command
from dask_p2p.geometry import split_evenly
from dask_p2p.monitoring.feed import fetch_runs_text
from dask_p2p.monitoring.runs import cells, last_runs, text_table
from dask_p2p.ops.rechunk import transpose
from dask_p2p.plans import slab_chunks
from dask_p2p.plugins.registration import workers_of
from dask_p2p.tools.cluster import device_names
from dask_p2p.types import Array, DaskArray, DType, Kind

_OURS = "dask_p2p"
_RUNS = 4  # runs of each method, including the first
_SETTLE_S = 0.2
_LEGEND = (
    "first: the first run, on a new cluster; median: of later runs; GB/s: read and written; wrong: "
    "wrong elements; times as long: the median divided by that of dask_p2p."
)
_NEXT = f"Next: {REPOSITORY}/blob/main/docs/tutorial.md, and `dask p2p check` on your cluster."


@click.command()
@click.option(
    "--size",
    type=cli.COUNT,
    metavar="N",
    help="Rows and columns of the matrix.  [default: 6000, on GPUs 32768, or fewer to fit memory]",
)
@cli.workers_option
@cli.cpu_option
def demo(size: int | None, workers: int | None, cpu: bool) -> None:
    """Start a cluster, transpose a generated matrix, and check every element.

    Dask's own methods are timed too. The cluster uses GPUs if there is more than one, else CPUs.
    """
    with cli.one_line_errors():
        spec = cli.choose_cluster(workers, cpu)
        dtype = np.dtype("float32" if spec.gpus else "float64")
        side = size or cli.default_side(spec, dtype.itemsize)
        cli.check_fits(spec, (side, side), dtype, (1, 0), "--size")
        if spec.note:
            click.echo(spec.note)
        click.echo("Starting a cluster ...")
        results: dict[str, tuple[list[float], int]] = {}  # by method: seconds a run, wrong elements
        for options, named in methods(bool(spec.gpus)):
            cluster = cli.own_cluster(spec.workers, gpus=bool(spec.gpus), **options)
            with cluster as client, client.as_current():
                if not results:
                    _print_introduction(client, spec, side, dtype)
                for name, method in named.items():
                    try:
                        results[name] = _time_method(client, method, spec, side, dtype)
                    except Exception as exc:
                        if name == _OURS:
                            raise
                        reason = str(exc).partition("\n")[0]
                        click.echo(f"{name} failed: {type(exc).__name__}: {reason}")
                    if name == _OURS:
                        run = cells(last_runs(client, 1)[0])
                        click.echo(
                            f"Moved {run['moved']}, least possible {run['least']}; pairs of "
                            f"workers by transport: {run['transports']}."
                        )
        _print_results(results, side, dtype)


def methods(on_gpus: bool) -> list[tuple[dict[str, str], dict[str, Callable[[DaskArray], Any]]]]:
    """Return the options of each cluster, with the transpose methods to run on it, by name."""
    p2p_methods: dict[str, Callable[[DaskArray], Any]] = {_OURS: lambda x: transpose(x)}
    tasks: dict[str, Callable[[DaskArray], Any]] = {"dask tasks": partial(_rechunk, "tasks")}
    if not on_gpus:
        # A cluster for each: the first of several on one cluster would start its threads.
        return [({}, p2p_methods), ({}, tasks), ({}, {"dask p2p": partial(_rechunk, "p2p")})]
    # Dask's p2p fails with CuPy blocks. Its tasks are fastest over UCX.
    if find_spec("distributed_ucxx") is None:
        return [({}, p2p_methods), ({}, tasks)]
    return [({}, p2p_methods), ({"protocol": "ucx"}, tasks)]


def _rechunk(method: str, x: DaskArray) -> DaskArray:
    return x.T.rechunk(slab_chunks(x.chunks, (1, 0)), method=method)


def _print_introduction(client: Any, spec: cli.ClusterSpec, side: int, dtype: Any) -> None:
    click.echo(f"Started {cli.devices_text(spec, device_names(client, spec.kind))}.")
    if find_spec("bokeh") is None:
        click.echo(f"Dashboard: none without bokeh. Run: {install_command('dashboard')}")
    else:
        click.echo(f"Dashboard: {client.dashboard_link or 'none'}, while this runs.")
    click.echo(
        f"Matrix: {side} x {side} {dtype}, {format_bytes(side**2 * dtype.itemsize)}; each value "
        "encodes its position. The matrix and its transpose are in slabs, one for each worker. In "
        "stage 0 each worker transposes its own tile; in each later stage it reads one tile from "
        "another worker."
    )


def _time_method(
    client: Any, method: Callable[[DaskArray], Any], spec: cli.ClusterSpec, side: int, dtype: Any
) -> tuple[list[float], int]:
    """Return the times of a transpose method, and the number of wrong elements of its last run."""
    shape, kind = (side, side), spec.kind
    workers = sorted(workers_of(client))
    with dask.annotate(workers=lambda key: workers[key[1]], allow_other_workers=True):
        x = indexed_array(shape, (split_evenly(side, spec.workers), (side,)), dtype, kind)
    x = client.persist(x, optimize_graph=False)  # optimizing loses the annotations
    wait(x)
    y, times_s = None, []
    for _ in range(_RUNS):
        del y  # the next run must not reuse this result, or share memory with it
        time.sleep(_SETTLE_S)
        start_s = time.perf_counter()
        y = client.persist(method(x))
        wait(y)
        times_s.append(time.perf_counter() - start_s)
    wrong_count = count_wrong(y, shape, (1, 0), kind, dtype)
    return times_s, int(wrong_count.compute())  # raises the error of a failed task


def _print_results(results: Mapping[str, tuple[list[float], int]], side: int, dtype: Any) -> None:
    """Print the times; raise `click.ClickException` if elements are wrong."""
    rows = [("times in ms", "first", "median", "GB/s", "wrong", "times as long")]
    ours_s = median(results[_OURS][0][1:])
    moved_gb = 2 * side**2 * dtype.itemsize / 1e9  # each element is read once and written once
    for method, (times_s, wrong_count) in results.items():
        median_s = median(times_s[1:])
        figures = f"{times_s[0] * 1e3:.2f}", f"{median_s * 1e3:.2f}", f"{moved_gb / median_s:.3g}"
        rows.append((method, *figures, str(wrong_count), f"{median_s / ours_s:.2f}"))
    click.echo(f"\n{text_table(rows)}\n")
    click.echo(_LEGEND)
    wrongs = [
        f"{wrong_count} of {side**2} of {method}"
        for method, (_, wrong_count) in results.items()
        if wrong_count
    ]
    if wrongs:
        raise click.ClickException(f"some elements are wrong: {', '.join(wrongs)}")
    click.echo(f"All {side**2} elements are where they belong.")
    click.echo(_NEXT)


@click.command()
@cli.scheduler_option
@cli.workers_option
@cli.cpu_option
@click.pass_context
def check(ctx: click.Context, scheduler: str | None, workers: int | None, cpu: bool) -> None:
    """Show transports and speeds between workers, and any problems.

    Ends with status 1 if no transport joins a pair of workers.
    """
    from dask_p2p.tools.check import check as find

    with cli.one_line_errors(), _cluster(scheduler, workers, cpu) as client:
        if scheduler is not None:
            cli.wait_for_worker(client)
        report = find(client)
    click.echo(report)
    if any(link.error for link in report.links):
        ctx.exit(1)


@click.command()
@click.option("--scheduler", metavar="ADDRESS", required=True, help="Cluster of the runs.")
@click.option("--count", type=cli.COUNT, default=20, show_default=True, help="Number of runs.")
@click.option(
    "--watch",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Print them again after each pause of SECONDS, until Ctrl-C.",
)
def runs(scheduler: str, count: int, watch: float | None) -> None:
    """Print the last runs of a cluster, the newest first, as the page /p2p lists them.

    For hosts where no browser reaches Dask's dashboard, such as login nodes.
    """
    with cli.one_line_errors(), cli.connect(scheduler) as client, suppress(KeyboardInterrupt):
        while True:
            text = client.sync(fetch_runs_text, client, count)
            if watch is not None:
                click.clear()
            click.echo(text)
            if watch is None:
                return
            time.sleep(watch)


def _cluster(scheduler: str | None, workers: int | None, cpu: bool) -> Any:
    """Return a client of the given cluster, or of a new one on this machine, as a context."""
    if scheduler is None:
        spec = cli.choose_cluster(workers, cpu)
        return cli.own_cluster(spec.workers, gpus=bool(spec.gpus))
    if workers or cpu:
        raise click.UsageError(
            "--workers and --cpu are for a cluster on this machine, not for --scheduler"
        )
    return cli.connect(scheduler)


# By item size: the largest prime that the type represents exactly. Values are linear indices modulo
# a prime, so that equal values are never a power of two, or a tile, apart.
_PRIMES = {1: 127, 2: 32749, 4: 2147483647, 8: 2305843009213693951}
_FLOAT_PRIMES = {2: 2039, 4: 16777213, 8: 9007199254740881}


def modulus(dtype: DType) -> int:
    """Return the modulus of values of this dtype; raise `ValueError` if it holds no numbers."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return 2
    if dtype.kind in "iu":
        return _PRIMES[dtype.itemsize]
    if dtype.kind in "fc":
        return _FLOAT_PRIMES[min(dtype.itemsize // (2 if dtype.kind == "c" else 1), 8)]
    raise ValueError(f"expected a boolean, integer, float or complex dtype, got {dtype}")


def indexed_array(shape: Sequence[int], chunks: Any, dtype: DType, kind: Kind = "numpy") -> Any:
    """Return a lazy Dask array with ``x[i, j, ...]`` the C-order linear index, modulo a prime."""
    import dask.array as da

    template = da.empty(shape, chunks=chunks, dtype=dtype)
    meta = backend_named(kind).module.empty((0,) * template.ndim, dtype)
    parameters = {"shape": tuple(shape), "kind": kind, "out_dtype": template.dtype}
    return da.map_blocks(
        _indexed_block, chunks=template.chunks, dtype=template.dtype, meta=meta, **parameters
    )


def count_wrong(
    y: DaskArray, shape: Sequence[int], axes: Sequence[int], kind: Kind = "numpy", dtype: Any = None
) -> Any:
    """Return the lazy number of elements of `y` that differ from a transposed `indexed_array`.

    `shape` and `dtype` are those of the `indexed_array`; by default it has the dtype of `y`. Axis
    ``i`` of `y` should be its axis ``axes[i]``. All elements of a block count as wrong if the block
    has another dtype or shape than declared.
    """
    declared = np.dtype(y.dtype if dtype is None else dtype)
    ones, meta = tuple((1,) * count for count in y.numblocks), np.empty((0,) * y.ndim, np.int64)
    parameters = {"shape": tuple(shape), "axes": tuple(axes), "kind": kind, "declared": declared}
    return y.map_blocks(_wrong_in_block, dtype=np.int64, chunks=ones, meta=meta, **parameters).sum()


def _indexed_block(shape: Any, kind: Kind, out_dtype: Any, block_info: Any = None) -> Any:
    location = block_info[None]["array-location"]
    block = backend_named(kind).module.empty([stop - start for start, stop in location], out_dtype)
    for rows, values in _bands(location, shape, range(len(shape)), kind, out_dtype):
        block[rows] = values
    return block


def _wrong_in_block(
    block: Array, shape: Any, axes: Any, kind: Kind, declared: Any, block_info: Any = None
) -> Any:
    location = block_info[0]["array-location"]
    wrong_count = prod(stop - start for start, stop in location)
    if block.dtype == declared and block.shape == tuple(stop - start for start, stop in location):
        bands = _bands(location, shape, axes, kind, declared)
        wrong_count = sum(int((block[rows] != values).sum()) for rows, values in bands)
    return np.full((1,) * len(axes), wrong_count, np.int64)


def _bands(
    location: Any, shape: Any, axes: Any, kind: Kind, dtype: DType, elements: int = 2**22
) -> Iterator[Any]:
    """Yield rows of a box of the transposed array with their values, in bands of limited size."""
    module = backend_named(kind).module
    first, last = location[0] if location else (0, 1)
    step = max(1, elements // max(1, prod(stop - start for start, stop in location[1:])))
    for top in range(first, last, step):
        total = module.zeros((1,) * len(axes), np.int64)  # linear indices before the transpose
        bounds = [(top, min(top + step, last)), *location[1:]]
        for position, (axis, (start, stop)) in enumerate(zip(axes, bounds, strict=False)):
            index = module.arange(start, stop, dtype=np.int64) * prod(shape[axis + 1 :])
            total = total + index.reshape([-1 if p == position else 1 for p in range(len(axes))])
        rows = slice(top - first, top - first + step) if location else ...
        total %= modulus(dtype)
        yield rows, total.astype(dtype, copy=False)
