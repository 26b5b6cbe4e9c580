"""Regions that a GPU's copy engine can copy: equal runs of bytes at equal distances."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from dask_p2p.backends.kernels.geometry import reduce_copy
from dask_p2p.geometry import c_strides

# For shorter runs a copy engine is limited by runs a second, and kernels that read in place are
# faster. GB/s of a copy engine and of a kernel over NVLink (H200): 359 and 358 with runs of 128
# bytes, 183 and 228 with 64, 46 and 111 with 16.
_SHORTEST_RUN_BYTES = 128
_LONGEST_STRIDE_BYTES = 2**31 - 1  # CUDA's memPitch


class Pitch(NamedTuple):
    """Memory as equal runs of bytes at equal distances, for one call of a copy engine."""

    rows: int
    run_bytes: int
    stride_bytes: int


def pitched(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Pitch | None:
    """Return the pitch of a strided region, in the order of its elements; None without one.

    >>> pitched((4, 3), (80, 8), 8)
    Pitch(rows=4, run_bytes=24, stride_bytes=80)
    >>> pitched((4, 3), (8, 80), 8) is None
    True
    """
    if 0 in shape:
        return None
    geometry = reduce_copy(shape, itemsize, strides, c_strides(shape, itemsize))
    run_bytes = geometry.word_bytes
    axes = list(geometry.axes)
    if axes and axes[-1].src_stride_bytes == axes[-1].dst_stride_bytes == run_bytes:
        run_bytes *= axes.pop().extent
    if len(axes) > 1 or any(axis.src_stride_bytes < run_bytes for axis in axes):
        return None
    if not axes:
        return Pitch(1, run_bytes, run_bytes)
    return Pitch(axes[0].extent, run_bytes, axes[0].src_stride_bytes)


@lru_cache(maxsize=1024)  # most parts of a block are similar
def engine_pitch(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Pitch | None:
    """Return a region's pitch if a copy engine can copy it faster than a kernel; else None."""
    pitch = pitched(shape, strides, itemsize)
    if pitch is None or pitch.stride_bytes > _LONGEST_STRIDE_BYTES:
        return None
    return pitch if pitch.rows == 1 or pitch.run_bytes >= _SHORTEST_RUN_BYTES else None
