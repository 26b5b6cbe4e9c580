"""The axes of a permuted copy, reduced to a kernel's least input. Integers only.

::

    dst[...] = src.transpose(1, 0, 2), shape (5, 4, 8) of float32, all of both arrays

    as given                      coalesced and widened to words of 16 bytes
    extent  src      dst          extent  src   dst
    5       32       128          5       32    128
    4       160      32     ->    4       160   32
    8       4        4            2       16    16

Four changes keep the result of a copy. Axes of length 1 are dropped. An axis is walked backwards in
both arrays. Two axes that are contiguous in both arrays become one. Items that are neighbours in
both arrays are moved as one wider item. The reduced form has as few axes and words as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    axes = [
        CopyAxis(*axis) for axis in zip(shape, src_strides, dst_strides, strict=True) if axis[0] > 1
    ]
    # An item is one more axis, of bytes, so that items of any size follow the rules of axes.
    if itemsize > 1:
        axes.append(CopyAxis(itemsize, 1, 1))
    axes, src_offset, dst_offset = _forward(axes)
    axes = _coalesced(axes)
    axes, word_bytes = _widened(axes, alignment | src_offset | dst_offset)
    return Geometry(tuple(axes), word_bytes, src_offset, dst_offset)


def _forward(axes: list[CopyAxis]) -> tuple[list[CopyAxis], int, int]:
    """Reverse the axes with negative strides in `dst`."""
    forward, src_offset, dst_offset = [], 0, 0
    for extent, src_stride, dst_stride in axes:
        if dst_stride < 0:
            src_offset += (extent - 1) * src_stride
            dst_offset += (extent - 1) * dst_stride
            src_stride, dst_stride = -src_stride, -dst_stride
        forward.append(CopyAxis(extent, src_stride, dst_stride))
    return forward, src_offset, dst_offset


def _coalesced(axes: list[CopyAxis]) -> list[CopyAxis]:
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


def _widened(axes: list[CopyAxis], alignment: int) -> tuple[list[CopyAxis], int]:
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
