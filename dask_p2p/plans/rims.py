"""Which rims a member of a gang gets from which other members, and gives to which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dask_p2p.geometry import Box
from dask_p2p.plans.base import BlockPlan, Fill
from dask_p2p.plans.grid import GridPlan
from dask_p2p.plans.halo import halo_plan, rims_of
from dask_p2p.plans.members import Members

__all__ = ["Rims", "rims"]


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
