"""A request to transpose one file into another, checked as far as possible without workers."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dask.array.core import normalize_chunks

from dask_p2p.errors import AxesError, ChunksError
from dask_p2p.files.file_errors import file_errors
from dask_p2p.files.npy import NpyArray, create_npy, open_npy
from dask_p2p.files.output import check_output
from dask_p2p.files.zarr_io import ZarrArray, check_space, create_zarr, open_zarr
from dask_p2p.layout import normal_axes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

__all__ = ["Job", "prepare"]

# Big enough that a chunk is worth a file and a request, small enough that the rows of chunks,
# which one pass writes whole, fit into memory.
_ZARR_CHUNK_BYTES = 16 << 20

Chunks = int | str | tuple[int | str, ...] | None


@dataclass(frozen=True)
class Job:
    """A checked request; nothing is written yet.

    Parameters
    ----------
    source : NpyArray or ZarrArray
        What is read.
    source_name, target_name : str
        Input and output as the user named them.
    target : Path
        Absolute path of the output.
    axes : tuple of int
        Input axis that each output axis comes from.
    chunks : tuple of int, optional
        Extents of a Zarr output's chunks; None for ``.npy``.
    force : bool
        Whether the output may be replaced.
    """

    source: NpyArray | ZarrArray
    source_name: str
    target_name: str
    target: Path
    axes: tuple[int, ...]
    chunks: tuple[int, ...] | None
    force: bool

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of the input."""
        return self.source.shape[::-1] if self.source.fortran else self.source.shape

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return tuple(self.in_shape[axis] for axis in self.axes)

    @property
    def stored_axes(self) -> tuple[int, ...]:
        """The same as ``axes`` for the input's axes in the order of the file."""
        last = len(self.axes) - 1
        return tuple(last - axis for axis in self.axes) if self.source.fortran else self.axes

    @property
    def unit(self) -> tuple[int, ...]:
        """Extents that one worker must write whole: no chunk of Zarr may have two writers."""
        return self.chunks or (1,) * len(self.axes)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements, the same in the output."""
        return self.source.dtype

    @property
    def size_bytes(self) -> int:
        """Size of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def create(self, path: Path) -> NpyArray | ZarrArray:
        """Create the empty output under a temporary name, if the disk has the space."""
        if self.chunks is None:
            return create_npy(path, self.target_name, self.shape, self.dtype)
        like = self.source if isinstance(self.source, ZarrArray) else None
        target = create_zarr(
            path, self.target_name, self.shape, self.dtype, self.chunks, like=like, axes=self.axes
        )
        check_space(self.source, target, self.stored_axes)
        return target


def prepare(
    source: str,
    target: str,
    axes: Sequence[int] | None = None,
    *,
    chunks: Chunks = None,
    force: bool = False,
) -> Job:
    """Check a request as far as possible without workers.

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
        path = os.path.realpath(source, strict=True)
    opened = open_zarr(path) if os.path.isdir(path) else open_npy(path)
    ndim = len(opened.shape)
    order = normal_axes(axes, ndim)
    if order is None:
        given = ",".join(map(str, axes or ()))
        wanted = ",".join(map(str, range(ndim))) or "none"
        raise AxesError(
            f"axes {given} do not fit an array of {ndim} dimensions: give each of {wanted} once"
        )
    final = check_output(target, path, force=force)
    job = Job(opened, source, target, final, order, None, force)
    extents = _chunk_extents(job, chunks)
    return replace(job, chunks=extents) if Path(target).suffix == ".zarr" else job


def _chunk_extents(job: Job, chunks: Chunks) -> tuple[int, ...]:
    if chunks is None and isinstance(job.source, ZarrArray):
        return tuple(job.source.chunks[axis] for axis in job.axes)
    wanted = "auto" if chunks is None else chunks
    sizes = wanted if isinstance(wanted, tuple) else (wanted,)
    if any(isinstance(size, int) and size < 1 and size != -1 for size in sizes):
        raise ChunksError(f"chunks {chunks} are impossible: give sizes from 1 on, or -1 for all")
    if not job.size_bytes:
        return tuple(max(1, extent) for extent in job.shape)
    try:
        normal = normalize_chunks(wanted, job.shape, limit=_ZARR_CHUNK_BYTES, dtype=job.dtype)
    except (TypeError, ValueError) as exc:
        raise ChunksError(
            f"chunks {chunks} do not fit the output's shape {job.shape}: give one size, or one "
            "for each axis"
        ) from exc
    return tuple(int(sizes[0]) for sizes in normal)
