"""``dask p2p transpose`` and ``dask p2p rechunk``: from file to file, on a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import dask.array as da
import numpy as np
from dask.array.core import normalize_chunks
from dask.system import CPU_COUNT
from dask.utils import format_bytes, format_time
from numpy.lib.format import open_memmap

import dask_p2p
from dask_p2p import cli
from dask_p2p.errors import FileError, InputError, MissingPackageError, P2PError, needs
from dask_p2p.plugins.registration import workers_of
from dask_p2p.sections.iterate.output.groups import CONFIG, zarr_format
from dask_p2p.types import Array, DaskArray


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
    cli.scheduler_option,
    click.option("--workers", type=cli.COUNT, metavar="N", help="Number of workers to start."),
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
    with cli.one_line_errors(), stoppable() as stopped:
        x = open_array(input)
        if chunks and len(chunks) > x.ndim:  # which `rechunk` ignores, as Dask does
            expected = f"expected --chunks with one size, or one for each of {x.ndim} axes"
            raise InputError(f"{expected}, got {len(chunks)} sizes. Leave out the last ones.")
        with (
            write_atomically(output, overwrite=overwrite) as path,
            _cluster(scheduler, workers) as c,
        ):
            began_s = time.perf_counter()
            y = operation(x, chunks=chunks[0] if chunks and len(chunks) == 1 else chunks or {})
            blocks = write_blocks(y, path, c, stopped)
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
            f"in {format_time(time_s)}, {size_bytes / time_s / 1e9:.3g} GB/s"
        )


@contextlib.contextmanager
def _cluster(scheduler: str | None, workers: int | None) -> Iterator[Any]:
    """Return a context with a client of the scheduler, or of a cluster that ends with it."""
    from distributed.utils import silence_logging_cmgr

    workers = workers or min(CPU_COUNT, 8)  # one disk serves few workers; --workers sets more
    # Errors come as the command's own error, in one line.
    with silence_logging_cmgr(logging.CRITICAL), contextlib.ExitStack() as stack:
        with ctrl_c_later():  # together the workers may use all of the memory
            cluster = cli.own_cluster(workers, gpus=False, memory_limit=1 / workers)
            client = stack.enter_context(cli.connect(scheduler) if scheduler else cluster)
        cli.wait_for_worker(client)
        with client.as_current():
            yield client


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Return a context in which Ctrl-C, SIGTERM and SIGHUP set a flag: the command can clean up.

    The context's value returns the flag. Batch systems send SIGTERM, terminals that close SIGHUP.
    Python itself raises an exception at the current instruction: garbage collection may swallow it,
    and a lock may stay locked. Only the second Ctrl-C raises an exception. `nohup` starts programs
    with SIGHUP ignored; it stays ignored.
    """
    stop_request = threading.Event()

    def ask(number: int, _: object) -> None:
        # A terminal that closes sends SIGHUP, and so does its shell: the second is no impatience.
        if stop_request.is_set() and number != signal.SIGHUP:
            raise KeyboardInterrupt
        stop_request.set()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield stop_request.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
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


BLOCK_BYTES = 16 << 20  # of an .npy file: small enough for many workers

_POLL_S = 0.02


@contextlib.contextmanager
def _errors(doing: str) -> Iterator[None]:
    """Return a context that turns any error into a one-line `FileError`: cannot ``doing``: ..."""
    try:
        yield
    except MissingPackageError as exc:
        raise FileError(f"cannot {doing}: {exc}") from None
    except P2PError:
        raise
    except Exception as exc:
        text = " ".join(str(exc).split()) or type(exc).__name__
        raise FileError(f"cannot {doing}: {text}") from exc


