"""Plans of halo exchanges: blocks with halos from their neighbours.

::

       block 0      block 1      block 2
      +---------+  +---------+  +---------+
      |         |  |         |  |         |
      +---------+  +---------+  +---------+
               [h | block 1   | h]             the assembled block, with a halo at each side
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

from dask_p2p.geometry import Box, Chunks, Index, block_bounds, box_size, whole_box
from dask_p2p.plans.base import Fill
from dask_p2p.plans.grid import (
    AxisMapping,
    AxisSegment,
    GridPlan,
    SplitAxis,
    cached_plan,
    segments_of_range,
)
from dask_p2p.plans.ranks import Exchange, RankGrid

#: Values beyond an end of the array: none, the elements at the other end, the reflected elements,
#: the last element. Any other boundary is a constant.
BOUNDARIES = ("none", "periodic", "reflect", "nearest")
#: The mirror image with the opposite sign. Sections make it from "reflect".
ODD = "odd"


@dataclass(frozen=True)
class Halo:
    """The mapping of an axis along which each block gets a halo, at most as wide as the axis.

    >>> [segment.block for segment in Halo((4, 4), 1, 1, "periodic").segments(0)]
    [1, 0, 1]
    >>> Halo((4, 4), 1, 2, "none").sizes
    (6, 5)
    >>> Halo((4, 4), 1, 2, ("nearest", "none")).sizes
    (7, 5)
    """

    src_sizes: tuple[int, ...]  # sizes of the blocks
    before: int  # width of the halo before a block
    after: int  # width of the halo after a block
    boundary: Any  # one of `BOUNDARIES`, a constant, or a pair of them for both ends

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return block_bounds(self.src_sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(
            sum(stop - start for start, stop in self._reach(number))
            for number in range(len(self.src_sizes))
        )

    @property
    def largest_segment(self) -> int:
        return max(self.src_sizes, default=0)

    def _reach(self, number: int) -> list[tuple[int, int]]:
        """Return the ranges before, of and after a block, as positions along the axis.

        They include positions below 0 and beyond the length, unless the boundary is "none".
        """
        start, stop = self._bounds[number : number + 2]
        low, high = start - self.before, stop + self.after
        first, last = both_ends(self.boundary)
        low = max(low, 0) if first == "none" else low
        high = min(high, self._bounds[-1]) if last == "none" else high
        return [(low, start), (start, stop), (stop, high)]

    @cached_property
    def widths(self) -> tuple[tuple[int, int], ...]:
        reaches = map(self._reach, range(len(self.src_sizes)))
        return tuple((first - start, stop - last) for (start, first), _, (last, stop) in reaches)

    def segments(self, number: int) -> list[AxisSegment]:
        before, inner, after = self._reach(number)
        length, base = self._bounds[-1], before[0]
        segments: list[AxisSegment] = []
        for (start, stop), is_halo in ((before, True), (inner, False), (after, True)):
            for lo, hi in (
                (start, min(stop, 0)),
                (max(start, 0), min(stop, length)),
                (max(start, length), stop),
            ):
                if lo >= hi:
                    continue
                if 0 <= lo < length:
                    segments += segments_of_range(self._bounds, lo, hi, lo - base, is_halo)
                else:
                    segments += self._beyond(lo, hi, lo - base)
        return segments

    def _beyond(self, start: int, stop: int, at: int) -> list[AxisSegment]:
        """Return the segments of a range beyond one end of the array."""
        length = self._bounds[-1]
        boundary = both_ends(self.boundary)[start >= 0]
        if boundary == "periodic":
            shift = length if start < 0 else -length
            return segments_of_range(self._bounds, start + shift, stop + shift, at, is_halo=True)
        if boundary not in ("reflect", "nearest"):
            return [AxisSegment(None, (0, 0), (at, at + stop - start), True, boundary)]
        segments = []
        for position in range(start, stop):
            if boundary == "nearest":
                mirrored = 0 if position < 0 else length - 1
            else:
                mirrored = -1 - position if position < 0 else 2 * length - 1 - position
            segments += segments_of_range(
                self._bounds, mirrored, mirrored + 1, at + position - start, is_halo=True
            )
        return segments


def plan_halo(
    chunks: Chunks,  # chunks of the array
    depth: Sequence[tuple[int, int]],  # by axis: width of the halo before and after a block
    boundary: Sequence[Any],  # by axis: one of `BOUNDARIES`, a constant, or a pair for both ends
    has_corners: bool = True,  # see `GridPlan`
    unread: Any = 0,
) -> GridPlan:
    """Return the plan of blocks with halos."""
    mappings: list[Halo | SplitAxis] = []
    for sizes, (before, after), beyond in zip(chunks, depth, boundary, strict=True):
        block_sizes = tuple(map(int, sizes))
        widths = Halo(block_sizes, before, after, beyond)
        mappings.append(widths if before or after else SplitAxis(block_sizes, block_sizes))
    plan = GridPlan(tuple(range(len(chunks))), tuple(mappings), has_corners, unread)
    # Equal constants may differ in their bits: 0.0 and -0.0.
    are_named = all(isinstance(end, str) for ends in map(both_ends, boundary) for end in ends)
    return cached_plan(plan) if are_named else plan


def halo_widths_of(plan: GridPlan) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the widths of the halo before and after, by axis and block along it."""
    return tuple(
        m.widths if isinstance(m, Halo) else ((0, 0),) * len(m.sizes) for m in plan.mappings
    )


