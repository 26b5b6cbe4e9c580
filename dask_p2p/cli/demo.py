"""``dask p2p demo``: a cluster, a matrix, its transpose, checked element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from math import isqrt, prod
from typing import TYPE_CHECKING, Any

import click

from dask_p2p.cli._measuring import measure_on, rival_ways
from dask_p2p.cli._options import (
    DTYPE,
    Site,
    check_fits,
    choose_site,
    cpu_option,
    one_line_errors,
    workers_option,
)

if TYPE_CHECKING:
    from rich.console import Console

    from dask_p2p.measure import Runs

__all__ = ["demo"]

_REPEATS = 3
_AXES = (1, 0)
# Large enough that moving takes longer than scheduling, small enough for a laptop.
_CPU_SIZE, _CPU_DTYPE = 6000, "float64"
_GPU_SIZE, _GPU_DTYPE = 32768, "float32"
_MEMORY_SHARE = 8  # the default matrix takes at most this part of the free memory


@click.command()
@click.option(
    "--size",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Rows and columns of the matrix.  [default: {_CPU_SIZE}, on GPUs {_GPU_SIZE}, or what "
    "fits]",
)
@click.option(
    "--dtype",
    type=DTYPE,
    metavar="NAME",
    help=f"Of its elements.  [default: {_CPU_DTYPE}, on GPUs {_GPU_DTYPE}]",
)
@workers_option
@cpu_option
def demo(size: int | None, dtype: Any, workers: int | None, cpu: bool) -> None:
    """Start a cluster, transpose a matrix that it makes, and check every element.

    Dask's own way is measured beside it. On GPUs where there is more than one, else on CPU
    workers.
    """
    import numpy as np

    from dask_p2p.cli._tables import judge, output

    console = output()
    with one_line_errors():
        site = choose_site(workers, cpu)
        dtype = dtype or np.dtype(_GPU_DTYPE if site.gpus else _CPU_DTYPE)
        size = size or _default_size(site, dtype.itemsize)
        shape = (size, size)
        check_fits(site, shape, dtype, _AXES, "--size")
        if site.note:
            console.print(site.note)
        judge(console, _run(console, site, shape, dtype), prod(shape))


def _default_size(site: Site, itemsize: int) -> int:
    """Rows of the default matrix: fewer if memory is scarce."""
    wanted = _GPU_SIZE if site.gpus else _CPU_SIZE
    fits = isqrt(site.memory_bytes // _MEMORY_SHARE // itemsize)
    return max(site.workers, min(wanted, fits))


def _run(console: Console, site: Site, shape: tuple[int, ...], dtype: Any) -> Sequence[Runs]:
    """Do it and show it."""
    from dask_p2p.cli._tables import progress, ways_table
    from dask_p2p.cluster import device_names
    from dask_p2p.indexed import count_wrong, indexed_array
    from dask_p2p.layout import split_evenly
    from dask_p2p.measure import p2p_transpose_in

    ours = {"dask_p2p": p2p_transpose_in("async")}
    # On GPUs Dask's p2p rechunk fails: it cannot put CuPy blocks through host memory.
    methods = ["tasks"] if site.gpus else ["tasks", "p2p"]
    rivals = rival_ways(site, methods)
    chunks = (split_evenly(shape[0], site.workers), shape[1:])
    # Nothing is printed while there is a bar, which would stand in the middle of it.
    console.print("Starting a cluster ...")

    def started(client: Any) -> Callable[[], None]:
        names = device_names(client, site.kind)
        _introduce(console, site, names, client.dashboard_link, shape, dtype)
        return bar.enter_context(progress((1 + len(rivals)) * (_REPEATS + 1), "transposing"))

    with ExitStack() as bar:
        measured = measure_on(
            site,
            ours,
            rivals,
            lambda: indexed_array(shape, chunks, dtype, site.kind),
            _AXES,
            _REPEATS,
            lambda y: int(count_wrong(y, shape, _AXES, site.kind, dtype).compute()),
            started,
        )
    console.print()
    console.print(ways_table(measured, prod(shape) * dtype.itemsize, _REPEATS))
    return measured


def _introduce(
    console: Console,
    site: Site,
    names: Sequence[str],
    dashboard: str | None,
    shape: tuple[int, ...],
    dtype: Any,
) -> None:
    """Say in words what is there, and what is about to happen."""
    from dask.utils import format_bytes

    from dask_p2p.cli._tables import counted, devices_text, shape_text, shapes_text
    from dask_p2p.cli.plan import slab_plan

    made = slab_plan(shape, _AXES, site.workers)
    tiles = product(made.src_chunks[0], made.dst_chunks[0])
    slabs = shapes_text([rows, shape[1]] for rows in made.src_chunks[0])
    size_text = format_bytes(prod(shape) * dtype.itemsize)
    console.print(f"Started {devices_text(site, names)}.")
    console.print(f"Dashboard: {dashboard or 'none'}, while this runs.")
    console.print(
        f"The matrix, {shape_text(shape)} {dtype} ({size_text}), is made of values that say where "
        f"they belong. It lies on the workers in slabs: {slabs}; so will its transpose."
    )
    console.print(
        f"Each slab is cut into {counted(site.workers, 'tile')}: {shapes_text(tiles)}. In stage 0 "
        "each worker transposes the tile that it has and needs itself"
        + (
            f"; in each of the {counted(site.workers - 1, 'stage')} after that it takes one tile "
            "from one other worker, each from another."
            if site.workers > 1
            else ", and that is all."
        )
    )
