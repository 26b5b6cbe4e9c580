"""Default chunks of a transpose: slabs along the first axis."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from dask_p2p.geometry import Chunks, split_evenly

__all__ = ["slab_chunks"]


def slab_chunks(src_chunks: Chunks, axes: Sequence[int]) -> Chunks:
    """Slabs along the first axis of the output, as even as possible, the other axes whole.

    There are as many slabs as the input has blocks along its most divided axis. Where the first
    axis has fewer rows than that, the other axes are cut too, into that many blocks or the nearest
    smaller number. No block is empty, unless the whole output is: that is one block.

    >>> slab_chunks(((4, 4, 4), (5, 5)), (1, 0))
    ((4, 3, 3), (12,))
    >>> slab_chunks(((2,) * 6, (3,)), (1, 0))
    ((1, 1, 1), (6, 6))
    """
    lengths = [sum(src_chunks[axis]) for axis in axes]
    blocks = max(map(len, src_chunks), default=1) if all(lengths) else 1
    if lengths and lengths[0] >= blocks:
        parts = (blocks, *(1 for _ in lengths[1:]))
    else:
        parts = _parts_by_axis(lengths, blocks)
    return tuple(map(split_evenly, lengths, parts))


def _parts_by_axis(lengths: Sequence[int], most: int) -> tuple[int, ...]:
    """Return into how many parts to cut each axis, for `most` blocks or the nearest smaller number.

    Where there is a choice the largest block is as small as possible, and then the first axes have
    as many parts as possible.
    """
    if not lengths:
        return ()

    def rank(cut: Sequence[int]) -> tuple[int, int]:
        return prod(cut), -prod(-(-length // n) for length, n in zip(lengths, cut, strict=True))

    first, *rest = lengths
    best = (1,) * len(lengths)
    for parts in range(min(first, most), 0, -1):
        if parts * min(prod(rest), most // parts) >= prod(best):
            best = max(best, (parts, *_parts_by_axis(rest, most // parts)), key=rank)
    return best
