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
from math import isqrt, prod
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from dask_p2p.geometry import round_up

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
    layout = tuple(shape), itemsize, tuple(dst_strides), tuple(src_strides)
    launches = _plan_kernels(dst - dst_base, src - src_base, *layout, max_grid)
    return [
        launch._replace(src=launch.src + src_base, dst=launch.dst + dst_base) for launch in launches
    ]


@lru_cache(maxsize=1024)  # a plan takes longer than its launch, and blocks are similar
def _plan_kernels(
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
    axes, word = geometry.axes, geometry.word_bytes
    if not axes or (len(axes) == 1 and axes[0][1:] == (word, word)):  # one run in both arrays
        return [_memcpy(dst, src, geometry)]
    tiling = _tile_plane(geometry)
    if tiling.use < FULL_TILES and (src - dst) % VECTOR_BYTES == 0:
        tiling = _tile_cells(geometry) or tiling
    inner, extra = tiling.outer[:MAX_OUTER], tiling.outer[MAX_OUTER:]
    launches: list[Launch] = []
    for src_offset, dst_offset in _split_offsets(extra):
        launch = _launch(
            tiling._replace(outer=inner), geometry.word_bytes, dst + dst_offset, src + src_offset
        )
        launches += [
            launch._replace(first_tile=first, grid=min(max_grid, launch.grid - first))
            for first in range(0, launch.grid, max_grid)
        ]
    return launches


def _memcpy(dst: int, src: int, geometry: Geometry) -> Launch:
    size_bytes = geometry.word_bytes * prod(axis.extent for axis in geometry.axes)
    run = CopyAxis(size_bytes, 1, 1)
    none = NO_AXIS
    return Launch("memcpy", 1, (1, 1), src, dst, none, run, none, (0, 0), (1, 1, 1), (1, 1), ())


def _split_offsets(axes: Sequence[CopyAxis]) -> Iterator[tuple[int, int]]:
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


# The axes of a permuted copy, reduced to a kernel's least input. Integers only.
#
# ::
#
#     dst[...] = src.transpose(1, 0, 2), shape (5, 4, 8) of float32, all of both arrays
#
#     as given                      coalesced and widened to words of 16 bytes
#     extent  src      dst          extent  src   dst
#     5       32       128          5       32    128
#     4       160      32     ->    4       160   32
#     8       4        4            2       16    16
#
# Four changes keep the result of a copy. Axes of length 1 are dropped. An axis is walked backwards
# in both arrays. Two axes that are contiguous in both arrays become one. Items that are neighbours
# in both arrays are moved as one wider item. The reduced form has as few axes and words as
# possible.

MAX_WORD_BYTES = 16


class CopyAxis(NamedTuple):
    """One axis of a copy: the number of steps, and the stride in each array."""

    extent: int
    src_stride_bytes: int
    dst_stride_bytes: int


class Geometry(NamedTuple):
    """A permuted copy in its reduced form."""

    axes: tuple[
        CopyAxis, ...
    ]  # each of extent > 1 and dst stride > 0, the largest dst stride first
    word_bytes: int  # item size: a power of two that divides all addresses
    src_offset_bytes: int  # offset of the first item from the given address
    dst_offset_bytes: int


def reduce_copy(
    shape: Sequence[int],  # shape of both arrays (`src` already transposed), without a 0
    itemsize: int,  # bytes of an item
    src_strides: Sequence[int],  # in bytes
    dst_strides: Sequence[int],
    alignment: int = 0,  # bitwise or of both addresses; 0: perfectly aligned
) -> Geometry:
    """Return the reduced form of ``dst[...] = src`` for non-empty arrays of one shape.

    Words are at most as wide as the lowest set bit of the alignment allows.

    >>> reduce_copy((5, 4, 8), 4, (32, 160, 4), (128, 32, 4)).axes
    (CopyAxis(extent=5, src_stride_bytes=32, dst_stride_bytes=128), \
CopyAxis(extent=4, src_stride_bytes=160, dst_stride_bytes=32), \
CopyAxis(extent=2, src_stride_bytes=16, dst_stride_bytes=16))
    """
    axes: list[CopyAxis] = []
    src_offset = dst_offset = 0
    for extent, src_stride, dst_stride in zip(shape, src_strides, dst_strides, strict=True):
        if extent == 1:
            continue
        if dst_stride < 0:
            src_offset += (extent - 1) * src_stride
            dst_offset += (extent - 1) * dst_stride
            src_stride, dst_stride = -src_stride, -dst_stride
        axes.append(CopyAxis(extent, src_stride, dst_stride))
    # An item is one more axis, of bytes, so that items of any size follow the rules of axes.
    if itemsize > 1:
        axes.append(CopyAxis(itemsize, 1, 1))
    axes = _coalesce(axes)
    axes, word_bytes = _widen_words(axes, alignment | src_offset | dst_offset)
    return Geometry(tuple(axes), word_bytes, src_offset, dst_offset)


def _coalesce(axes: list[CopyAxis]) -> list[CopyAxis]:
    """Sort the axes by their dst stride, and join axes that are contiguous in both arrays."""
    joined: list[CopyAxis] = []
    for inner in sorted(axes, key=lambda axis: -axis.dst_stride_bytes):
        if joined:
            outer = joined[-1]
            if (
                outer.src_stride_bytes == inner.extent * inner.src_stride_bytes
                and outer.dst_stride_bytes == inner.extent * inner.dst_stride_bytes
            ):
                joined[-1] = inner._replace(extent=outer.extent * inner.extent)
                continue
        joined.append(inner)
    return joined


def _widen_words(axes: list[CopyAxis], alignment: int) -> tuple[list[CopyAxis], int]:
    """Return the axes in words as wide as possible, and the width in bytes."""
    if not axes or axes[-1][1:] != (1, 1):
        return axes, 1
    *outer, run = axes
    common = alignment | run.extent | MAX_WORD_BYTES
    for _, src_stride, dst_stride in outer:
        common |= src_stride | dst_stride
    word_bytes = common & -common  # lowest set bit: the largest power of two that divides them all
    if run.extent > word_bytes:
        outer.append(CopyAxis(run.extent // word_bytes, word_bytes, word_bytes))
    return outer, word_bytes


VECTOR_BYTES = 16
# Items along each side of a tile of permute_vector_B, and threads of its blocks. A row of a tile is
# 128 to 512 bytes; a thread has 4 to 16 vectors in transit before it needs the first.
VECTOR_TILE = {1: 128, 2: 128, 4: 64, 8: 64, 16: 32}
VECTOR_THREADS = {1: 64, 2: 256, 4: 256, 8: 256, 16: 256}
PLAIN_TILE = 32
PLAIN_THREADS = (32, 8)
COPY_THREADS = 256
COPY_WORDS = 2048  # words of a block of permute_copy_B: 8 for each thread
CELLS_THREADS = 256
CELLS_BYTES = 2**15  # most bytes of a block of permute_cells_B
# Cells are used if less than this part of the tiles' area would be in use.
FULL_TILES = 0.75
# With fewer items than this along one side, most of a tile's threads would be idle.
MIN_TILE_EXTENT = 16
NO_AXIS = CopyAxis(1, 0, 0)


class Tiling(NamedTuple):
    """The division of a copy into the boxes of thread blocks, with the fields of `Launch`."""

    variant: str
    k: CopyAxis
    i: CopyAxis
    j: CopyAxis
    step: tuple[int, int, int]
    outer: tuple[CopyAxis, ...]
    cells: int = 0

    @property
    def use(self) -> float:
        if self.variant == "copy":
            return 0.0  # its blocks read words one by one
        k, i = self.k.extent, self.i.extent
        return k * i / (round_up(k, self.step[0]) * round_up(i, self.step[1]))


def _tile_cells(geometry: Geometry) -> Tiling | None:
    """Return a tiling by cells; None if a copy has no cells.

    A cell is the fewest repeated axes that form one run of bytes in both arrays. The run may be
    neither too long nor at distances that are no multiple of 16 bytes.
    """
    axes, word = geometry.axes, geometry.word_bytes
    for count in (2, 3):
        inner, repeated = axes[-count:][::-1], axes[:-count][::-1]
        cell_bytes = prod(axis.extent for axis in inner) * word
        if not repeated or not _is_dense(inner, word) or repeated[0][1:] != (cell_bytes,) * 2:
            continue
        step = CELLS_BYTES // cell_bytes
        if not step or any((axis[1] - axis[2]) % VECTOR_BYTES for axis in repeated[1:]):
            return None
        cells, *outer = repeated
        chunks = CopyAxis(-(-cells.extent // step), step * cell_bytes, step * cell_bytes)
        i, k, j = (*inner, NO_AXIS)[:3]
        return Tiling("cells", k, i, j, (k.extent, i.extent, step), (chunks, *outer), cells.extent)
    return None


def _is_dense(inner: Sequence[CopyAxis], word: int) -> bool:
    """Return true if the axes together are one run of words in both arrays."""
    for field in (1, 2):
        stride = word
        for axis in sorted(inner, key=lambda axis: axis[field]):
            if axis[field] != stride:
                return False
            stride *= axis.extent
    return True


def _tile_plane(geometry: Geometry) -> Tiling:
    i, *outer_axes = reversed(geometry.axes)
    # Where the source repeats items (stride 0), it has no direction.
    moving = [axis for axis in (i, *outer_axes) if axis.src_stride_bytes] or [i]
    k = min(moving, key=lambda axis: abs(axis.src_stride_bytes))
    if k is i:  # rows keep their order
        return _tile_copy(i, outer_axes)
    outer = [axis for axis in outer_axes if axis is not k]
    if min(k.extent, i.extent) < MIN_TILE_EXTENT:
        return _tile_copy(i, [k, *outer])
    word = geometry.word_bytes
    side = VECTOR_TILE[word]
    # Tiles that reach out of the box are moved word by word; PLAIN_TILE is faster for them.
    large = min(k.extent, i.extent) >= side // 2
    # Vectors need rows that all start at the same offset modulo 16 bytes, in both arrays.
    contiguous = k.src_stride_bytes == word and i.dst_stride_bytes == word
    strides = [k.dst_stride_bytes, i.src_stride_bytes, *chain(*(axis[1:] for axis in outer))]
    is_aligned = all(stride % VECTOR_BYTES == 0 for stride in strides)
    variant = "vector" if large and contiguous and is_aligned else "tile"
    side = side if variant == "vector" else PLAIN_TILE
    return Tiling(variant, k, i, NO_AXIS, (side, side, 1), tuple(outer))


def _tile_copy(i: CopyAxis, outer_axes: list[CopyAxis]) -> Tiling:
    """Return a tiling by boxes of the row axis, the first other axis and the source's nearest one.

    With short rows, the box is therefore wide enough for both arrays. For an image with contiguous
    pixels of three bytes, it has some pixels of some lines.
    """
    k, *far_axes = outer_axes or [NO_AXIS]
    j = min(far_axes, key=lambda axis: abs(axis.src_stride_bytes), default=NO_AXIS)
    far_axes = [axis for axis in far_axes if axis is not j]
    step_i = min(i.extent, COPY_WORDS // min(k.extent * j.extent, MIN_TILE_EXTENT))
    rows = COPY_WORDS // step_i
    step_k = min(k.extent, max(isqrt(rows), rows // j.extent))
    step_j = min(j.extent, rows // step_k)
    steps_of_j = CopyAxis(
        -(-j.extent // step_j), step_j * j.src_stride_bytes, step_j * j.dst_stride_bytes
    )
    return Tiling("copy", k, i, j, (step_k, step_i, step_j), (steps_of_j, *far_axes))
