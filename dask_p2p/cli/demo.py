"""``dask p2p demo``: a matrix transposed by this package and by Dask's own ways, and checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import click
import dask
import numpy as np
from distributed import wait

from dask_p2p.cli._options import (
    COUNT,
    DTYPE,
    ClusterSpec,
    check_fits,
    choose_cluster,
    cpu_option,
    default_side,
    one_line_errors,
    own_cluster,
    workers_option,
)
from dask_p2p.cli._tables import array_text, devices_text, pluralize, shapes_text
from dask_p2p.geometry import Chunks, split_evenly
from dask_p2p.monitoring.runs import last_runs
from dask_p2p.monitoring.tables import cells, text_table
from dask_p2p.ops.transpose import transpose
from dask_p2p.plans import slab_chunks
from dask_p2p.plugins.registration import workers_of
from dask_p2p.tools.cluster import device_names
from dask_p2p.tools.indexed import count_wrong, indexed_array
from dask_p2p.types import DaskArray, DType

_OURS = "dask_p2p"
_RUNS = 4  # of each way, the first one included
_SETTLE_S = 0.2
_LEGEND = (
    "first: the first run; median: of those after it; GB/s: read and written; wrong: elements; "
    "faster by: the median over that of dask_p2p."
)
_NEXT = (
    "Next: https://github.com/dask-p2p/dask-p2p/blob/main/docs/tutorial.md, and `dask p2p check` "
    "on a cluster of yours."
)

#: Takes the matrix, returns its lazy transpose.
Transpose = Callable[[DaskArray], DaskArray]


class Matrix(NamedTuple):
    """A square matrix whose elements say where they belong, in one slab a worker."""

    side: int
    chunks: Chunks
    dtype: DType
    spec: ClusterSpec  # of its cluster

    @property
    def text(self) -> str:
        """Its shape, dtype and size."""
        return array_text((self.side, self.side), self.dtype)

    def make(self, client: Any) -> DaskArray:
        """Make it on the workers of a cluster."""
        workers = sorted(workers_of(client))
        with dask.annotate(workers=lambda key: workers[key[1]], allow_other_workers=True):
            shape = self.side, self.side
            x = indexed_array(shape, self.chunks, self.dtype, self.spec.kind)
        x = client.persist(x, optimize_graph=False)  # optimizing forgets where blocks should be
        wait(x)
        return x

    def wrong(self, y: DaskArray) -> int:
        """Count the elements of its transpose that are not where they belong."""
        shape = self.side, self.side
        return int(count_wrong(y, shape, (1, 0), self.spec.kind, self.dtype).compute())


class Tried(NamedTuple):
    """What a way to transpose took."""

    way: str
    times_s: list[float]
    wrong: int  # elements, of the last run


@click.command()
@click.option(
    "--size",
    type=COUNT,
    metavar="N",
    help="Rows and columns of the matrix.  [default: 6000, on GPUs 32768, or what fits]",
)
@click.option(
    "--dtype",
    type=DTYPE,
    metavar="NAME",
    help="Of its elements.  [default: float64, on GPUs float32]",
)
@workers_option
@cpu_option
def demo(size: int | None, dtype: Any, workers: int | None, cpu: bool) -> None:
    """Start a cluster, transpose a matrix that it makes, and check every element.

    Dask's own ways are timed too. On GPUs where there is more than one, else on CPU workers.
    """
    with one_line_errors():
        spec = choose_cluster(workers, cpu)
        dtype = dtype or np.dtype("float32" if spec.gpus else "float64")
        side = size or default_side(spec, dtype.itemsize)
        check_fits(spec, (side, side), dtype, (1, 0), "--size")
        matrix = Matrix(side, (split_evenly(side, spec.workers), (side,)), dtype, spec)
        if spec.note:
            click.echo(spec.note)
        click.echo("Starting a cluster ...")
        tried: list[Tried] = []
        for options, named in ways(bool(spec.gpus)):
            own = own_cluster(spec.workers, gpus=bool(spec.gpus), **options)
            with own as client, client.as_current():
                if not tried:
                    _introduce(matrix, client)
                for way in named.items():
                    tried += _tried(client, matrix, *way)
        _show(matrix, tried)


def ways(on_gpus: bool) -> list[tuple[dict[str, str], dict[str, Transpose]]]:
    """Return options of clusters, and of each the ways to transpose on it, by name."""
    ours = {_OURS: lambda x: transpose(x)}
    tasks = {"dask tasks": partial(_rechunked, "tasks")}
    if not on_gpus:
        return [({}, {**ours, **tasks, "dask p2p": partial(_rechunked, "p2p")})]
    # Dask's p2p cannot put CuPy blocks through host memory. Its tasks are quickest over UCX.
    if find_spec("distributed_ucxx") is None:
        return [({}, {**ours, **tasks})]
    return [({}, {**ours}), ({"protocol": "ucx"}, {**tasks})]


def _rechunked(method: str, x: DaskArray) -> DaskArray:
    return x.T.rechunk(slab_chunks(x.chunks, (1, 0)), method=method)


def _tried(client: Any, matrix: Matrix, name: str, way: Transpose) -> Sequence[Tried]:
    """Time a way, and check its last result. None where one of Dask's own ways fails."""
    try:
        x, y, times_s = matrix.make(client), None, []
        for _ in range(_RUNS):
            del y  # the next run must neither find this result nor share memory with it
            time.sleep(_SETTLE_S)
            start_s = time.perf_counter()
            y = client.persist(way(x))
            wait(y)
            times_s.append(time.perf_counter() - start_s)
        tried = Tried(name, times_s, matrix.wrong(y))  # raises what a task has raised
    except Exception as exc:
        if name == _OURS:
            raise
        reason = str(exc).partition("\n")[0]
        click.echo(f"{name} failed: {type(exc).__name__}: {reason}")
        return []
    if name == _OURS:
        run = cells(last_runs(client, 1)[0])
        click.echo(
            f"Moved {run['moved']}, least possible {run['least']}; pairs of workers by "
            f"transport: {run['transports']}."
        )
    return [tried]


