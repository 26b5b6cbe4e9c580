"""Arrays that the members of a gang divide in another way, and what they give each other for that.

A *cut* names the axes that are divided. Four members, cut along axis 0, then along axis 1::

    +-------------+          +---+---+---+---+
    |      0      |          |   |   |   |   |
    +-------------+          |   |   |   |   |
    |      1      |          |   |   |   |   |      each member gives each other one box,
    +-------------+   --->   | 0 | 1 | 2 | 3 |      where a row crosses a column
    |      2      |          |   |   |   |   |
    +-------------+          |   |   |   |   |
    |      3      |          |   |   |   |   |
    +-------------+          +---+---+---+---+
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from dask_p2p.geometry import Box, split_evenly
from dask_p2p.plans.base import Piece
from dask_p2p.plans.fft import Stage, Transform, stages
from dask_p2p.plans.grid import redistribution
from dask_p2p.plans.members import Members, grids, surface


def cut_of(members: Members) -> tuple[int, ...]:
    """Return the axes that are divided between members."""
    return tuple(axis for axis, count in enumerate(members.grid) if count > 1)


def recut(
    members: Members,  # how they divide theirs
    shape: Sequence[int],  # of the array that is divided
    cut: Sequence[int],  # axes that may be divided; where there is none, the first member has all
) -> Members:
    """Return how the same members divide an array along other axes.

    An array of the same shape keeps its shares if their axes are among those of the cut. Where as
    many members come along an axis as before, it is divided in the same places; otherwise evenly.
    Shares are empty where an axis is shorter than that.

    Examples
    --------
    >>> slabs = Members(((3, 5), (4,)), (2, 1))
    >>> recut(slabs, (8, 4), (1,)).share_sizes
    ((8,), (2, 2))
    >>> recut(slabs, (8,), ()).share_sizes
    ((8, 0),)
    """
    is_same = tuple(map(sum, members.share_sizes)) == tuple(shape)
    if is_same and {*cut_of(members)} <= {*cut}:
        return members
    if not cut and shape:
        rest = [(length,) for length in shape[1:]]
        first = (shape[0],) + (0,) * (members.size - 1)
        return Members((first, *rest), (members.size, *(1 for _ in rest)))
    most = [members.size if axis in cut else 1 for axis in range(len(shape))]

    def cost(grid: tuple[int, ...]) -> tuple[int, tuple[float, tuple[int, ...]]]:
        with_elements = 1
        for count, length in zip(grid, shape, strict=True):
            with_elements *= min(count, length)
        return -with_elements, surface(grid, shape)

    grid = min(grids(members.size, most), key=cost)
    sizes = [
        members.share_sizes[axis]
        if is_same and count == members.grid[axis]
        else split_evenly(length, count)
        for axis, (length, count) in enumerate(zip(shape, grid, strict=True))
    ]
    return Members(tuple(sizes), grid)


@dataclass(frozen=True)
class Moves:
    """What one member does, so that all get from one cut to another."""

    before: tuple[int, ...]  # shape of the member's share
    after: tuple[int, ...]
    local: tuple[Box, Box] | None  # what stays: where it is in the share before, and after
    sends: dict[int, Box]  # by rank of the other member: what that gets of the share before
    receives: dict[int, Box]  # what that gives of the share after

    def permuted(self, order: Sequence[int]) -> Moves:
        """Return the same for a share after whose axis ``i`` is axis ``order[i]`` of this one's."""

        def of(box: Any) -> Any:
            return tuple(box[axis] for axis in order)

        return replace(
            self,
            after=of(self.after),
            local=None if self.local is None else (self.local[0], of(self.local[1])),
            receives={rank: of(box) for rank, box in self.receives.items()},
        )


def moves(before: Members, after: Members, axes: Sequence[int], rank: int) -> Moves:
    """Return what one of the members that divide an array sends and receives.

    Axis ``i`` afterwards is axis ``axes[i]`` before.
    """
    back = sorted(range(len(axes)), key=axes.__getitem__)
    received = _pieces(before, after, axes, rank)
    sent = _pieces(after, before, back, rank)
    own = received.pop(rank, None)
    sent.pop(rank, None)
    return Moves(
        before.shape(rank),
        after.shape(rank),
        None if own is None else (own.src, own.dst),
        {other: piece.dst for other, piece in sent.items()},
        {other: piece.dst for other, piece in received.items()},
    )


def _pieces(before: Members, after: Members, axes: Sequence[int], rank: int) -> dict[int, Piece]:
    """Return of which pieces a share is made, by the member that has them: at most one of each."""
    plan = redistribution(before.share_sizes, axes, after.share_sizes)
    block = plan.block(after.places[rank])
    return {before.rank(block.sources[piece.source].block): piece for piece in block.pieces}


class TransformStage(NamedTuple):
    """How members divide an array while some of its axes are transformed."""

    before: Members
    axes: tuple[int, ...]  # of these each member has all that it has anything of
    after: Members  # the same, with the lengths that they have then


def transform_stages(
    before: Members,  # how they divide it at first
    after: Members,  # how they are to divide the result
    transform: Transform,  # of which axes
) -> list[TransformStage]:
    """Return how members divide an array, one stage after the other, to transform its axes.

    Examples
    --------
    >>> slabs = Members(((4, 4), (6,)), (2, 1))
    >>> both = Transform({0: 8, 1: 6})
    >>> [(stage.before.grid, stage.axes) for stage in transform_stages(slabs, slabs, both)]
    [((2, 1), (1,)), ((1, 2), (0,)), ((2, 1), ())]
    """
    found = []
    for stage in stages(before.share_sizes, transform, after.share_sizes):
        own = _divided(before, stage)
        sizes = [
            tuple(transform.lengths[axis] if size else 0 for size in along)
            if axis in stage.axes
            else along
            for axis, along in enumerate(own.share_sizes)
        ]
        found.append(TransformStage(own, stage.axes, Members(tuple(sizes), own.grid)))
    return found


def _divided(members: Members, stage: Stage) -> Members:
    """Return how members divide a stage's grid, which may have fewer blocks than there are."""
    if prod(map(len, stage.chunks)) == members.size:
        return Members(stage.chunks, tuple(map(len, stage.chunks)))
    shape = list(map(sum, stage.chunks))
    cut = [axis for axis, sizes in enumerate(stage.chunks) if len(sizes) > 1]
    free = [axis for axis in range(len(shape)) if axis not in stage.axes]
    return recut(members, shape, cut or free)
