"""Plans of grids of blocks, with independent axes.

Along one axis an output block is a row of segments; each segment lies in one block of the source.
The pieces of the block are the product of its segments along all axes. A *mapping* divides an
axis into segments: `SplitAxis` for plain redistribution, `dask_p2p.plans.halo.Halo` for blocks with
halos.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import count, pairwise, product
from math import ceil, prod
from operator import getitem, itemgetter
from typing import Any, NamedTuple, Protocol

from dask_p2p.geometry import Chunks, Index, block_bounds, block_shape, box_size, split_evenly
from dask_p2p.plans.base import BlockPlan, Fill, Piece
from dask_p2p.shared import shared

_MOST_SHARED_EDGES = 10_000  # plans of more edges are not kept


class AxisSegment(NamedTuple):
    """A part of an output block along one axis."""

    block: int | None  # index of the source block along the axis; None for a filled segment
    src: tuple[int, int]  # relative to the source block
    dst: tuple[int, int]  # relative to the output block
    is_halo: bool = False  # true in the halo of the block
    value: Any = None  # value of a filled segment


class AxisMapping(Protocol):
    """The division of one axis of the output's blocks into segments of the source's blocks."""

    @property
    def src_sizes(self) -> tuple[int, ...]:
        """Sizes of the source's blocks."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the output's blocks."""

    @property
    def largest_segment(self) -> int:
        """Length of the longest segment from one source block, or an upper bound."""

    def segments(self, number: int) -> list[AxisSegment]:
        """Return the segments of an output block, in order."""


@dataclass(frozen=True)
class SplitAxis:
    """The mapping of an axis that is divided at other bounds.

    >>> SplitAxis((4, 4), (3, 5)).segments(1)
    [AxisSegment(block=0, src=(3, 4), dst=(0, 1), is_halo=False, value=None), \
AxisSegment(block=1, src=(0, 4), dst=(1, 5), is_halo=False, value=None)]
    """

    src_sizes: tuple[int, ...]  # sizes of the source's blocks
    sizes: tuple[int, ...]  # sizes of the output's blocks, with the same sum

    @cached_property
    def _src_bounds(self) -> tuple[int, ...]:
        return block_bounds(self.src_sizes)

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return block_bounds(self.sizes)

    @cached_property
    def largest_segment(self) -> int:
        bounds = sorted({*self._src_bounds, *self._bounds})
        return max((b - a for a, b in pairwise(bounds)), default=0)

    def segments(self, number: int) -> list[AxisSegment]:
        start, stop = self._bounds[number : number + 2]
        return segments_of_range(self._src_bounds, start, stop, 0)


def segments_of_range(
    src_bounds: Sequence[int], start: int, stop: int, at: int, is_halo: bool = False
) -> list[AxisSegment]:
    """Return the segments of a range of the source, from offset `at` of the output block on.

    Empty blocks have no segments.
    """
    if start == stop:
        return []
    shift = at - start
    segments = []
    for block in range(bisect_right(src_bounds, start) - 1, bisect_left(src_bounds, stop)):
        base = src_bounds[block]
        lo, hi = max(start, base), min(stop, src_bounds[block + 1])
        if lo < hi:
            src, dst = (lo - base, hi - base), (lo + shift, hi + shift)
            segments.append(AxisSegment(block, src, dst, is_halo))
    return segments


def _lengths_read(segments: Iterable[AxisSegment]) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for block, (start, stop), *_ in segments:
        if block is not None:
            lengths[block] = lengths.get(block, 0) + stop - start
    return lengths


@shared
@dataclass(frozen=True)
class GridPlan:
    """The assembly of one grid's blocks from another's, axis by axis."""

    axes: tuple[int, ...]  # output axis i is input axis axes[i]
    mappings: tuple[AxisMapping, ...]  # by output axis
    has_corners: bool = True  # true if a halo's corners (of several axes) are read
    unread: Any = 0  # value of corners that are not read

    @cached_property
    def _source_axes(self) -> tuple[int, ...]:
        return tuple(self.axes.index(axis) for axis in range(len(self.axes)))

    @cached_property
    def src_chunks(self) -> Chunks:
        return tuple(self.mappings[p].src_sizes for p in self._source_axes)

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks of the blocks that are assembled."""
        return tuple(mapping.sizes for mapping in self.mappings)

    @cached_property
    def largest_piece(self) -> int:
        """Elements of the largest piece of any block, or an upper bound."""
        return prod(mapping.largest_segment for mapping in self.mappings)

    @cached_property
    def edges(self) -> int:
        """Number of source blocks that output blocks read, summed over output blocks."""
        return prod(sum(map(len, along)) for along in self._lengths)

    @cached_property
    def _lengths(self) -> tuple[tuple[Mapping[int, int], ...], ...]:
        """By output axis and output block along it: the length that it reads, by source block."""
        return tuple(
            tuple(_lengths_read(mapping.segments(number)) for number in range(len(mapping.sizes)))
            for mapping in self.mappings
        )

    @cached_property
    def _blocks(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(tuple(map(tuple, along)) for along in self._lengths)

    @cached_property
    def _sources(self) -> dict[tuple[tuple[int, ...], ...], tuple[Index, ...]]:
        return {}

    def sources(self, index: Index) -> tuple[Index, ...]:
        """Return the input blocks that an output block reads, in the order of its block plan.

        Output blocks with the same sources get equal tuples, so that tasks share derived data.
        """
        if not self.has_corners:
            return self._read_without_corners(index)[0]
        return self._all_sources(tuple(map(getitem, self._blocks, index)))

    @cached_property
    def _read(self) -> dict[Index, tuple[tuple[Index, ...], tuple[int, ...]]]:
        return {}

    def _read_without_corners(self, index: Index) -> tuple[tuple[Index, ...], tuple[int, ...]]:
        """Return the sources of a block, and the number of elements that it reads of each."""
        reads = self._read.get(index)
        if reads is None:
            block = self.block(index)
            elements = [0] * len(block.sources)
            for piece in block.pieces:
                elements[piece.source] += box_size(piece.src)
            reads = self._read[index] = (block.sources, tuple(elements))
        return reads

    def _all_sources(self, blocks: tuple[tuple[int, ...], ...]) -> tuple[Index, ...]:
        # Blocks of one row of the grid share a list: a transpose of slabs has a single one.
        sources = self._sources.get(blocks)
        if sources is None:
            sources = tuple(self._in_order(product(*blocks)))
            self._sources[blocks] = sources
        return sources

    def source_elements(self, index: Index) -> tuple[int, ...]:
        """Return the number of elements that an output block reads from each source."""
        if not self.has_corners:
            return self._read_without_corners(index)[1]
        lengths = (along.values() for along in map(getitem, self._lengths, index))
        return tuple(map(prod, product(*lengths)))

    def block(self, index: Index) -> BlockPlan:
        rows = [m.segments(i) for m, i in zip(self.mappings, index, strict=True)]
        if any(part.is_halo for row in rows for part in row):
            return self._block_with_halo(index, rows)
        # Each source block has one segment along each axis, so pieces are products, in order: fast
        # with thousands of pieces.
        sources = self._all_sources(tuple(tuple(_lengths_read(row)) for row in rows))
        dst = product(*([part.dst for part in row] for row in rows))
        src = self._in_order(product(*([part.src for part in row] for row in rows)))
        sizes = (
            [m.src_sizes[p.block or 0] for p in row]
            for m, row in zip(self.mappings, rows, strict=True)
        )
        return BlockPlan(
            shape=block_shape(self.chunks, index),
            axes=self.axes,
            sources=sources,
            source_shapes=tuple(self._in_order(product(*sizes))),
            pieces=tuple(map(Piece, count(), src, dst)),
        )

    def _in_order(self, tuples: Iterable[tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
        if self._source_axes == tuple(range(len(self._source_axes))):
            return tuples
        return map(itemgetter(*self._source_axes), tuples)

    def _block_with_halo(self, index: Index, rows: list[list[AxisSegment]]) -> BlockPlan:
        numbers: dict[Index, int] = {}
        pieces: list[Piece] = []
        fills: list[Fill] = []
        source_axes = self._source_axes
        for parts in product(*rows):
            dst = tuple([part.dst for part in parts])
            filled = [part for part in parts if part.block is None]
            if not self.has_corners and sum([part.is_halo for part in parts]) > 1:
                fills.append(Fill(dst, self.unread))
            elif filled:
                fills.append(Fill(dst, filled[-1].value))
            else:
                source: Any = tuple([parts[p].block for p in source_axes])
                number = numbers.setdefault(source, len(numbers))
                pieces.append(Piece(number, tuple([parts[p].src for p in source_axes]), dst))
        return BlockPlan(
            shape=block_shape(self.chunks, index),
            axes=self.axes,
            sources=tuple(numbers),
            source_shapes=tuple(block_shape(self.src_chunks, source) for source in numbers),
            pieces=tuple(pieces),
            fills=tuple(fills),
        )


def cached_plan(plan: GridPlan) -> GridPlan:
    """Return an equal plan that was made before, with all that it has computed, or this one.

    Layers of an iteration have equal plans.
    """
    shared_plan = _shared_plan(plan)
    # A copy has nothing computed, so that the plan that is kept stays small.
    return shared_plan if shared_plan.edges <= _MOST_SHARED_EDGES else replace(shared_plan)


@lru_cache(maxsize=16)
def _shared_plan(plan: GridPlan) -> GridPlan:
    return plan


def redistribution(
    src_chunks: Chunks,  # chunks of the input
    axes: Sequence[int],  # output axis ``i`` is input axis ``axes[i]``
    chunks: Chunks,  # chunks of the output, of the same lengths, in the output's order of axes
) -> GridPlan:
    """Return the plan that divides an array into other blocks, with its axes permuted."""
    mappings = [
        SplitAxis(_to_python_ints(src_chunks[a]), _to_python_ints(sizes))
        for a, sizes in zip(axes, chunks, strict=True)
    ]
    return cached_plan(GridPlan(tuple(axes), tuple(mappings)))


def _to_python_ints(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return sizes as Python integers, because Dask also accepts NumPy's, which pickle larger."""
    return tuple(map(int, sizes))


def slab_chunks(src_chunks: Chunks, axes: Sequence[int]) -> Chunks:
    """Return slabs along the first axis of the output, as even as possible.

    The number of slabs is the number of the input's blocks along its most divided axis. If the
    first axis has fewer rows, the other axes are divided too, into this number of blocks or the
    nearest smaller one. No block is empty, except that an empty output is one block.

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


def _parts_by_axis(lengths: Sequence[int], blocks: int) -> tuple[int, ...]:
    """Return the number of parts of each axis, for `blocks` blocks or the nearest smaller number.

    Among equals, the largest block is as small as possible; then earlier axes have as many parts as
    possible.
    """
    if not lengths:
        return ()

    def rank(cut: Sequence[int]) -> tuple[int, int]:
        return prod(cut), -prod(-(-length // n) for length, n in zip(lengths, cut, strict=True))

    first, *other_lengths = lengths
    best = (1,) * len(lengths)
    for parts in range(min(first, blocks), 0, -1):
        if parts * min(prod(other_lengths), blocks // parts) >= prod(best):
            best = max(best, (parts, *_parts_by_axis(other_lengths, blocks // parts)), key=rank)
    return best


# Fewer edges for large graphs: groups of blocks.
#
# "Growth" in docs/design.md lists the cost of edges. Groups reduce their number: one task assembles
# g neighbours as one larger block, and g cheap output tasks on its worker return the blocks. Data
# still moves once::
#
#     one task a block    n² edges              grouped    n² / g edges        n edges
#     sources ========> blocks                  sources ==========> groups ----------> blocks
#
# Groups cost one more task a block, about 0.5 ms each, and the latency of one more layer. The
# blocks
# of one group go to the same worker, and its memory is freed when all of them are released. Groups
# are used above `FEW_EDGES` if they are small, of about `SMALL_GROUP` elements, and above
# `MOST_EDGES` in any case. There are at least two groups for each thread.

#: Largest number of edges of a layer without groups, if groups are small.
FEW_EDGES = 2_000
#: Elements of a small group: 64 MiB of float64.
SMALL_GROUP = 2**23
#: Largest number of edges of a layer without groups: some 0.7 s of the scheduler's time.
MOST_EDGES = 20_000
#: Groups of a larger array above `MOST_EDGES`; more only with more threads.
MANY_GROUPS = 64
_LEAST_GAIN = 2  # least factor of all edges that makes the second layer worthwhile


def group_blocks(
    plan: GridPlan,  # a redistribution
    groups: int | None,  # number of groups; 0: no groups; None: chosen by the number of edges
    threads: Callable[[], int | None],  # the cluster's number of threads; called only if needed
) -> GridPlan:
    """Return the plan of the groups, or the plan itself without groups."""
    blocks = prod(map(len, plan.chunks))
    if groups is None:
        groups, allowed = 0, plan.edges // _LEAST_GAIN - blocks
        if plan.edges > FEW_EDGES:
            small = ceil(prod(map(sum, plan.chunks)) / SMALL_GROUP)
            if plan.edges > MOST_EDGES:
                small = min(small, MANY_GROUPS)
            thread_count = threads()
            groups = max(small, MANY_GROUPS if thread_count is None else 2 * thread_count)
    else:
        allowed = plan.edges - 1
    if not groups:
        return plan
    together = ceil(blocks / groups)
    if together < 2:
        return plan
    plans = [_merge_blocks(plan, axis, together) for axis in range(len(plan.axes))]
    best = min(plans, key=lambda merged: merged.edges)
    return best if best.edges <= allowed else plan


def _merge_blocks(plan: GridPlan, axis: int, together: int) -> GridPlan:
    mappings = list(plan.mappings)
    src_sizes, sizes = mappings[axis].src_sizes, mappings[axis].sizes
    sums = (sum(sizes[start : start + together]) for start in range(0, len(sizes), together))
    mappings[axis] = SplitAxis(src_sizes, tuple(sums))
    return GridPlan(plan.axes, tuple(mappings))