def _introduce(matrix: Matrix, client: Any) -> None:
    """Say in words what is there, and what is about to happen."""
    spec, (slabs, _) = matrix.spec, matrix.chunks
    tiles = shapes_text(product(slabs, slabs))
    click.echo(f"Started {devices_text(spec, device_names(client, spec.kind))}.")
    click.echo(f"Dashboard: {client.dashboard_link or 'none'}, while this runs.")
    click.echo(
        f"The matrix, {matrix.text}, is made of values that say where they belong. It lies on the "
        f"workers in slabs: {shapes_text(product(*matrix.chunks))}; so will its transpose."
    )
    click.echo(
        f"Each slab is cut into {pluralize(spec.workers, 'tile')}: {tiles}. In stage 0 each worker "
        "transposes the tile that it has and needs itself"
        + (
            f"; in each of the {pluralize(spec.workers - 1, 'stage')} after that it takes one tile "
            "from one other worker, each from another."
            if spec.workers > 1
            else ", and that is all."
        )
    )


def _show(matrix: Matrix, tried: Sequence[Tried]) -> None:
    """Print the times, and whether all elements are right; wrong ones are an error."""
    rows = [("times in ms", "first", "median", "GB/s", "wrong", "faster by")]
    ours_s = median(tried[0].times_s[1:])
    moved_gb = 2 * matrix.side**2 * matrix.dtype.itemsize / 1e9  # read once, and written once
    for way, times_s, wrong in tried:
        median_s = median(times_s[1:])
        figures = f"{times_s[0] * 1e3:.2f}", f"{median_s * 1e3:.2f}", f"{moved_gb / median_s:.3g}"
        rows.append((way, *figures, str(wrong), f"{median_s / ours_s:.2f}"))
    click.echo(f"\n{text_table(rows)}\n")
    click.echo(_LEGEND)
    count = matrix.side**2
    wrongs = [f"{wrong} of {count} of {way}" for way, _, wrong in tried if wrong]
    if wrongs:
        raise click.ClickException(f"some elements are wrong: {', '.join(wrongs)}")
    click.echo(f"All {count} elements are where they belong.")
    click.echo(_NEXT)
