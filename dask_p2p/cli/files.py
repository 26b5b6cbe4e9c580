"""``dask p2p transpose`` and ``dask p2p rechunk``: from file to file, on a cluster."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from math import prod
from typing import Any

import click
from dask.system import CPU_COUNT
from dask.utils import format_bytes

import dask_p2p
from dask_p2p.cli import options as shared
from dask_p2p.monitoring.runs import format_duration
from dask_p2p.types import DaskArray


def _numbers(value: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, value.split(","))) if value.strip() else ()
    except ValueError:
        raise click.BadParameter(f"expected integers separated by commas, got {value!r}") from None


_OPTIONS = (
    click.argument("input", type=click.Path()),
    click.argument("output", type=click.Path()),
    click.option(
        "--chunks",
        type=_numbers,
        metavar="100,-1",
        help="Chunks of a Zarr output: one size, or one for each axis (-1: the whole axis).  "
        "[default: chunks of a Zarr input, or about 16 MiB]",
    ),
    shared.scheduler_option,
    click.option("--workers", type=shared.COUNT, metavar="N", help="Number of workers to start."),
    click.option("--overwrite", is_flag=True, help="Replace an existing OUTPUT."),
    click.option("--quiet", is_flag=True, help="Print no progress bar and no report."),
)


def _command(function: Any) -> click.Command:
    return click.command()(reduce(lambda f, option: option(f), reversed(_OPTIONS), function))


@_command
@click.option("--axes", type=_numbers, metavar="2,0,1", help="Axis order.  [default: reversed]")
def transpose(axes: tuple[int, ...] | None, **options: Any) -> None:
    """Transpose the array in INPUT into the new file OUTPUT.

    Each is an .npy file or a Zarr array, which may be in a group. OUTPUT appears under its name
    only when it is complete. The array must fit into the memory of the workers, or onto their disks
    for spilled data.
    """
    _run(partial(dask_p2p.transpose, axes=axes), **options)


@_command
def rechunk(**options: Any) -> None:
    """Write the array in INPUT into the new file OUTPUT, with other chunks or file type."""
    _run(dask_p2p.rechunk, **options)


def _run(
    operation: Callable[..., DaskArray],
    input: str,  # noqa: A002 - click shows the parameter's name to the user
    output: str,
    chunks: tuple[int, ...] | None,
    scheduler: str | None,
    workers: int | None,
    overwrite: bool,
    quiet: bool,
) -> None:
    if scheduler and workers:
        raise click.UsageError("--workers is for a cluster on this machine, not for --scheduler")
    if chunks and output.endswith(".npy"):
        raise click.UsageError("an .npy file has no chunks: leave out --chunks")
    with shared.one_line_errors(), stoppable() as stopped:
        from dask_p2p.tools import files

        x = files.opened(input)
        with files.output(output, overwrite=overwrite) as path, _cluster(scheduler, workers) as c:
            began_s = time.perf_counter()
            y = operation(x, chunks=chunks[0] if chunks and len(chunks) == 1 else chunks or {})
            blocks = files.written(y, path, c, stopped)
            is_shown = sys.stderr.isatty() and not quiet
            bar: Any = click.progressbar(blocks, prod(y.numblocks), file=sys.stderr)
            with bar if is_shown else contextlib.nullcontext(blocks) as steps:
                for _ in steps:
                    pass
            time_s = time.perf_counter() - began_s
    if not quiet:
        size_bytes = prod(y.shape) * y.dtype.itemsize
        click.echo(
            f"{output}: {' x '.join(map(str, y.shape))} of {y.dtype}, {format_bytes(size_bytes)} "
            f"in {format_duration(time_s)}, {size_bytes / time_s / 1e9:.3g} GB/s"
        )


@contextlib.contextmanager
def _cluster(scheduler: str | None, workers: int | None) -> Iterator[Any]:
    """Return a context with a client of the scheduler, or of a cluster that ends with it."""
    from distributed.utils import silence_logging_cmgr

    workers = workers or min(CPU_COUNT, 8)  # one disk serves few workers; --workers sets more
    # Errors come as the command's own error, in one line.
    with silence_logging_cmgr(logging.CRITICAL), contextlib.ExitStack() as stack:
        with ctrl_c_later():  # together the workers may use all of the memory
            own = shared.own_cluster(workers, gpus=False, memory_limit=1 / workers)
            client = stack.enter_context(shared.connect(scheduler) if scheduler else own)
        shared.worker_count(client)  # raises without workers
        with client.as_current():
            yield client


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Return a context in which Ctrl-C, SIGTERM and SIGHUP set a flag: the command can clean up.

    The context's value returns the flag. Batch systems send SIGTERM, terminals that close SIGHUP.
    Python itself raises an exception at the current instruction: garbage collection may swallow it,
    and a lock may stay locked. Only the second Ctrl-C raises an exception. `nohup` starts programs
    with SIGHUP ignored; it stays ignored.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set  # only the main thread may set signal handlers
        return

    def ask(number: int, _: object) -> None:
        # A terminal that closes sends SIGHUP, and so does its shell: the second is no impatience.
        if asked.is_set() and number != signal.SIGHUP:
            raise KeyboardInterrupt
        asked.set()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ctrl_c_later() -> Iterator[None]:
    """Return a context that defers Ctrl-C and SIGHUP; processes started inside never receive them.

    A terminal also sends them to the workers, which would print tracebacks. Workers end with the
    command anyway. Threads that start inside do not receive them either.
    """
    from multiprocessing import resource_tracker

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    resource_tracker.ensure_running()  # started later, it would unblock Ctrl-C
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
