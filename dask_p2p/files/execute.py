"""Runs a job on a cluster: band by band, each worker reads, exchanges and writes its slab.

The data never pass through the client. Its graph names files and boxes.
"""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.utils import format_bytes

from dask_p2p.errors import InputError, P2PError
from dask_p2p.files.output import partial
from dask_p2p.files.tiling import input_box, slabs, tile_count, tile_steps, tiles, whole
from dask_p2p.files.zarr_io import stop_writers
from dask_p2p.registration import workers_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dask_p2p.files.job import Job
    from dask_p2p.files.npy import NpyArray
    from dask_p2p.files.zarr_io import ZarrArray
    from dask_p2p.layout import Box

__all__ = [
    "Summary",
    "default_memory_bytes",
    "transpose_file",
    "usable_memory_bytes",
    "worker_count",
]

# The rest is for packed tiles on their way, mapped pages, codecs, and the interpreter.
_MEMORY_SHARE = 0.4
_MOST_PASSES = 1000  # each takes a tenth of a second at least, however small it is
_WORKERS_WAIT_S = 10
_POLL_S = 0.05


@dataclass(frozen=True)
class Summary:
    """What a job did.

    Parameters
    ----------
    job : Job
        The request.
    passes : int
        Number of parts that were moved one after the other.
    workers : int
        Number of Dask workers that shared each pass.
    memory_bytes : int
        Memory that a pass was meant to stay under.
    time_s : float
        From making the output to its final name.
    """

    job: Job
    passes: int
    workers: int
    memory_bytes: int
    time_s: float

    @property
    def rate(self) -> float:
        """Output in bytes per second."""
        return self.job.size_bytes / self.time_s


