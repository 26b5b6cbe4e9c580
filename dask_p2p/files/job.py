"""One file transposed into another: check, cut into passes, run them, publish."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from dask.array.core import normalize_chunks
from dask.utils import format_bytes

from dask_p2p.errors import AxesError, ChunksError, InputError
from dask_p2p.files.execute import (
    Layout,
    default_memory_bytes,
    run_pass,
    usable_memory_bytes,
    worker_count,
)
from dask_p2p.files.file_errors import file_errors
from dask_p2p.files.npy import NpySource, NpyTarget, create_npy, open_npy
from dask_p2p.files.output import check_output, partial
from dask_p2p.files.space import check_space
from dask_p2p.files.tiling import Bands, plan_bands
from dask_p2p.files.zarr_io import ZarrSource, ZarrTarget, create_zarr, open_zarr
from dask_p2p.layout import normal_axes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["Job", "Summary", "prepare", "transpose_file"]

# Big enough that a chunk is worth a file and a request, small enough that the rows of chunks,
# which one pass writes whole, fit into memory.
_ZARR_CHUNK_BYTES = 16 << 20

# Each takes a tenth of a second at least, however small it is.
_MOST_PASSES = 1000

Chunks = int | str | tuple[int | str, ...] | None


@dataclass(frozen=True)
class Job:
    """A checked request; nothing is written yet.

    Parameters
    ----------
    source : NpySource or ZarrSource
        What is read.
    source_name, target_name : str
        Input and output as the user named them.
    target : Path
        Absolute path of the output.
    kind : {"npy", "zarr"}
        What the output will be.
    axes : tuple of int
        Input axis that each output axis comes from.
    stored_axes : tuple of int
        The same for the input's axes in the order of the file.
    in_shape, shape : tuple of int
        Of input and output.
    chunks : tuple of int, optional
        Extents of a Zarr output's chunks; None for ``.npy``.
    force : bool
        Whether the output may be replaced.
    """

    source: NpySource | ZarrSource
    source_name: str
    target_name: str
    target: Path
    kind: Literal["npy", "zarr"]
    axes: tuple[int, ...]
    stored_axes: tuple[int, ...]
    in_shape: tuple[int, ...]
    shape: tuple[int, ...]
    chunks: tuple[int, ...] | None
    force: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements, the same in the output."""
        return self.source.dtype

    @property
    def size_bytes(self) -> int:
        """Size of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


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


def prepare(
    source: str,
    target: str,
    axes: Sequence[int] | None = None,
    *,
    chunks: Chunks = None,
    force: bool = False,
) -> Job:
    """Check a request as far as it can be without workers.

    Parameters
    ----------
    source : str
        An ``.npy`` file, or the folder of a Zarr array.
    target : str
        Name of the output, ending in ``.npy`` or ``.zarr``.
    axes : sequence of int, optional
        As for `numpy.transpose`; default: reversed.
    chunks : int, str or tuple, optional
        Chunks of a Zarr output, as for `dask.array.rechunk`; default: those of a Zarr input, in
        the output's order of axes, or chunks of 16 MiB. An ``.npy`` output has none.
    force : bool
        Whether to replace an output that is there.

    Returns
    -------
    Job

    Raises
    ------
    FileError
        If the input cannot be read, or the output not be written.
    AxesError, ChunksError
        If these do not fit the input's shape.
    """
    with file_errors("read", source):
        path = os.path.realpath(source)
        os.stat(path)
    opened = open_zarr(path) if os.path.isdir(path) else open_npy(path)
    ndim = len(opened.stored_shape)
    order = _normal_axes(axes, ndim)
    in_shape = opened.stored_shape[::-1] if opened.fortran else opened.stored_shape
    shape = tuple(in_shape[axis] for axis in order)
    final = check_output(target, path, force=force)
    kind: Literal["npy", "zarr"] = "zarr" if target.endswith(".zarr") else "npy"
    return Job(
        source=opened,
        source_name=source,
        target_name=target,
        target=final,
        kind=kind,
        axes=order,
        stored_axes=tuple(ndim - 1 - axis for axis in order) if opened.fortran else order,
        in_shape=in_shape,
        shape=shape,
        chunks=_chunk_shape(chunks, kind, shape, opened, order),
        force=force,
    )


def _normal_axes(axes: Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    order = normal_axes(axes, ndim)
    if order is None:
        given = ",".join(map(str, axes or ()))
        wanted = ",".join(map(str, range(ndim))) or "none"
        raise AxesError(
            f"axes {given} do not fit an array of {ndim} dimensions: give each of {wanted} once"
        )
    return order


def _chunk_shape(
    chunks: Chunks,
    kind: str,
    shape: tuple[int, ...],
    source: NpySource | ZarrSource,
    axes: tuple[int, ...],
) -> tuple[int, ...] | None:
    if chunks is None and isinstance(source, ZarrSource):
        wanted = tuple(source.chunks[axis] for axis in axes)
    else:
        wanted = _normal_chunks("auto" if chunks is None else chunks, shape, source.dtype)
    return wanted if kind == "zarr" else None


def _normal_chunks(
    chunks: int | str | tuple[int | str, ...], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[int, ...]:
    sizes = chunks if isinstance(chunks, tuple) else (chunks,)
    if any(isinstance(size, int) and size < 1 and size != -1 for size in sizes):
        raise ChunksError(f"chunks {chunks} are impossible: give sizes from 1 on, or -1 for all")
    if 0 in shape or not dtype.itemsize:
        return tuple(max(1, extent) for extent in shape)
    try:
        normal = normalize_chunks(chunks, shape, limit=_ZARR_CHUNK_BYTES, dtype=dtype)
    except (TypeError, ValueError) as exc:
        raise ChunksError(
            f"chunks {chunks} do not fit the output's shape {shape}: give one size, or one for "
            "each axis"
        ) from exc
    return tuple(int(sizes[0]) for sizes in normal)


def transpose_file(
    job: Job,
    client: Any,
    *,
    memory_bytes: int | None = None,
    planned: Callable[[int], None] = lambda _: None,
    progress: Callable[[int], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Summary:
    """Carry out a job on a cluster, in passes that fit into memory.

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
        Asked again and again whether to give up.

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
    memory_bytes = max(memory_bytes, 2 * math.prod(_unit(job)) * job.dtype.itemsize)
    bands = _bands(job, memory_bytes)
    planned(len(bands))
    with client.as_current(), partial(job.target, job.target_name, force=job.force) as path:
        target = _create(job, path)
        layout = Layout(job.source, target, job.stored_axes, job.dtype, _unit(job), workers)
        for band in bands:
            run_pass(client, layout, band, progress, stopped)
        target.finish()
    return Summary(job, len(bands), workers, memory_bytes, time.perf_counter() - began_s)


