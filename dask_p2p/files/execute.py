"""One pass on the cluster: every worker reads its slab, the slabs are exchanged, each is written.

The data never pass through the client: its graph names files and boxes, and what comes back is
the number of bytes that each slab's writer wrote.
"""

from __future__ import annotations

import contextlib
import math
import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p.errors import BlockMismatchError, P2PError
from dask_p2p.files.tiling import band_of_input, extents, slabs
from dask_p2p.files.writers import stop_writers
from dask_p2p.registration import workers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dask_p2p.files.npy import NpySource, NpyTarget
    from dask_p2p.files.tiling import Box
    from dask_p2p.files.zarr_io import ZarrSource, ZarrTarget

__all__ = ["Layout", "default_memory_bytes", "run_pass", "usable_memory_bytes", "worker_count"]

# The rest is for packed tiles on their way, mapped pages, codecs, and the interpreter.
_MEMORY_SHARE = 0.4
_WORKERS_WAIT_S = 10
_POLL_S = 0.05


@dataclass(frozen=True)
class Layout:
    """What all passes of a job have in common.

    Parameters
    ----------
    source : NpySource or ZarrSource
        What is read.
    target : NpyTarget or ZarrTarget
        What is written.
    axes : tuple of int
        Axis of the input, in stored order, that each output axis comes from.
    dtype : numpy.dtype
        Type of the elements.
    unit : tuple of int
        Extents of the output that one worker must write whole.
    workers : int
        Number of workers to share among.
    """

    source: NpySource | ZarrSource
    target: NpyTarget | ZarrTarget
    axes: tuple[int, ...]
    dtype: np.dtype[Any]
    unit: tuple[int, ...]
    workers: int


def worker_count(client: Any) -> int:
    """Count the workers, of which there must be one at least.

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
    """Share of the memory that the workers may use."""
    return max(1, int(_MEMORY_SHARE * usable_memory_bytes(client)))


def usable_memory_bytes(client: Any) -> int:
    """Sum of the workers' memory limits, or of what their hosts have free if that is less."""
    limits_bytes: dict[str, float] = {}
    asked: dict[str, str] = {}  # one worker of each host
    for address, worker in workers_of(client).items():
        host = asked.setdefault(worker["host"], address)
        limit_bytes = worker["memory_limit"] or math.inf
        limits_bytes[host] = limits_bytes.get(host, 0) + limit_bytes
    free_bytes = client.run(_available_bytes, workers=list(limits_bytes))
    return int(sum(min(limit, free_bytes[host]) for host, limit in limits_bytes.items()))


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def run_pass(
    client: Any,
    layout: Layout,
    band: Box,
    progress: Callable[[int], None],
    stopped: Callable[[], bool],
) -> None:
    """Read, transpose and write one band, and wait for the end of it.

    Parameters
    ----------
    client : distributed.Client
        Client of the workers, and the current one.
    layout : Layout
        What is read and written.
    band : Box
        Part of the output.
    progress : callable
        Called with the bytes of each slab that is written.
    stopped : callable
        Asked again and again whether to give up.

    Raises
    ------
    FileError
        What a worker met. No worker writes any more then, nor after any other exception.
    KeyboardInterrupt
        If ``stopped`` says so.
    """
    from distributed import futures_of

    written = client.persist(_written(layout, band))
    futures = futures_of(written)
    try:
        for future in _as_completed(futures, stopped):
            progress(int(future.result().sum()))
    except BaseException:
        client.cancel(futures, force=True)
        with contextlib.suppress(Exception):  # the first trouble is the one to tell
            client.run(stop_writers, layout.target.path)
        raise


def _as_completed(futures: list[Any], stopped: Callable[[], bool]) -> Iterator[Any]:
    """`distributed.as_completed`, which would wait however often it is asked to stop."""
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(done.put)
    left = len(futures)
    while left:
        if stopped():
            raise KeyboardInterrupt
        with contextlib.suppress(queue.Empty):
            yield done.get(timeout=_POLL_S)
            left -= 1


def _written(layout: Layout, band: Box) -> Any:
    """Lazy array of the bytes written, one element for each slab."""
    import dask.array as da

    from dask_p2p.ops.transpose import transpose

    box = band_of_input(band, layout.axes)
    x = da.map_blocks(
        _read_block,
        layout.source,
        tuple(start for start, _ in box),
        chunks=slabs(box, layout.source.chunks, layout.workers),
        dtype=layout.dtype,
        meta=np.empty((0,) * len(box), layout.dtype),
    )
    chunks = slabs(band, layout.unit, layout.workers)
    y = transpose(x, layout.axes, chunks=chunks)
    return y.map_blocks(
        _write_block,
        layout.target,
        tuple(start for start, _ in band),
        chunks=tuple((1,) * len(sizes) for sizes in chunks),
        dtype=np.int64,
        meta=np.empty((0,) * len(band), np.int64),
    )


def _place(origin: tuple[int, ...], location: list[tuple[int, int]]) -> Box:
    """Box in the file of a block, which knows its location in the band only."""
    sides = zip(origin, location, strict=True)
    return tuple((first + lo, first + hi) for first, (lo, hi) in sides)


def _read_block(
    source: NpySource | ZarrSource, origin: tuple[int, ...], block_info: Any = None
) -> np.ndarray[Any, Any]:
    return source.read(_place(origin, block_info[None]["array-location"]))


def _write_block(
    block: np.ndarray[Any, Any],
    target: NpyTarget | ZarrTarget,
    origin: tuple[int, ...],
    block_info: Any = None,
) -> np.ndarray[Any, Any]:
    box = _place(origin, block_info[0]["array-location"])
    if block.shape != extents(box):
        raise BlockMismatchError(
            f"a block of shape {block.shape} came for a place of shape {extents(box)}; this is a "
            "defect: please report it"
        )
    target.write(box, block)
    return np.full((1,) * block.ndim, block.nbytes, np.int64)