def both_ends(boundary: Any) -> tuple[Any, Any]:
    """Return the boundaries before and after the array, along one axis."""
    return boundary if isinstance(boundary, tuple) else (boundary, boundary)


# The halo around a rank's local block, and the messages that exchange it.
#
# The halo along an undivided axis is a copy within the local block. These copies come first, axis
# by axis, each over the full width of the axes before it. Messages along the divided axes then
# include the halo of the other axes. With one divided axis, corners therefore need no extra
# message::
#
#     +---+---------------+---+
#     | c |   from above  | c |   halo of two axes; rows are divided between ranks
#     +---+---------------+---+
#     |   |               |   |   1. columns: copied within the local block
#     | w |  local block  | w |   2. rows, from above and below: as wide as the block and both w
#     |   |               |   |
#     +---+---------------+---+
#
# The *interior* of a local block can be computed before the other ranks' halo data have arrived::
#
#     +---+-----------+---+
#     |   |     2     |   |
#     |   +-----------+   |
#     |   |           |   |
#     | 0 | interior  | 1 |    a boundary region at each side with halo data of other ranks
#     |   |           |   |
#     |   +-----------+   |
#     |   |     3     |   |
#     +---+-----------+---+


@dataclass(frozen=True)
class RankHalo(Exchange):
    """The halo around one rank's local block, and the exchange that fills it.

    Source and target are the local block with its halo. An exchange makes the local copies, one
    after another, then the fills. Where fills overlap, the last one wins. The exchange packs
    messages only afterwards, because they include copied and filled regions.
    """

    inner: Box  # the local block
    unread: list[Box]  # corners that no exchange fills
    depth: tuple[tuple[int, int], ...]  # halo widths, also at ends without a halo ("none")
    is_changed_later: bool = False  # whether functions change a part of it after the exchange

    @property
    def shape(self) -> tuple[int, ...]:
        return self.after


def plan_halo_exchange(
    ranks: RankGrid,
    rank: int,
    depth: Sequence[tuple[int, int]],
    boundary: Sequence[Any],
    has_corners: bool,
) -> RankHalo:
    """Return the exchange that fills a rank's halo; see `plan_halo` for the parameters.

    It may reach over several other ranks.
    """
    plan = plan_halo(ranks.local_sizes, depth, boundary)
    groups = [[axis] for axis in range(len(ranks.grid))]
    if has_corners:
        divided = [axis for axis, count in enumerate(ranks.grid) if count > 1]
        groups = [*([axis] for (axis,) in groups if axis not in divided), divided]
    shares = _HaloBlocks(plan.mappings, halo_widths_of(plan), groups, has_corners)
    at = ranks.indices[rank]
    local, receives, sends = [], dict[int, list[Box]](), dict[int, list[Box]]()
    for holder, src, dst in shares.pieces(at):
        if holder == at:
            local.append((src, dst))
        else:
            receives.setdefault(ranks.rank(holder), []).append(dst)
    for reader, index in enumerate(ranks.indices):
        if reader != rank and shares.may_read(index, at):
            boxes = [src for holder, src, _ in shares.pieces(index) if holder == at]
            sends |= {reader: boxes} if boxes else {}
    return RankHalo(
        before=shares.shape(at),
        after=shares.shape(at),
        axes=tuple(range(len(at))),
        local=local,
        fills=shares.fills(at),
        sends=sends,
        receives=receives,
        inner=shares.inner(at),
        unread=shares.unread(at),
        depth=tuple(depth),
    )


#: A region of one local block that fills a part of a halo, its own or another rank's: the index of
#: the source rank in the grid, and the boxes of the source and of the target.
_HaloPiece: TypeAlias = tuple[Index, Box, Box]


