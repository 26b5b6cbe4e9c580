"""The rims around a member's share: which other members send them, and which receive this one's.

Rims along axes that are not divided between members are copies within the share. They are copied
first, axis by axis, each over the full width of the axes before it. Messages along the divided axes
then carry the rims of the other axes along, so corners need no further message where one axis is
divided::

    +---+---------------+---+
    | c |   from above  | c |   rims of two axes; rows are divided between members
    +---+---------------+---+
    |   |               |   |   1. columns: copied within the share
    | w |     share     | w |   2. rows, from above and below: as wide as the share and both w
    |   |               |   |
    +---+---------------+---+

The *interior* of a share can be computed before the rims of other members have arrived::

    +---+-----------+---+
    |   |     2     |   |
    |   +-----------+   |
    |   |           |   |
    | 0 | interior  | 1 |    a frame at each side where rims come from others
    |   |           |   |
    |   +-----------+   |
    |   |     3     |   |
    +---+-----------+---+
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from dask_p2p.geometry import Box, Index, box_size
from dask_p2p.plans.base import Fill
from dask_p2p.plans.grid import AxisMapping
from dask_p2p.plans.halo import halo_plan, rims_of
from dask_p2p.plans.members import Members


@dataclass(frozen=True)
class Rims:
    """The rims around one member's share. All boxes are in the share with its rims.

    An exchange makes the copies, one after the other, then the fills. Only then may messages be
    packed: they include rims that a copy or a fill has made.
    """

    shape: tuple[int, ...]  # of the share with its rims
    inner: Box  # the share
    copies: list[tuple[Box, Box]]  # source and target, both in this share
    fills: list[Fill]  # rims beyond the array's ends; the last one counts where they overlap
    receives: dict[int, list[Box]]  # by rank of the sender
    sends: dict[int, list[Box]]  # by rank of the receiver, in the order of its boxes
    unread: list[Box]  # corners that no exchange fills
    depth: tuple[tuple[int, int], ...]  # of rims, also where "none" are at the array's ends


def rims(
    members: Members,
    rank: int,
    depth: Sequence[tuple[int, int]],
    boundary: Sequence[Any],
    has_corners: bool,
) -> Rims:
    """Return the rims around a member's share, as of `halo_plan`; they may reach over several."""
    shares = _Shares.of(members, depth, boundary, has_corners)
    at = members.places[rank]
    copies, receives, sends = [], dict[int, list[Box]](), dict[int, list[Box]]()
    for piece in shares.pieces(at):
        if piece.holder == at:
            copies.append((piece.src, piece.dst))
        else:
            receives.setdefault(members.rank(piece.holder), []).append(piece.dst)
    for reader, place in enumerate(members.places):
        if reader != rank and shares.may_read(place, at):
            boxes = [piece.src for piece in shares.pieces(place) if piece.holder == at]
            sends |= {reader: boxes} if boxes else {}
    return Rims(
        shape=shares.shape(at),
        inner=shares.inner(at),
        copies=copies,
        fills=shares.fills(at),
        receives=receives,
        sends=sends,
        unread=shares.unread(at),
        depth=tuple(depth),
    )


class _Piece(NamedTuple):
    """A region of one share that becomes a rim of another, or of the same."""

    holder: Index  # the place of the first in the grid of members
    src: Box
    dst: Box


