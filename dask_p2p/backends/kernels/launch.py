"""Launches of a permuted copy on a GPU: kernel, number of blocks, arguments.

::

           k, source-fastest ->                     i, destination-fastest ->
         +----+----+----+-                        +----+----+-
      i  | 0  | 1  | 2  |   tile by tile,      k  | 0  |    |
      |  +----+----+----+-  each through          +----+----+-
      v  |    |    |    |   shared memory         | 1  |    |
                                               v  +----+----+-

This module plans and `transpose.cu` executes. Plans are integers (addresses included), so tests can
run the kernels' source on a CPU with the same plans as on a GPU.

The four kernels:

``permute_vector_B``
    Contiguous fastest axes in both arrays, all other strides multiples of 16 bytes: 16-byte
    accesses to global and to shared memory.
``permute_tile_B``
    Any strides: the 32 x 32 tiles and 32 x 8 threads of G. Ruetsch and P. Micikevicius, "Optimizing
    Matrix Transpose in CUDA" (NVIDIA, 2009), also in chapter 4 of G. Ruetsch and M. Fatica, "CUDA
    Fortran for Scientists and Engineers".
``permute_copy_B``
    The same axis is fastest in both arrays, or a tile would be nearly empty: no shared memory.
``permute_cells_B``
    Batches of small matrices, contiguous in both arrays: a block moves all matrices that fit into
    its shared memory.

``B`` is the word size, 1, 2, 4, 8 or 16 bytes. ``memcpy`` copies one contiguous run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, product
from math import prod
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from dask_p2p.backends.kernels.geometry import CopyAxis, Geometry, reduce_copy
from dask_p2p.backends.kernels.tiling import (
    CELLS_THREADS,
    COPY_THREADS,
    NO_AXIS,
    PLAIN_THREADS,
    VECTOR_BYTES,
    VECTOR_THREADS,
    Tiling,
    tiling_of,
)

WORD_SIZES_BYTES = (1, 2, 4, 8, 16)
_VARIANTS = ("vector", "tile", "copy", "cells")
ENTRIES = tuple(f"permute_{variant}_{size}" for variant in _VARIANTS for size in WORD_SIZES_BYTES)

MAX_GRID = 2**31 - 1
MAX_OUTER = 6  # outer axes of a kernel; the host loops over further axes

# The struct `Work` of transpose.cu: two addresses, and integers of 64 bits.
_WORK = Struct(f"=2Q{9 + 10 + 3 * MAX_OUTER}q")
# A dtype without fields: CuPy reads the dtype's description, which is slow with many fields.
_OPAQUE = np.dtype((np.void, _WORK.size))


class Launch(NamedTuple):
    """One launch of one kernel."""

    entry: str  # name of the kernel in transpose.cu, or "memcpy"
    grid: int  # number of thread blocks, in one dimension; one for each tile
    threads: tuple[int, int]  # threads of a block, x first
    src: int  # address of the first item to read
    dst: int  # address of the first item to write
    k: CopyAxis  # axis along which the source is contiguous, or nearly
    i: CopyAxis  # axis along which the destination is contiguous, or nearly
    j: CopyAxis  # third axis of the boxes of permute_copy_B, or of a cell
    head: tuple[int, int]  # items by which the first tile starts before the box, along k and i
    step: tuple[int, int, int]  # items from tile to tile, along k, i and j
    tiles: tuple[int, int]  # number of tiles along k and i
    outer: tuple[
        CopyAxis, ...
    ]  # the other axes, the fastest first; the first may be the steps of j
    cells: int = 0  # number of cells of permute_cells_B
    first_tile: int = 0  # number of the grid's first tile

    @property
    def word_bytes(self) -> int:
        """Bytes that the kernel reads and writes at a time."""
        return int(self.entry.rpartition("_")[2])

    def pack(self) -> np.ndarray[Any, Any]:
        """Return the kernel's one argument: an array of one item, passed by value."""
        outer = chain(*self.outer, NO_AXIS * (MAX_OUTER - len(self.outer)))
        # fmt: off
        packed = _WORK.pack(
            self.src, self.dst, *self.k, *self.i, *self.j, *self.head, *self.step, *self.tiles,
            self.first_tile, self.cells, len(self.outer), *outer,
        )
        # fmt: on
        return np.frombuffer(bytearray(packed), _OPAQUE)  # writable, as CuPy requires