@dataclass(frozen=True)
class _HaloBlocks:
    """The local blocks of all ranks with their halos."""

    mappings: tuple[AxisMapping, ...]  # by axis
    widths: tuple[tuple[tuple[int, int], ...], ...]  # halo widths by axis and index along it
    groups: list[list[int]]  # groups of axes, one for each phase of an exchange
    has_corners: bool

    def shape(self, at: Index) -> tuple[int, ...]:
        return tuple(m.sizes[i] for m, i in zip(self.mappings, at, strict=True))

    def inner(self, at: Index) -> Box:
        of_axes = zip(self.widths, at, self.shape(at), strict=True)
        return tuple((w[i][0], size - w[i][1]) for w, i, size in of_axes)

    @cached_property
    def _pieces(self) -> dict[Index, list[_HaloPiece]]:
        return {}

    def pieces(self, at: Index) -> list[_HaloPiece]:
        if at not in self._pieces:
            inner, full_box, filled = self.inner(at), whole_box(self.shape(at)), set[int]()
            pieces = self._pieces[at] = []
            for group in self.groups:
                base = tuple(full_box[a] if a in filled else inner[a] for a in range(len(at)))
                pieces += self._of_group(at, group, base)
                if self.has_corners:
                    filled.update(group)
        return self._pieces[at]

    def _of_group(self, at: Index, group: Sequence[int], base: Box) -> Iterator[_HaloPiece]:
        rows = [self.mappings[axis].segments(at[axis]) for axis in group]
        for parts in product(*rows):
            if not any(part.is_halo for part in parts):
                continue
            holder, src, dst = list(at), list(base), list(base)
            for axis, part in zip(group, parts, strict=True):
                if part.block is None:
                    break
                first, _ = self.widths[axis][part.block]
                holder[axis], dst[axis] = part.block, part.dst
                src[axis] = part.src[0] + first, part.src[1] + first
            else:
                if box_size(tuple(dst)):
                    yield tuple(holder), tuple(src), tuple(dst)

    def may_read(self, reader: Index, holder: Index) -> bool:
        """Return true if the reader's halo may have pieces of the holder's local block."""
        along = zip(self.mappings, reader, holder, strict=True)
        return all(
            i == source or any(part.block == source for part in mapping.segments(i))
            for mapping, i, source in along
        )

    def fills(self, at: Index) -> list[Fill]:
        base = whole_box(self.shape(at)) if self.has_corners else self.inner(at)
        fills = [
            Fill((*base[:axis], part.dst, *base[axis + 1 :]), part.value)
            for axis, (mapping, i) in enumerate(zip(self.mappings, at, strict=True))
            for part in mapping.segments(i)
            if part.block is None
        ]
        return [fill for fill in fills if box_size(fill.dst)]

    def unread(self, at: Index) -> list[Box]:
        """Return the corners of a halo that no piece and no fill covers."""
        if self.has_corners:
            return []
        sides = [
            ((0, start), (start, stop), (stop, size))
            for (start, stop), size in zip(self.inner(at), self.shape(at), strict=True)
        ]
        corners = [
            tuple(side[number] for side, number in zip(sides, numbers, strict=True))
            for numbers in product(range(3), repeat=len(at))
            if sum(number != 1 for number in numbers) > 1
        ]
        return [box for box in corners if box_size(box)]


def split_interior(halos: Sequence[RankHalo]) -> list[Box]:
    """Return the interior and the boundary regions, which together cover a local block once.

    Several halos may surround local blocks of one shape. Only the interior needs no halo data of
    other ranks. It may be empty: then the local block is the only boundary region.
    """
    local_block = whole_box([stop - start for start, stop in halos[0].inner])
    interiors = [_interior_ranges(halo) for halo in halos]
    inside = [
        (max(start for start, _ in along), min(stop for _, stop in along))
        for along in zip(*interiors, strict=True)
    ]
    if any(start >= stop for start, stop in inside):
        return [tuple((0, 0) for _ in local_block), local_block]
    boundary_parts = []
    for axis, (start, stop) in enumerate(inside):
        for low, high in ((0, start), (stop, local_block[axis][1])):
            boundary_parts.append((*inside[:axis], (low, high), *local_block[axis + 1 :]))
    return [tuple(inside), *(frame for frame in boundary_parts if box_size(frame))]


def _interior_ranges(rank_halo: RankHalo) -> list[tuple[int, int]]:
    """Return the range along each axis that needs no halo data of other ranks, or of functions."""
    if rank_halo.is_changed_later:
        return [(0, 0) for _ in rank_halo.inner]
    sides, inside = _sides_with_messages(rank_halo), []
    of_axes = enumerate(zip(rank_halo.inner, rank_halo.depth, strict=True))
    for axis, ((first, last), (before, after)) in of_axes:
        start = before if (axis, False) in sides else 0
        stop = last - first - (after if (axis, True) in sides else 0)
        inside.append((start, stop))
    return inside


def _sides_with_messages(rank_halo: RankHalo) -> set[tuple[int, bool]]:
    """Return the sides that need boundary regions: axis, and true for its end."""
    around = []
    for box in (box for boxes in rank_halo.receives.values() for box in boxes):
        along = list(enumerate(zip(box, rank_halo.inner, strict=True)))
        before = [(axis, False) for axis, ((_, stop), (first, _)) in along if stop <= first]
        after = [(axis, True) for axis, ((start, _), (_, last)) in along if start >= last]
        around.append(before + after)
    chosen_sides: set[tuple[int, bool]] = set()
    for sides in sorted(around, key=len):
        if not chosen_sides & {*sides}:  # a corner's other side mostly has a region already
            chosen_sides.add(sides[0])
    return chosen_sides
