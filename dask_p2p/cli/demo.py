"""``dask p2p demo``: `bench` with one matrix, beside Dask's own ways, and an explanation."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import click

from dask_p2p.cli._options import (
    COUNT,
    DTYPE,
    choose_cluster,
    cpu_option,
    one_line_errors,
    workers_option,
)
from dask_p2p.cli._tables import (
    array_text,
    devices_text,
    output,
    pluralize,
    report_correctness,
    shapes_text,
    show_ways,
)

if TYPE_CHECKING:
    from rich.console import Console

    from dask_p2p.cli._measuring import Report
    from dask_p2p.measure import Case

__all__ = ["demo"]

_REPEATS = 3


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

    Dask's own ways are measured beside it. On GPUs where there is more than one, else on CPU
    workers.
    """
    import numpy as np

    from dask_p2p.cli import _measuring as measuring

    console = output()
    with one_line_errors():
        spec = choose_cluster(workers, cpu)
        dtype = dtype or np.dtype("float32" if spec.gpus else "float64")
        side = size or measuring.default_side(spec, dtype.itemsize)
        case = measuring.slabs(spec, (side, side), dtype, (1, 0), "--size")
        if spec.note:
            console.print(spec.note)
        console.print("Starting a cluster ...")
        report = measuring.Report(spec, _REPEATS)
        ways = measuring.ways_on(spec, rivals=True)
        report.measure({case: ways}, partial(_introduce, console, report, case))
        console.print()
        show_ways(console, report.measured[case])
        report_correctness(console, report.measured)


def _introduce(console: Console, report: Report, case: Case, client: Any) -> None:
    """Say in words what is there, and what is about to happen."""
    workers = report.spec.workers
    tiles = shapes_text(product(case.chunks[0], case.chunks[0]))
    console.print(f"Started {devices_text(report.spec, report.devices)}.")
    console.print(f"Dashboard: {client.dashboard_link or 'none'}, while this runs.")
    console.print(
        f"The matrix, {array_text(case.shape, case.dtype)}, is made of values that say where they "
        f"belong. It lies on the workers in slabs: {shapes_text(product(*case.chunks))}; so will "
        "its transpose."
    )
    console.print(
        f"Each slab is cut into {pluralize(workers, 'tile')}: {tiles}. In stage 0 each worker "
        "transposes the tile that it has and needs itself"
        + (
            f"; in each of the {pluralize(workers - 1, 'stage')} after that it takes one tile "
            "from one other worker, each from another."
            if workers > 1
            else ", and that is all."
        )
    )