def plan_launches(
    dst: int,  # address of the first item
    src: int,
    shape: Sequence[int],  # shape of both arrays (`src` already transposed)
    itemsize: int,  # bytes of an item, of any size
    dst_strides: Sequence[int],  # in bytes
    src_strides: Sequence[int],
    *,
    max_grid: int = MAX_GRID,  # most thread blocks of one launch
) -> list[Launch]:
    """Return the launches for ``dst[...] = src`` of arrays of one shape.

    Their order is arbitrary, because each launch writes other items.
    """
    # The plan depends on the addresses only modulo 16 bytes.
    dst_base, src_base = dst - dst % VECTOR_BYTES, src - src % VECTOR_BYTES
    launches = _plan(
        dst - dst_base,
        src - src_base,
        tuple(shape),
        itemsize,
        tuple(dst_strides),
        tuple(src_strides),
        max_grid,
    )
    return [
        launch._replace(src=launch.src + src_base, dst=launch.dst + dst_base) for launch in launches
    ]


@lru_cache(maxsize=1024)  # a plan takes longer than its launch, and blocks are similar
def _plan(
    dst: int,
    src: int,
    shape: tuple[int, ...],
    itemsize: int,
    dst_strides: tuple[int, ...],
    src_strides: tuple[int, ...],
    max_grid: int,
) -> list[Launch]:
    if 0 in shape or itemsize == 0:
        return []
    geometry = reduce_copy(shape, itemsize, src_strides, dst_strides, dst | src)
    src += geometry.src_offset_bytes
    dst += geometry.dst_offset_bytes
    if _is_one_run(geometry):
        return [_memcpy(dst, src, geometry)]
    tiling = tiling_of(geometry, (src - dst) % VECTOR_BYTES == 0)
    inner, extra = tiling.outer[:MAX_OUTER], tiling.outer[MAX_OUTER:]
    launches: list[Launch] = []
    for src_offset, dst_offset in _offsets(extra):
        launch = _launch(
            tiling._replace(outer=inner), geometry.word_bytes, dst + dst_offset, src + src_offset
        )
        launches += _split(launch, max_grid)
    return launches


def _is_one_run(geometry: Geometry) -> bool:
    """Return true if the items are contiguous in both arrays."""
    word = geometry.word_bytes
    return not geometry.axes or (len(geometry.axes) == 1 and geometry.axes[0][1:] == (word, word))


def _memcpy(dst: int, src: int, geometry: Geometry) -> Launch:
    size_bytes = geometry.word_bytes * prod(axis.extent for axis in geometry.axes)
    run = CopyAxis(size_bytes, 1, 1)
    none = NO_AXIS
    return Launch("memcpy", 1, (1, 1), src, dst, none, run, none, (0, 0), (1, 1, 1), (1, 1), ())


def _offsets(axes: Sequence[CopyAxis]) -> Iterator[tuple[int, int]]:
    """Yield the byte offsets in source and destination of each position along the axes."""
    for position in product(*(range(axis.extent) for axis in axes)):
        yield (
            sum(n * axis.src_stride_bytes for n, axis in zip(position, axes, strict=True)),
            sum(n * axis.dst_stride_bytes for n, axis in zip(position, axes, strict=True)),
        )


def _launch(tiling: Tiling, word: int, dst: int, src: int) -> Launch:
    variant, k, i, j, step, outer, cells = tiling
    head = (0, 0)
    threads = {"tile": PLAIN_THREADS, "copy": (COPY_THREADS, 1), "cells": (CELLS_THREADS, 1)}.get(
        variant
    )
    if threads is None:
        threads = (VECTOR_THREADS[word], 1)
        # Tiles start at multiples of 16 bytes, so the first may start before the box.
        head = (src % VECTOR_BYTES // word, dst % VECTOR_BYTES // word)
    tiles = (-(-(k.extent + head[0]) // step[0]), -(-(i.extent + head[1]) // step[1]))
    count = prod(tiles) * prod(axis.extent for axis in outer)
    entry = f"permute_{variant}_{word}"
    return Launch(entry, count, threads, src, dst, k, i, j, head, step, tiles, outer, cells)


def _split(launch: Launch, max_grid: int) -> list[Launch]:
    """Split a launch with too many thread blocks."""
    return [
        launch._replace(first_tile=first, grid=min(max_grid, launch.grid - first))
        for first in range(0, launch.grid, max_grid)
    ]
