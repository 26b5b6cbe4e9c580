"""Which rims a member of a gang gets from which other members, and gives to which.

What of its share can be computed before those of other members are there is the *interior*::

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dask_p2p.geometry import Box, box_size
from dask_p2p.plans.base import BlockPlan, Fill
from dask_p2p.plans.grid import GridPlan
from dask_p2p.plans.halo import halo_plan, rims_of
from dask_p2p.plans.members import Members


@dataclass(frozen=True)
class Rims:
    """The rims around one member's share. All boxes are in the share with its rims."""

    shape: tuple[int, ...]  # of the share with its rims
    inner: Box  # where the share is in it
    local: list[tuple[Box, Box]]  # what is copied from the share itself, and where to
    receives: dict[int, list[Box]]  # by rank of the other member: what it gives
    sends: dict[int, list[Box]]  # and what it gets, in the same order
    fills: tuple[Fill, ...]  # what lies beyond the array's ends
    depth: tuple[tuple[int, int], ...]  # of rims, also where "none" are at the array's ends


def rims(
    members: Members,
    rank: int,
    depth: Sequence[tuple[int, int]],
    boundary: Sequence[Any],
    has_corners: bool,
) -> Rims:
    """Return the rims around a member's share, as of `halo_plan`; they may reach over several."""
    plan = halo_plan(members.share_sizes, depth, boundary, has_corners)
    widths = rims_of(plan)
    own = plan.block(members.places[rank])
    inner = _inner(members, widths, rank)
    origin = [start for start, _ in inner]
    local, receives = [], dict[int, list[Box]]()
    for piece in own.pieces:
        if (holder := members.rank(own.sources[piece.source].block)) != rank:
            receives.setdefault(holder, []).append(piece.dst)
        elif (src := _moved(piece.src, origin)) != piece.dst:  # and not the share itself
            local.append((src, piece.dst))
    sends = dict[int, list[Box]]()
    for reader, block in _readers(plan, members, rank):
        for piece in block.pieces:
            if members.rank(block.sources[piece.source].block) == rank:
                sends.setdefault(reader, []).append(_moved(piece.src, origin))
    return Rims(own.shape, inner, local, receives, sends, own.fills, tuple(depth))


def _readers(plan: GridPlan, members: Members, rank: int) -> list[tuple[int, BlockPlan]]:
    """Return the other members that read from this one, with the plans of their blocks."""
    place = members.places[rank]
    found = []
    for reader, at in enumerate(members.places):
        along = zip(plan.mappings, at, place, strict=True)
        if reader != rank and all(own in mapping.blocks(i) for mapping, i, own in along):
            found.append((reader, plan.block(at)))
    return found


def _inner(members: Members, widths: Any, rank: int) -> Box:
    place, shape = members.places[rank], members.shape(rank)
    before = [along[at][0] for along, at in zip(widths, place, strict=True)]
    return tuple((start, start + size) for start, size in zip(before, shape, strict=True))


def _moved(box: Box, origin: Sequence[int]) -> Box:
    return tuple((start + by, stop + by) for (start, stop), by in zip(box, origin, strict=True))


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