def transpose_file(
    job: Job,
    client: Any,
    *,
    memory_bytes: int | None = None,
    planned: Callable[[int], None] = lambda _: None,
    progress: Callable[[int], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Summary:
    """Run a job on a cluster, in passes that fit into memory.

    Parameters
    ----------
    job : Job
        What `prepare` gave.
    client : distributed.Client
        Synchronous client of a cluster whose workers see both files.
    memory_bytes : int, optional
        Most memory for the parts of input and output that are held at once, all workers together;
        default: 40 % of what the workers may use.
    planned : callable
        Called with the number of passes, before the first.
    progress : callable
        Called with the bytes of each slab that is written.
    stopped : callable
        Called repeatedly; returns whether to give up.

    Returns
    -------
    Summary

    Raises
    ------
    FileError
        If reading or writing fails. No output is left then, nor on any other exception.
    InputError
        If ``memory_bytes`` is more than the workers may use, or too little to be of use.
    KeyboardInterrupt
        If ``stopped`` says so.
    """
    began_s = time.perf_counter()
    workers = worker_count(client)
    if memory_bytes is None:
        memory_bytes = default_memory_bytes(client)
    else:
        _check_memory(job, memory_bytes, usable_memory_bytes(client))
    # What one worker must write whole is held whole, as input and as output.
    memory_bytes = max(memory_bytes, 2 * math.prod(job.unit) * job.dtype.itemsize)
    passes = _pass_count(job, memory_bytes)
    planned(passes)
    with client.as_current(), partial(job.target, job.target_name, force=job.force) as path:
        target = job.create(path)
        for band in tiles(whole(job.shape), _steps(job, memory_bytes)) if passes else ():
            _run_pass(client, _written(job, target, band, workers), path, progress, stopped)
    return Summary(job, passes, workers, memory_bytes, time.perf_counter() - began_s)


def worker_count(client: Any) -> int:
    """Return the number of workers; there must be at least one.

    Raises
    ------
    P2PError
        If none comes within some seconds.
    """
    try:
        client.wait_for_workers(1, timeout=_WORKERS_WAIT_S)
    except TimeoutError as exc:
        raise P2PError(
            f"the scheduler at {client.scheduler.address} has no workers; start some with "
            "`dask worker`"
        ) from exc
    return len(workers_of(client))


def default_memory_bytes(client: Any) -> int:
    """Return the memory that a job uses by default: a share of what the workers may use."""
    return max(1, int(_MEMORY_SHARE * usable_memory_bytes(client)))


def usable_memory_bytes(client: Any) -> int:
    """Sum of the workers' memory limits, or of what their hosts have free if that is less."""
    limits_bytes: dict[str, float] = {}
    worker_of: dict[str, str] = {}  # one worker of each host
    for address, worker in workers_of(client).items():
        host = worker_of.setdefault(worker["host"], address)
        limits_bytes[host] = limits_bytes.get(host, 0) + (worker["memory_limit"] or math.inf)
    free_bytes = client.run(_available_bytes, workers=list(limits_bytes))
    return int(sum(min(limit, free_bytes[host]) for host, limit in limits_bytes.items()))


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _check_memory(job: Job, memory_bytes: int, usable_bytes: int) -> None:
    """Refuse more memory than there is, and so little that the work would take forever."""
    text = f"{format_bytes(memory_bytes)} of memory"
    if memory_bytes > usable_bytes:
        raise InputError(
            f"{text} are more than the workers may use, {format_bytes(usable_bytes)} together; "
            "give less, or leave it out"
        )
    enough = range(1, 2 * job.size_bytes)
    few = bisect_left(enough, True, key=lambda size: _pass_count(job, size) <= _MOST_PASSES)
    if memory_bytes <= few:
        raise InputError(
            f"{text} are too little for {job.source_name}, which they would cut into "
            f"{_pass_count(job, memory_bytes)} passes; give at least "
            f"{few + 1} bytes ({format_bytes(few + 1)}) for {_MOST_PASSES} passes, or leave it out"
        )


def _steps(job: Job, memory_bytes: int) -> tuple[int, ...]:
    """Return the extents of a band; it is in memory twice, as input and as output."""
    prefer = [job.source.chunks[axis] for axis in job.stored_axes]
    return tile_steps(job.shape, memory_bytes // (2 * job.dtype.itemsize), job.unit, prefer)


def _pass_count(job: Job, memory_bytes: int) -> int:
    return tile_count(job.shape, _steps(job, memory_bytes)) if job.size_bytes else 0


def _written(job: Job, target: NpyArray | ZarrArray, band: Box, workers: int) -> Any:
    """Lazy array of the bytes written, one element for each slab."""
    import dask.array as da

    from dask_p2p.ops.transpose import transpose

    box = input_box(band, job.stored_axes)
    x = da.map_blocks(
        _read_block,
        job.source,
        box,
        chunks=slabs(box, job.source.chunks, workers),
        meta=np.empty((0,) * len(box), job.dtype),
    )
    y = transpose(x, job.stored_axes, chunks=slabs(band, job.unit, workers))
    return y.map_blocks(  # `dask.array.store` does not take arrays that are expressions
        _write_block,
        target,
        band,
        chunks=tuple((1,) * len(sizes) for sizes in y.chunks),
        meta=np.empty((0,) * len(band), np.int64),
    )


def _read_block(
    source: NpyArray | ZarrArray, box: Box, block_info: Any = None
) -> np.ndarray[Any, Any]:
    return source[_place(box, block_info[None])]


def _write_block(
    block: np.ndarray[Any, Any], target: NpyArray | ZarrArray, band: Box, block_info: Any = None
) -> np.ndarray[Any, Any]:
    target[_place(band, block_info[0])] = block
    return np.full((1,) * block.ndim, block.nbytes, np.int64)


def _place(box: Box, info: dict[str, Any]) -> tuple[slice, ...]:
    """Where a block of an array is in the file that has the array at a box."""
    sides = zip(box, info["array-location"], strict=True)
    return tuple(slice(first + lo, first + hi) for (first, _), (lo, hi) in sides)


def _run_pass(
    client: Any,
    written: Any,
    path: Path,
    progress: Callable[[int], None],
    stopped: Callable[[], bool],
) -> None:
    """Write one band, and wait until it is written; after an exception, until writing has ended."""
    from distributed import futures_of, wait

    futures = futures_of(client.persist(written))
    try:
        for future in futures:
            while True:
                if stopped():
                    raise KeyboardInterrupt
                with contextlib.suppress(TimeoutError):
                    wait([future], timeout=_POLL_S)
                    break
            progress(int(future.result().sum()))
    except BaseException:
        client.cancel(futures, force=True)
        with contextlib.suppress(Exception):  # the first error is the one to report
            client.run(stop_writers, str(path))
        raise
