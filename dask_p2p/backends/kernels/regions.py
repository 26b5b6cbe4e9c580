"""Copies of many small regions on a GPU by one launch of regions.cu.

Import this module only if CuPy is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import cupy
import numpy as np

from dask_p2p.backends.host import KeptResults
from dask_p2p.backends.kernels import permute
from dask_p2p.backends.kernels.copies import (
    MAX_REGIONS,
    THREADS,
    grid_of,
    moved,
    packed_batch,
    packed_regions,
    region_layout,
)
from dask_p2p.backends.kernels.source import CudaSource
from dask_p2p.errors import BlockMismatchError
from dask_p2p.geometry import box_shape, box_slices
from dask_p2p.plans import Fill, Piece
from dask_p2p.types import Array

# Least bytes of a region that has a launch of its own, which takes the host 40 us. A region with
# permuted axes needs it for tiles, and one in order for the full bandwidth of the memory.
_LARGE_BYTES, _LARGE_BYTES_IN_ORDER = 2**22, 2**24
_ALIGNMENT = 15
_MOST_LAUNCHES = 256  # that are kept, for the same copies of the same arrays

_SOURCE = CudaSource("regions.cu", lambda module: module.get_function("copy_regions").kernel)
SOURCES = (_SOURCE,)


class _PlannedCopies(NamedTuple):
    """The copies of some pieces of an array, relative to the addresses of the two arrays."""

    packed: Any  # by piece the words of the struct `Region`: `packed_regions`
    words: int  # of the largest piece
    large: Sequence[Piece]  # those that are worth launches of their own


class _PendingCopies(NamedTuple):
    """Copies that are to be enqueued."""

    copies: _PlannedCopies
    into: int  # addresses of the two arrays
    of: int
    arrays: tuple[Array, Array]  # which keep their memory


class _RegionLaunch(NamedTuple):
    grid: tuple[int, int]
    batch: Any  # the kernel's argument


#: Launches, and their copies: so that no others get the identities of these.
_KeptLaunches: TypeAlias = tuple[Sequence[_PlannedCopies], Sequence[_RegionLaunch]]


class RegionBatch:
    """Copies of regions that are enqueued together, on the current stream.

    The arrays must not change before `flush`.
    """

    def __init__(self) -> None:
        self._pending: list[_PendingCopies] = []
        self._copies = KeptResults[_PlannedCopies]()  # a plan takes longer than its launch
        self._launches = KeptResults[_KeptLaunches](_MOST_LAUNCHES)  # by copies and addresses
        self._fills = KeptResults[list[tuple[Array, Sequence[Piece]]]]()

    def copy_pieces(
        self, dst: Array, src: Array, pieces: Sequence[Piece], axes: Sequence[int]
    ) -> Sequence[Piece]:
        """Add copies of pieces of an array; return large pieces, which are left to the caller."""
        if dst.dtype != src.dtype:
            raise BlockMismatchError(f"expected arrays of one dtype, got {src.dtype}, {dst.dtype}")
        into, of, item_bytes = dst.data.ptr, src.data.ptr, dst.dtype.itemsize
        layout = dst.strides, src.strides, tuple(axes), item_bytes, (into | of) & _ALIGNMENT
        copies = self._copies.of(pieces, layout, lambda: _copies(pieces, *layout))
        if len(copies.packed):
            self._pending.append(_PendingCopies(copies, into, of, (dst, src)))
        return copies.large

    def fill(self, dst: Array, fills: Sequence[Fill]) -> None:
        """Add constants in regions of an array."""
        by_item = self._fills.of(fills, dst.dtype.str, lambda: [*_by_item(fills, dst.dtype)])
        for item, pieces in by_item:
            everywhere = cupy.broadcast_to(item, dst.shape)
            for _, _, box in self.copy_pieces(dst, everywhere, pieces, range(dst.ndim)):
                permute.permute_into(
                    dst[box_slices(box)], everywhere[box_slices(box)], range(dst.ndim)
                )

    def flush(self) -> None:
        """Enqueue all copies."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        key = tuple([(id(copies), into, of) for copies, into, of, _ in pending])
        _, launches = self._launches.of(_SOURCE, key, lambda: _launches(pending))
        copy = _SOURCE.on(cupy.cuda.runtime.getDevice())
        stream = cupy.cuda.get_current_stream()
        for grid, batch in launches:
            copy(grid, (THREADS,), (batch,), 0, stream=stream)


def _launches(pending: Sequence[_PendingCopies]) -> _KeptLaunches:
    regions = np.concatenate([moved(copies.packed, into, of) for copies, into, of, _ in pending])
    words = max(copies.words for copies, *_ in pending)
    parts = [regions[n : n + MAX_REGIONS] for n in range(0, len(regions), MAX_REGIONS)]
    launches = [_RegionLaunch(grid_of(words, len(part)), packed_batch(part)) for part in parts]
    return [each.copies for each in pending], launches


def _copies(
    pieces: Sequence[Piece],
    dst_strides: tuple[int, ...],
    src_strides: tuple[int, ...],
    axes: tuple[int, ...],
    item_bytes: int,
    alignment: int,
) -> _PlannedCopies:
    strides = tuple(src_strides[axis] for axis in axes)
    found, large, most = [], [], 0
    is_in_order = axes == tuple(range(len(axes)))
    large_bytes = _LARGE_BYTES_IN_ORDER if is_in_order else _LARGE_BYTES
    for piece in pieces:
        _, src, dst = piece
        of, into = (
            sum(low * stride for (low, _), stride in zip(box, each, strict=True))
            for box, each in ((src, src_strides), (dst, dst_strides))
        )
        shape = box_shape(dst)
        if 0 in shape:
            continue
        aligned = (alignment | of | into) & _ALIGNMENT
        layout = None
        if prod(shape) * item_bytes < large_bytes:
            layout = region_layout(shape, item_bytes, strides, dst_strides, aligned)
        if layout is None:
            large.append(piece)
        else:
            found.append(layout.at(into, of))
            most = max(most, layout.words)
    return _PlannedCopies(packed_regions(found), most, large)


def _by_item(fills: Sequence[Fill], dtype: Any) -> Iterator[tuple[Array, Sequence[Piece]]]:
    """Yield the values of fills, as items on the GPU, and the regions of each as pieces."""
    groups: dict[bytes, list[Piece]] = {}
    for box, value in fills:
        item = np.full((), value, dtype).tobytes()
        groups.setdefault(item, []).append(Piece(0, box, box))
    for item, pieces in groups.items():
        yield cupy.asarray(np.frombuffer(item, dtype).reshape(())), pieces
