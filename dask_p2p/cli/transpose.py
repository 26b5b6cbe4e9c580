"""``dask p2p transpose``: a file transposed into another, by a cluster."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dask_p2p.cli._options import (
    COUNT,
    SIZE_BYTES,
    connect,
    numbers,
    one_line_errors,
    own_cluster,
    reader,
)
from dask_p2p.cli._signals import ctrl_c_later, stoppable
from dask_p2p.cli._tables import shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dask_p2p.files import Summary

__all__ = ["transpose"]

_MOST_WORKERS = 8  # of one disk; --workers may ask for more


@click.command()
@click.argument("input", type=click.Path())
@click.argument("output", type=click.Path())
@click.option(
    "--axes",
    type=reader(numbers, "whole numbers with commas between"),
    metavar="2,0,1",
    help="Input axis that each output axis comes from.  [default: reversed]",
)
@click.option(
    "--chunks",
    type=reader(partial(numbers, words=("auto",)), "whole numbers or auto with commas between"),
    metavar="100,-1",
    help="Chunks of a Zarr output: one size, one for each axis (-1: all of it), or auto; an .npy "
    "file has none.  [default: those of a Zarr input, transposed, or auto]",
)
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Cluster to use, whose workers see both files.  [default: one on this machine]",
)
@click.option(
    "--workers",
    type=COUNT,
    metavar="N",
    help="Workers to start on this machine.  [default: one for each core, at most 8]",
)
@click.option(
    "--memory",
    type=SIZE_BYTES,
    metavar="SIZE",
    help="Most memory for data at a time, all workers together.  [default: 40 % of what "
    "they may use]",
)
@click.option("--force", is_flag=True, help="Replace OUTPUT if it is there.")
@click.option("--quiet", is_flag=True, help="No progress bar, no summary.")
def transpose(
    input: str,  # noqa: A002 - click shows the parameter's name to the user
    output: str,
    axes: tuple[int, ...] | None,
    chunks: tuple[int | str, ...] | None,
    scheduler: str | None,
    workers: int | None,
    memory: int | None,
    force: bool,
    quiet: bool,
) -> None:
    """Transpose the array in INPUT into the new file OUTPUT.

    INPUT is an .npy file or the folder of a Zarr array, and may be larger than memory. OUTPUT
    ends in .npy or .zarr; it gets its name when all of it is written, and not before. From Zarr to
    Zarr the codecs and attributes stay; an array that xarray wrote brings its coordinates along.
    """
    began_s = time.perf_counter()
    if scheduler and workers:
        raise click.UsageError("--workers is for a cluster on this machine, not for --scheduler")
    with one_line_errors(), stoppable() as stopped:
        from dask_p2p.files import prepare, transpose_file

        def planned(passes: int) -> None:
            say(f"Reading and writing in {passes} {'pass' if passes == 1 else 'passes'} ...")

        wanted = chunks[0] if chunks and len(chunks) == 1 else chunks
        job = prepare(input, output, axes, chunks=wanted, force=force)
        say = (lambda text: None) if quiet else click.echo
        if chunks and job.chunks is None:
            say("An .npy file has no chunks: --chunks makes no difference.")
        with (
            _cluster(scheduler, workers) as client,
            _progress(job.size_bytes, quiet=quiet) as progress,
        ):
            summary = transpose_file(
                job,
                client,
                memory_bytes=memory,
                planned=planned,
                progress=progress,
                stopped=stopped,
            )
        if not quiet:
            _show(summary, time.perf_counter() - began_s)


@contextlib.contextmanager
def _cluster(scheduler: str | None, workers: int | None) -> Iterator[Any]:
    """Give a client of the cluster named, or of one on this machine that ends with the job."""
    from dask.system import CPU_COUNT
    from distributed.utils import silence_logging_cmgr

    with contextlib.ExitStack() as stack:
        # What goes wrong comes as the job's own error, in one line.
        stack.enter_context(silence_logging_cmgr(logging.CRITICAL))
        if scheduler is not None:
            yield stack.enter_context(connect(scheduler))
            return
        workers = workers or min(CPU_COUNT, _MOST_WORKERS)
        # The data come from a disk and go to one: no way by a GPU is shorter. Workers may use all
        # of this machine's memory, however few they are.
        cluster = own_cluster(workers, gpus=False, memory_limit=1 / workers)
        with ctrl_c_later():
            client = stack.enter_context(cluster)
        yield client


@contextlib.contextmanager
def _progress(size_bytes: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar of bytes written on a terminal, and nothing elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, disable=hidden) as bar:
        task = bar.add_task("transpose", total=size_bytes)
        yield lambda count: bar.advance(task, count)


def _show(summary: Summary, command_s: float) -> None:
    from dask.utils import format_bytes, format_time
    from rich.console import Console
    from rich.table import Table

    job = summary.job
    table = Table("", "input", "output")
    for column in table.columns:
        column.overflow = "fold"  # a path is worth nothing when cut off
    table.add_row("file", job.source_name, job.target_name)
    table.add_row("shape", shape_text(job.in_shape), shape_text(job.shape))
    table.add_row("dtype", str(job.dtype), str(job.dtype), end_section=True)
    for name, value in (
        ("axes", ",".join(map(str, job.axes))),
        ("size", format_bytes(job.size_bytes)),
        ("passes", f"{summary.passes}, each below {format_bytes(summary.memory_bytes)}"),
        ("workers", str(summary.workers)),
        ("time", f"{format_time(summary.time_s)}, of {format_time(command_s)} in all"),
        ("speed", f"{summary.rate / 1e9:.3g} GB/s"),
    ):
        table.add_row(name, "", value)
    Console(file=sys.stdout).print(table)
