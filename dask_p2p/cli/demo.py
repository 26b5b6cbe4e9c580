"""``dask p2p demo``: transposes a matrix by this package and by Dask's methods, and checks it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import click
import dask
import numpy as np
from dask.utils import format_bytes
from distributed import wait

from dask_p2p.cli import _options as shared
from dask_p2p.errors import install_command
from dask_p2p.geometry import split_evenly
from dask_p2p.monitoring.runs import last_runs
from dask_p2p.monitoring.tables import cells, text_table
from dask_p2p.ops.transpose import transpose
from dask_p2p.plans import slab_chunks
from dask_p2p.plugins.registration import workers_of
from dask_p2p.tools.cluster import device_names
from dask_p2p.tools.indexed import count_wrong, indexed_array
from dask_p2p.types import DaskArray

_OURS = "dask_p2p"
_RUNS = 4  # runs of each method, including the first
_SETTLE_S = 0.2
_LEGEND = (
    "first: the first run, on a new cluster; median: of later runs; GB/s: read and written; wrong: "
    "wrong elements; times as long: the median divided by that of dask_p2p."
)
_NEXT = (
    "Next: https://github.com/dask-p2p/dask-p2p/blob/main/docs/tutorial.md, and `dask p2p check` "
    "on your cluster."
)


@click.command()
@click.option(
    "--size",
    type=shared.COUNT,
    metavar="N",
    help="Rows and columns of the matrix.  [default: 6000, on GPUs 32768, or fewer to fit memory]",
)
@shared.workers_option
@shared.cpu_option
def demo(size: int | None, workers: int | None, cpu: bool) -> None:
    """Start a cluster, transpose a generated matrix, and check every element.

    Dask's own methods are timed too. The cluster uses GPUs if there is more than one, else CPUs.
    """
    with shared.one_line_errors():
        spec = shared.choose_cluster(workers, cpu)
        dtype = np.dtype("float32" if spec.gpus else "float64")
        side = size or shared.default_side(spec, dtype.itemsize)
        shared.check_fits(spec, (side, side), dtype, (1, 0), "--size")
        if spec.note:
            click.echo(spec.note)
        click.echo("Starting a cluster ...")
        tried: dict[str, tuple[list[float], int]] = {}  # by method: seconds a run, wrong elements
        for options, named in methods(bool(spec.gpus)):
            own = shared.own_cluster(spec.workers, gpus=bool(spec.gpus), **options)
            with own as client, client.as_current():
                if not tried:
                    _introduce(client, spec, side, dtype)
                for name, method in named.items():
                    try:
                        tried[name] = _tried(client, method, spec, side, dtype)
                    except Exception as exc:
                        if name == _OURS:
                            raise
                        reason = str(exc).partition("\n")[0]
                        click.echo(f"{name} failed: {type(exc).__name__}: {reason}")
                    if name == _OURS:
                        _print_moved(client)
        _show(tried, side, dtype)


def methods(on_gpus: bool) -> list[tuple[dict[str, str], dict[str, Callable[[DaskArray], Any]]]]:
    """Return the options of each cluster, with the transpose methods to run on it, by name."""
    ours: dict[str, Callable[[DaskArray], Any]] = {_OURS: lambda x: transpose(x)}
    tasks: dict[str, Callable[[DaskArray], Any]] = {"dask tasks": partial(_rechunked, "tasks")}
    if not on_gpus:
        # A cluster for each: the first of several on one cluster would start its threads.
        return [({}, ours), ({}, tasks), ({}, {"dask p2p": partial(_rechunked, "p2p")})]
    # Dask's p2p fails with CuPy blocks. Its tasks are fastest over UCX.
    if find_spec("distributed_ucxx") is None:
        return [({}, ours), ({}, tasks)]
    return [({}, ours), ({"protocol": "ucx"}, tasks)]


def _rechunked(method: str, x: DaskArray) -> DaskArray:
    return x.T.rechunk(slab_chunks(x.chunks, (1, 0)), method=method)


def _introduce(client: Any, spec: shared.ClusterSpec, side: int, dtype: Any) -> None:
    """Print the workers, the matrix and the algorithm."""
    click.echo(f"Started {shared.devices_text(spec, device_names(client, spec.kind))}.")
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


def _tried(
    client: Any, method: Callable[[DaskArray], Any], spec: shared.ClusterSpec, side: int, dtype: Any
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
    wrong = count_wrong(y, shape, (1, 0), kind, dtype)
    return times_s, int(wrong.compute())  # raises the error of a failed task


def _print_moved(client: Any) -> None:
    run = cells(last_runs(client, 1)[0])
    click.echo(
        f"Moved {run['moved']}, least possible {run['least']}; pairs of workers by transport: "
        f"{run['transports']}."
    )


def _show(tried: Mapping[str, tuple[list[float], int]], side: int, dtype: Any) -> None:
    """Print the times; raise `click.ClickException` if elements are wrong."""
    rows = [("times in ms", "first", "median", "GB/s", "wrong", "times as long")]
    ours_s = median(tried[_OURS][0][1:])
    moved_gb = 2 * side**2 * dtype.itemsize / 1e9  # each element is read once and written once
    for method, (times_s, wrong) in tried.items():
        median_s = median(times_s[1:])
        figures = f"{times_s[0] * 1e3:.2f}", f"{median_s * 1e3:.2f}", f"{moved_gb / median_s:.3g}"
        rows.append((method, *figures, str(wrong), f"{median_s / ours_s:.2f}"))
    click.echo(f"\n{text_table(rows)}\n")
    click.echo(_LEGEND)
    wrongs = [f"{wrong} of {side**2} of {method}" for method, (_, wrong) in tried.items() if wrong]
    if wrongs:
        raise click.ClickException(f"some elements are wrong: {', '.join(wrongs)}")
    click.echo(f"All {side**2} elements are where they belong.")
    click.echo(_NEXT)