@dataclass(frozen=True)
class _Shares:
    """The shares of all members with their rims. An exchange has a phase for each group of axes."""

    mappings: tuple[AxisMapping, ...]  # of each axis
    widths: tuple[tuple[tuple[int, int], ...], ...]  # of rims: by axis and place along it
    groups: list[list[int]]
    has_corners: bool

    @classmethod
    def of(
        cls,
        members: Members,
        depth: Sequence[tuple[int, int]],
        boundary: Sequence[Any],
        has_corners: bool,
    ) -> _Shares:
        plan = halo_plan(members.share_sizes, depth, boundary)
        axes = range(len(members.grid))
        groups = [[axis] for axis in axes]
        if has_corners:
            divided = [axis for axis in axes if members.grid[axis] > 1]
            groups = [*([axis] for axis in axes if axis not in divided), divided]
        return cls(plan.mappings, rims_of(plan), groups, has_corners)

    def shape(self, at: Index) -> tuple[int, ...]:
        """Return the shape of a share with its rims."""
        return tuple(m.sizes[i] for m, i in zip(self.mappings, at, strict=True))

    def inner(self, at: Index) -> Box:
        """Return the box of a share within its rims."""
        of_axes = zip(self.widths, at, self.shape(at), strict=True)
        return tuple((w[i][0], size - w[i][1]) for w, i, size in of_axes)

    def _whole(self, at: Index) -> Box:
        return tuple((0, size) for size in self.shape(at))

    @cached_property
    def _pieces(self) -> dict[Index, list[_Piece]]:
        return {}

    def pieces(self, at: Index) -> list[_Piece]:
        """Return the pieces of a share's rims in the order in which an exchange fills them."""
        if at not in self._pieces:
            inner, whole, filled = self.inner(at), self._whole(at), set[int]()
            found = self._pieces[at] = []
            for group in self.groups:
                base = tuple(whole[a] if a in filled else inner[a] for a in range(len(at)))
                found += self._of_group(at, group, base)
                if self.has_corners:
                    filled.update(group)
        return self._pieces[at]

    def _of_group(self, at: Index, group: Sequence[int], base: Box) -> Iterator[_Piece]:
        rows = [self.mappings[axis].segments(at[axis]) for axis in group]
        for parts in product(*rows):
            if not any(part.is_rim for part in parts):
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
                    yield _Piece(tuple(holder), tuple(src), tuple(dst))

    def may_read(self, reader: Index, holder: Index) -> bool:
        """Return whether a share's rims may have pieces of another one."""
        along = zip(self.mappings, reader, holder, strict=True)
        return all(i == own or own in mapping.blocks(i) for mapping, i, own in along)

    def fills(self, at: Index) -> list[Fill]:
        """Return the rims beyond the array's ends that have one value."""
        base = self._whole(at) if self.has_corners else self.inner(at)
        found = [
            Fill((*base[:axis], part.dst, *base[axis + 1 :]), part.value)
            for axis, (mapping, i) in enumerate(zip(self.mappings, at, strict=True))
            for part in mapping.segments(i)
            if part.block is None
        ]
        return [fill for fill in found if box_size(fill.dst)]

    def unread(self, at: Index) -> list[Box]:
        """Return the corners of a share that no piece and no fill covers."""
        if self.has_corners:
            return []
        sides = [
            ((0, start), (start, stop), (stop, size))
            for (start, stop), size in zip(self.inner(at), self.shape(at), strict=True)
        ]
        found = [
            tuple(side[number] for side, number in zip(sides, numbers, strict=True))
            for numbers in product(range(3), repeat=len(at))
            if sum(number != 1 for number in numbers) > 1
        ]
        return [box for box in found if box_size(box)]


def interior_and_frames(rims: Rims) -> list[Box]:
    """Return boxes of a share that cover it once. Only the first needs no rims of other members.

    It may be empty: then there is one frame, the share.
    """
    lengths = [stop - start for start, stop in rims.inner]
    whole = tuple((0, length) for length in lengths)
    needed = _sides(rims)
    inside = []
    for axis, (length, (before, after)) in enumerate(zip(lengths, rims.depth, strict=True)):
        start = before if (axis, False) in needed else 0
        stop = length - after if (axis, True) in needed else length
        inside.append((start, stop))
    if any(start >= stop for start, stop in inside):
        return [tuple((0, 0) for _ in whole), whole]
    frames = []
    for axis, (start, stop) in enumerate(inside):
        for low, high in ((0, start), (stop, lengths[axis])):
            frames.append((*inside[:axis], (low, high), *whole[axis + 1 :]))
    return [tuple(inside), *(frame for frame in frames if box_size(frame))]


def _sides(rims: Rims) -> set[tuple[int, bool]]:
    """Return at which sides frames are needed: axes, and whether it is the end."""
    around = []
    for box in (box for boxes in rims.receives.values() for box in boxes):
        along = list(enumerate(zip(box, rims.inner, strict=True)))
        before = [(axis, False) for axis, ((_, stop), (first, _)) in along if stop <= first]
        after = [(axis, True) for axis, ((start, _), (_, last)) in along if start >= last]
        around.append(before + after)
    needed: set[tuple[int, bool]] = set()
    for sides in sorted(around, key=len):
        if not needed & {*sides}:  # corners lie beside frames, mostly
            needed.add(sides[0])
    return needed
