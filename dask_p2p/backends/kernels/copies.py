"""Plans of `regions.cu`: copies of many small regions in one launch. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from dask_p2p.backends.kernels.launch import MAX_WORD_BYTES, reduce_copy
from dask_p2p.geometry import c_strides, whole_box
from dask_p2p.plans import Piece

MAX_AXES = 4
MAX_REGIONS = 38  # of a launch: a kernel takes arguments of 4 KiB
THREADS = 256
_MOST_BLOCKS = 128  # thread blocks of a region
_WORDS_PER_THREAD = 4

_PLACE = Struct("=2q")  # the addresses of the struct `Region` of regions.cu
_LAYOUT = Struct(f"=2I{MAX_AXES}I{2 * MAX_AXES}q")  # its other members
REGION_BYTES = _PLACE.size + _LAYOUT.size
# A dtype without fields: CuPy reads the dtype's description, which is slow with many fields.
_OPAQUE = np.dtype((np.void, MAX_REGIONS * REGION_BYTES))


class RegionLayout(NamedTuple):
    """The copy of a region, apart from the addresses of its arrays."""

    words: int
    src_offset_bytes: int
    dst_offset_bytes: int
    packed: bytes  # members of the struct `Region` after the addresses

    def at(self, dst: int, src: int) -> bytes:
        """Return the struct `Region` for addresses of the first items."""
        return _PLACE.pack(src + self.src_offset_bytes, dst + self.dst_offset_bytes) + self.packed


@lru_cache(maxsize=256)  # one object for equal arrays: its identity is that of their copies
def whole_piece(src: tuple[int, ...], dst: tuple[int, ...]) -> Sequence[Piece]:
    """Return a whole array as one piece, from its shapes before and after."""
    return (Piece(0, whole_box(src), whole_box(dst)),)


@lru_cache(maxsize=4096)  # a plan takes longer than its launch, and blocks are similar
def plan_region(
    shape: tuple[int, ...],  # shape of both arrays (the source already transposed)
    itemsize: int,
    src_strides: tuple[int, ...],  # in bytes
    dst_strides: tuple[int, ...],
    alignment: int,  # bitwise or of both addresses, modulo `MAX_WORD_BYTES`
) -> RegionLayout | None:
    """Return the copy of a region. None if it has too many axes, or no items."""
    if 0 in shape or not itemsize:
        return None
    arguments = shape, itemsize, src_strides, dst_strides, alignment or MAX_WORD_BYTES
    axes, word_bytes, src_offset_bytes, dst_offset_bytes = reduce_copy(*arguments)
    words = prod(axis.extent for axis in axes)
    if len(axes) > MAX_AXES or words >= 2**31:
        return None
    none = MAX_AXES - len(axes)
    extents, sources, targets = zip(*((1, 0, 0),) * none, *axes, strict=True)
    packed = _LAYOUT.pack(words, word_bytes, *extents, *sources, *targets)
    return RegionLayout(words, src_offset_bytes, dst_offset_bytes, packed)


def pack_regions(regions: Sequence[bytes]) -> np.ndarray[Any, Any]:
    """Return structs `Region` as rows of integers of 64 bits: the addresses are the first two."""
    return np.frombuffer(b"".join(regions), np.int64).reshape(-1, REGION_BYTES // 8)


def shift_regions(regions: np.ndarray[Any, Any], dst: int, src: int) -> np.ndarray[Any, Any]:
    """Return regions of arrays that begin at other addresses."""
    shifted = regions.copy()
    shifted[:, 0] += src
    shifted[:, 1] += dst
    return shifted


def pack_batch(regions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the kernel's one argument: an array of one item, passed by value."""
    packed = np.zeros(_OPAQUE.itemsize, np.uint8)
    packed[: regions.nbytes] = regions.reshape(-1).view(np.uint8)
    return packed.view(_OPAQUE)


def launch_grid(words: int, regions: int) -> tuple[int, int]:
    """Return the grid for a number of regions, the largest one of this number of words."""
    blocks = -(-words // (THREADS * _WORDS_PER_THREAD))
    return min(max(blocks, 1), _MOST_BLOCKS), regions


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


def find_pitch(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Pitch | None:
    """Return the pitch of a strided region, in the order of its elements; None without one.

    >>> find_pitch((4, 3), (80, 8), 8)
    Pitch(rows=4, run_bytes=24, stride_bytes=80)
    >>> find_pitch((4, 3), (8, 80), 8) is None
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
    pitch = find_pitch(shape, strides, itemsize)
    if pitch is None or pitch.stride_bytes > _LONGEST_STRIDE_BYTES:
        return None
    return pitch if pitch.rows == 1 or pitch.run_bytes >= _SHORTEST_RUN_BYTES else None
