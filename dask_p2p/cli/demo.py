"""``dask p2p demo``: `bench` with one matrix, beside Dask's own ways, and an explanation."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import click

from dask_p2p.cli import _measuring as measuring
from dask_p2p.cli._options import (
    COUNT,
    DTYPE,
    ClusterSpec,
    choose_cluster,
    cpu_option,
    one_line_errors,
    workers_option,
)

if TYPE_CHECKING:
    from rich.console import Console

    from dask_p2p.cli._measuring import Measured
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

    from dask_p2p.cli._tables import moved_lines, output, report_correctness, ways_table

    console = output()
    with one_line_errors():
        spec = choose_cluster(workers, cpu)
        dtype = dtype or np.dtype("float32" if spec.gpus else "float64")
        side = size or measuring.default_side(spec, dtype.itemsize)
        case = measuring.slabs(spec, (side, side), dtype, (1, 0), "--size")
        if spec.note:
            console.print(spec.note)
        console.print("Starting a cluster ...")
        measured: Measured = {case: []}
        measuring.measure_on(
            spec,
            measuring.ways_on(spec, rivals=True),
            measured,
            _REPEATS,
            lambda client: _introduce(console, spec, case, client),
        )
        for part in ("", ways_table(measured[case], console.width), *moved_lines(measured[case])):
            console.print(part)
        report_correctness(console, measured)


def _introduce(console: Console, spec: ClusterSpec, case: Case, client: Any) -> None:
    """Say in words what is there, and what is about to happen."""
    from dask_p2p.cli._tables import array_text, devices_text, pluralize, shapes_text
    from dask_p2p.cluster import device_names

    tiles = shapes_text(product(case.chunks[0], case.chunks[0]))
    console.print(f"Started {devices_text(spec, device_names(client, spec.kind))}.")
    console.print(f"Dashboard: {client.dashboard_link or 'none'}, while this runs.")
    console.print(
        f"The matrix, {array_text(case.shape, case.dtype)}, is made of values that say where they "
        f"belong. It lies on the workers in slabs: {shapes_text(product(*case.chunks))}; so will "
        "its transpose."
    )
    console.print(
        f"Each slab is cut into {pluralize(spec.workers, 'tile')}: {tiles}. In stage 0 each worker "
        "transposes the tile that it has and needs itself"
        + (
            f"; in each of the {pluralize(spec.workers - 1, 'stage')} after that it takes one tile "
            "from one other worker, each from another."
            if spec.workers > 1
            else ", and that is all."
        )
    )