def _check_memory(job: Job, memory_bytes: int, usable_bytes: int) -> None:
    """Refuse an amount of memory that there is not, or with which the work would not end."""
    given = f"{format_bytes(memory_bytes)} of memory"
    if memory_bytes > usable_bytes:
        raise InputError(
            f"{given} are more than the workers may use, {format_bytes(usable_bytes)} together; "
            "give less, or leave it out"
        )
    enough = range(1, 2 * job.size_bytes)
    few = bisect_left(enough, True, key=lambda size: len(_bands(job, size)) <= _MOST_PASSES)
    if memory_bytes <= few:
        raise InputError(
            f"{given} are too little for {job.source_name}, which they would cut into "
            f"{len(_bands(job, memory_bytes))} passes; give at least "
            f"{few + 1} bytes ({format_bytes(few + 1)}) for {_MOST_PASSES} passes, or leave it out"
        )


def _unit(job: Job) -> tuple[int, ...]:
    """Extents that one worker must write whole: no chunk of a Zarr array may have two writers."""
    return job.chunks or (1,) * len(job.shape)


def _bands(job: Job, memory_bytes: int) -> Bands:
    if not job.size_bytes:
        return Bands((0,), (1,))  # none
    return plan_bands(
        job.shape,
        unit=_unit(job),
        prefer=[job.source.chunks[axis] for axis in job.stored_axes],
        itemsize_bytes=job.dtype.itemsize,
        budget_bytes=memory_bytes,
    )


def _create(job: Job, path: Path) -> NpyTarget | ZarrTarget:
    if job.kind == "npy":
        return create_npy(path, job.target_name, job.shape, job.dtype)
    assert job.chunks is not None, "prepare gives every Zarr output chunks"
    like = job.source if isinstance(job.source, ZarrSource) else None
    target = create_zarr(
        path, job.target_name, job.shape, job.dtype, job.chunks, like=like, axes=job.axes
    )
    check_space(job, target)
    return target
