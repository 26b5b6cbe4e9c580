r"""Plans: each output block assembled from regions of input blocks. Pure, no I/O.

A transpose of row slabs is an all-to-all. With four blocks, output block 2 (the third row slab
of the transpose) needs the third *column* tile of every input block::

        input x, 4 row slabs           output x.T, 4 row slabs
      +----+----+----+----+          +----+----+----+----+
    0 | 00 | 01 |[02]| 03 |        0 | 00'  10'  20'  30'|
      +----+----+----+----+          +----+----+----+----+
    1 | 10 | 11 |[12]| 13 |        1 | 01'  11'  21'  31'|
      +----+----+----+----+  --->    +----+----+----+----+
    2 | 20 | 21 |[22]| 23 |        2 |[02'][12'][22'][32']|   ' = tile transposed
      +----+----+----+----+          +----+----+----+----+
    3 | 30 | 31 |[32]| 33 |        3 | 03'  13'  23'  33'|
      +----+----+----+----+          +----+----+----+----+

A `Piece` is one such tile: a box of a source block and the box of the output block that it
fills. Any redistribution of blocks is a set of pieces and a permutation of the axes: plain
rechunking has the identity, a halo exchange has boxes that reach over the blocks' edges.

Stage order, from *CUDA Fortran for Scientists and Engineers* (Ruetsch, Fatica): in stage s the
reader at rank r takes what the holder at rank (r + s) mod n has, so that at any stage each
holder serves one reader; stage 0 is what the reader holds itself::

    stage          0    1    2    3
    reader 0   <-  0    1    2    3
    reader 1   <-  1    2    3    0
    reader 2   <-  2    3    0    1
    reader 3   <-  3    0    1    2

A rank is a place among the sorted addresses of the holders: it follows from where the data is,
not from the index of the block that a reader happens to compute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from dask_p2p.layout import (
    Box,
    Chunks,
    Index,
    Overlap,
    block_indices,
    block_shape,
    overlaps,
    split_evenly,
)
from dask_p2p.versioned import versioned

__all__ = ["BlockPlan", "Piece", "Plan", "slab_chunks", "stage_order", "transpose_plan"]


@versioned()
class Piece(NamedTuple):  # there are as many as blocks squared: a tuple is made and sent quickest
    """One region of a source block, and the region of the output block that it fills.

    The destination box has the source box's lengths in the order of the plan's axes.
    """

    source: int  # position in `BlockPlan.sources`
    src: Box  # relative to the source block, in the source's order of axes
    dst: Box  # relative to the output block, in the output's order of axes


@versioned()
@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How one output block is assembled."""

    shape: tuple[int, ...]  # of the output block
    axes: tuple[int, ...]  # output axis i is source axis axes[i]
    sources: tuple[Index, ...]  # indices of the source blocks
    source_shapes: tuple[tuple[int, ...], ...]  # their declared shapes, in the same order
    pieces: tuple[Piece, ...]


@versioned()  # without what is cached: each task carries a plan, and reads one block of it
@dataclass(frozen=True)
class Plan:
    """How all blocks of an output are assembled from the blocks of an input.

    Parameters
    ----------
    src_chunks : tuple of tuple of int
        Chunks of the input, in its order of axes.
    dst_chunks : tuple of tuple of int
        Chunks of the output, in its order of axes.
    axes : tuple of int
        Output axis ``i`` is input axis ``axes[i]``.
    """

    src_chunks: Chunks
    dst_chunks: Chunks
    axes: tuple[int, ...]

    @cached_property
    def _overlaps(self) -> list[list[list[Overlap]]]:
        """For each output axis and each block along it, the source parts it covers."""
        return [
            overlaps(self.src_chunks[axis], sizes)
            for axis, sizes in zip(self.axes, self.dst_chunks, strict=True)
        ]

    @cached_property
    def largest_piece(self) -> int:
        """Elements of the largest piece of any block."""
        return prod(
            max((part.src[1] - part.src[0] for block in blocks for part in block), default=0)
            for blocks in self._overlaps
        )

    def indices(self) -> Iterable[Index]:
        """Return the indices of the output's blocks."""
        return block_indices(self.dst_chunks)

    def sources(self, index: Index) -> list[Index]:
        """Return the indices of the blocks that an output block reads from, in their order."""
        place = _inverse(self.axes)
        read = [[part.block for part in self._overlaps[a][i]] for a, i in enumerate(index)]
        return [tuple(blocks[p] for p in place) for blocks in product(*read)]

    def block(self, index: Index) -> BlockPlan:
        """Return how the output block at `index` is assembled."""
        sources: dict[Index, int] = {}
        pieces: list[Piece] = []
        place = _inverse(self.axes)
        for parts in product(*(self._overlaps[a][i] for a, i in enumerate(index))):
            source = tuple(parts[p].block for p in place)
            pieces.append(
                Piece(
                    source=sources.setdefault(source, len(sources)),
                    src=tuple(parts[p].src for p in place),
                    dst=tuple(part.dst for part in parts),
                )
            )
        return BlockPlan(
            shape=block_shape(self.dst_chunks, index),
            axes=self.axes,
            sources=tuple(sources),
            source_shapes=tuple(block_shape(self.src_chunks, s) for s in sources),
            pieces=tuple(pieces),
        )

    def blocks(self) -> Iterator[tuple[Index, BlockPlan]]:
        """Each output block's index and plan."""
        return ((index, self.block(index)) for index in self.indices())


def transpose_plan(src_chunks: Chunks, axes: Sequence[int], dst_chunks: Chunks) -> Plan:
    """Plan of a transpose.

    Parameters
    ----------
    src_chunks, dst_chunks
        Chunks of the input and of the output, each in its own order of axes. Along each axis
        they cut the same length.
    axes
        A permutation: output axis ``i`` is input axis ``axes[i]``.
    """
    return Plan(_plain(src_chunks), _plain(dst_chunks), tuple(axes))


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


def stage_order(holders: Iterable[str], reader: str) -> list[str]:
    """Order in which `reader` goes to the holders: itself first, then those after it.

    A reader that holds nothing starts at the holder that comes after it in sorted order.

    >>> stage_order(["c", "a", "b"], "b")
    ['b', 'c', 'a']
    """
    ranked = sorted(set(holders))
    rank = bisect_left(ranked, reader)
    return ranked[rank:] + ranked[:rank]


def _plain(chunks: Chunks) -> Chunks:
    """Chunks with Python's integers: Dask lets NumPy's through, which do not travel as well."""
    return tuple(tuple(int(size) for size in sizes) for sizes in chunks)


def _inverse(axes: Sequence[int]) -> tuple[int, ...]:
    """``_inverse(axes)[a]`` is the output axis that input axis ``a`` becomes."""
    inverse = [0] * len(axes)
    for output_axis, input_axis in enumerate(axes):
        inverse[input_axis] = output_axis
    return tuple(inverse)
