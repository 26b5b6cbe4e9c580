"""The kernel for a copy on a GPU, and the tiles of the copy. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt, prod
from typing import NamedTuple

from dask_p2p.backends.kernels.geometry import CopyAxis, Geometry
from dask_p2p.geometry import round_up

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
        """Part of the tiles' area that is in use."""
        if self.variant == "copy":
            return 0.0  # its blocks read words one by one
        k, i = self.k.extent, self.i.extent
        return k * i / (round_up(k, self.step[0]) * round_up(i, self.step[1]))


def tiling_of(geometry: Geometry, alike: bool) -> Tiling:
    """Choose the kernel and its tiles.

    `alike`: both arrays start at the same offset modulo 16 bytes.
    """
    tiling = _plane_tiling(geometry)
    cells = _cells_tiling(geometry) if alike and tiling.use < FULL_TILES else None
    return cells or tiling


def _cells_tiling(geometry: Geometry) -> Tiling | None:
    """Return a tiling by cells; None if a copy has no cells.

    A cell is the fewest repeated axes that form one run of bytes in both arrays. The run may be
    neither too long nor at distances that are no multiple of 16 bytes.
    """
    axes, word = geometry.axes, geometry.word_bytes
    for count in (2, 3):
        inner, rest = axes[-count:][::-1], axes[:-count][::-1]
        cell_bytes = prod(axis.extent for axis in inner) * word
        if not rest or not _is_dense(inner, word) or rest[0][1:] != (cell_bytes, cell_bytes):
            continue
        step = CELLS_BYTES // cell_bytes
        if not step or any((axis[1] - axis[2]) % VECTOR_BYTES for axis in rest[1:]):
            return None
        cells, *outer = rest
        chunks = CopyAxis(-(-cells.extent // step), step * cell_bytes, step * cell_bytes)
        i, k, j = (*inner, NO_AXIS)[:3]
        return Tiling("cells", k, i, j, (k.extent, i.extent, step), (chunks, *outer), cells.extent)
    return None


def _is_dense(inner: Sequence[CopyAxis], word: int) -> bool:
    """Return true if the axes together are one run of words in both arrays."""
    for which in (1, 2):
        stride = word
        for axis in sorted(inner, key=lambda axis: axis[which]):
            if axis[which] != stride:
                return False
            stride *= axis.extent
    return True


def _plane_tiling(geometry: Geometry) -> Tiling:
    """Choose the two axes of a tile."""
    i, *others = reversed(geometry.axes)
    # Where the source repeats items (stride 0), it has no direction.
    moving = [axis for axis in (i, *others) if axis.src_stride_bytes] or [i]
    k = min(moving, key=lambda axis: abs(axis.src_stride_bytes))
    if k is i:  # rows keep their order
        return _copy_tiling(i, others)
    outer = [axis for axis in others if axis is not k]
    if min(k.extent, i.extent) < MIN_TILE_EXTENT:
        return _copy_tiling(i, [k, *outer])
    word = geometry.word_bytes
    side = VECTOR_TILE[word]
    # Tiles that reach out of the box are moved word by word; PLAIN_TILE is faster for them.
    large = min(k.extent, i.extent) >= side // 2
    variant = "vector" if large and _takes_vectors(word, k, i, outer) else "tile"
    side = side if variant == "vector" else PLAIN_TILE
    return Tiling(variant, k, i, NO_AXIS, (side, side, 1), tuple(outer))


def _takes_vectors(word: int, k: CopyAxis, i: CopyAxis, outer: Sequence[CopyAxis]) -> bool:
    """Return true if all rows start at the same offset modulo 16 bytes, in both arrays."""
    strides = [k.dst_stride_bytes, i.src_stride_bytes]
    for axis in outer:
        strides += axis[1:]
    contiguous = k.src_stride_bytes == word and i.dst_stride_bytes == word
    return contiguous and all(stride % VECTOR_BYTES == 0 for stride in strides)


def _copy_tiling(i: CopyAxis, others: list[CopyAxis]) -> Tiling:
    """Return a tiling by boxes of the row axis, the first other axis and the source's nearest one.

    With short rows, the box is therefore wide enough for both arrays. For an image with contiguous
    pixels of three bytes, it has some pixels of some lines.
    """
    k, *rest = others or [NO_AXIS]
    j = min(rest, key=lambda axis: abs(axis.src_stride_bytes), default=NO_AXIS)
    rest = [axis for axis in rest if axis is not j]
    step_i = min(i.extent, COPY_WORDS // min(k.extent * j.extent, MIN_TILE_EXTENT))
    rows = COPY_WORDS // step_i
    step_k = min(k.extent, max(isqrt(rows), rows // j.extent))
    step_j = min(j.extent, rows // step_k)
    steps_of_j = CopyAxis(
        -(-j.extent // step_j), step_j * j.src_stride_bytes, step_j * j.dst_stride_bytes
    )
    return Tiling("copy", k, i, j, (step_k, step_i, step_j), (steps_of_j, *rest))
