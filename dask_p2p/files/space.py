"""Whether a compressed output can fit on its disk, judged by samples before the work."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from dask.utils import format_bytes

from dask_p2p.files.file_errors import no_space
from dask_p2p.files.tiling import band_of_input, extents, plan_bands
from dask_p2p.files.zarr_io import compressed_bytes

if TYPE_CHECKING:
    from dask_p2p.files.job import Job
    from dask_p2p.files.zarr_io import ZarrTarget

__all__ = ["check_space"]

_SAMPLES = 8
_SAMPLE_BYTES = 1 << 20
_DOUBT = 0.8  # samples may compress less well than the rest: what may fit after all is tried


def check_space(job: Job, target: ZarrTarget) -> None:
    """Refuse an output that the disk cannot hold, not even compressed.

    Raises
    ------
    FileError
        If samples, compressed as the output will be, say that it needs more than there is.
    """
    folder = Path(target.path).parent
    free_bytes = shutil.disk_usage(folder).free
    if job.size_bytes <= free_bytes:
        return
    needed_bytes = job.size_bytes * _compressed_share(job, target)
    if _DOUBT * needed_bytes > free_bytes:
        about = f"about {format_bytes(int(needed_bytes))}"
        raise no_space(job.target_name, about, free_bytes, folder)


def _compressed_share(job: Job, target: ZarrTarget) -> float:
    """Size of samples from all over the array, compressed, in parts of what it is otherwise."""
    any_size = (1,) * len(job.shape)
    boxes = plan_bands(
        job.shape,
        unit=any_size,
        prefer=any_size,
        itemsize_bytes=job.dtype.itemsize,
        budget_bytes=2 * _SAMPLE_BYTES,
    )
    stored_bytes = sample_bytes = 0
    for box in itertools.islice(boxes, 0, None, -(-len(boxes) // _SAMPLES)):
        block = job.source.read(band_of_input(box, job.stored_axes)).transpose(job.stored_axes)
        assert block.shape == extents(box)
        stored_bytes += compressed_bytes(target, block)
        sample_bytes += block.nbytes
    return stored_bytes / sample_bytes