@dataclass(frozen=True)
class _NpyFile:
    """An ``.npy`` file; tasks hold this object in place of the data."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, slices: tuple[slice, ...]) -> Array:
        return np.array(open_memmap(self.path, "r")[slices])

    def __setitem__(self, slices: tuple[slice, ...], block: Array) -> None:
        mapped = open_memmap(self.path, "r+")
        mapped[slices] = block
        mapped.flush()  # raises if the disk fails


def open_array(name: str) -> DaskArray:
    """Return the lazy array in an ``.npy`` file or the folder of a Zarr array.

    Blocks are the shards or chunks of a Zarr array, or about 16 MiB of an ``.npy`` file. Raises
    `FileError` for anything else.
    """
    with _errors(f"read {name}"):
        path = Path(name).resolve(strict=True)
        if path.is_dir():
            array = _open_zarr(name, path)
            chunks: Any = array.shards or array.chunks
        elif path.suffix == ".npy":
            mapped = open_memmap(path, "r")
            array = _NpyFile(str(path), mapped.shape, mapped.dtype)
            chunks = normalize_chunks("auto", array.shape, BLOCK_BYTES, array.dtype)
        else:
            raise FileError(f"{name} has an unknown file type: pass an .npy file or a Zarr array")
        meta = np.empty((0,) * len(array.shape), array.dtype)
        # A unique name, since the file may have other values in a later run.
        return da.from_array(array, chunks, name=False, inline_array=True, meta=meta)


def _open_zarr(name: str, path: Path) -> Any:
    with needs("zarr", "zarr"):
        import zarr

    array = zarr.open(path, mode="r")
    if isinstance(array, zarr.Group):
        items = array.members(max_depth=None)
        names = sorted(f"{name}/{key}" for key, item in items if isinstance(item, zarr.Array))
        raise FileError(f"{name} is a Zarr group; pass one of its arrays: {', '.join(names)}")
    if array.dtype.hasobject:
        raise FileError(
            f"{name} holds Python objects or variable-length strings; pass an array of numbers"
        )
    return array


@contextlib.contextmanager
def write_atomically(name: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Return a context with a temporary path, which is renamed to `name` at the end.

    After an exception the temporary path is removed.
    """
    final = Path(os.path.realpath(name))
    if final.suffix != ".npy" and all(Path(part).suffix != ".zarr" for part in final.parts):
        raise FileError(f"{name} has an unknown file type: end the name in .npy or .zarr")
    _check_free(name, final, overwrite)
    with (
        _errors(f"write {name}"),
        TemporaryDirectory(prefix=".dask-p2p-", suffix=".partial", dir=final.parent) as folder,
    ):
        path = Path(folder, final.name)
        yield path
        for part in filter(Path.is_file, (path, *path.rglob("*"))):
            with open(part, "rb") as file:  # data must reach the disk before the name
                os.fsync(file.fileno())
        _check_free(name, final, overwrite)
        if final.is_dir():
            final.rename(Path(folder, "replaced"))
        path.replace(final)


def _check_free(name: str, final: Path, overwrite: bool) -> None:
    if final.exists() and not overwrite:
        raise FileError(f"{name} is already there; --overwrite replaces it")
    if final.is_dir():
        open_array(name)  # raises for folders that are not arrays: these are never replaced


def write_blocks(
    x: DaskArray, path: Path, client: Any, stopped: Callable[[], bool]
) -> Iterator[None]:
    """Write an array, and yield after each block; blocks are equal except the last of an axis.

    Raises `KeyboardInterrupt` as soon as ``stopped()`` is true. After an exception no worker
    writes any more.
    """
    from distributed import futures_of

    if path.suffix == ".npy" and len({w["host"] for w in workers_of(client).values()}) > 1:
        raise FileError(f"hosts would undo each other's writes to {path.name}; write a Zarr array")
    stored = x.map_blocks(  # `dask.array.store` does not take arrays that are expressions
        _store,
        target=_create(path, x),
        chunks=tuple((1,) * len(sizes) for sizes in x.chunks),
        meta=np.empty((0,) * x.ndim, bool),
    )
    futures = futures_of(client.persist(stored))
    try:
        for future in futures:
            while not future.done():
                if stopped():
                    raise KeyboardInterrupt
                time.sleep(_POLL_S)
            future.result()
            yield
    except BaseException:
        client.cancel(futures, force=True)
        with contextlib.suppress(Exception):  # the first error is the one to report
            client.run(_wait_for, futures[0].key[0])
        raise


def _create(path: Path, x: DaskArray) -> Any:
    if path.suffix == ".npy":
        open_memmap(path, "w+", x.dtype, x.shape)
        with open(path, "r+b") as file:  # a write to a map on a full disk kills the process
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return _NpyFile(str(path), x.shape, x.dtype)
    with needs("zarr", "zarr"):
        import zarr

    return zarr.create_array(
        path,
        shape=x.shape,
        dtype=x.dtype,
        chunks=tuple(max(1, sizes[0]) for sizes in x.chunks),
        zarr_format=zarr_format([x.dtype]),
        config=CONFIG,
    )


def _store(block: Array, target: Any, block_info: Any = None) -> Array:
    target[tuple(slice(*side) for side in block_info[0]["array-location"])] = block
    return np.ones((1,) * block.ndim, bool)


async def _wait_for(name: str, dask_worker: Any) -> None:
    for _ in range(1500):  # 30 s
        if any(task.key[0] == name for task in dask_worker.state.executing):
            await asyncio.sleep(_POLL_S)
