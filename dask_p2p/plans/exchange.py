"""Exchanges between the local blocks of ranks.

In a *redistribution*, local blocks of one partition become those of another one. Four ranks, first
divided along axis 0, then along axis 1::

    +-------------+          +---+---+---+---+
    |      0      |          |   |   |   |   |
    +-------------+          |   |   |   |   |
    |      1      |          |   |   |   |   |      each rank sends one box to each other rank:
    +-------------+   --->   | 0 | 1 | 2 | 3 |      where its row crosses the other's column
    |      2      |          |   |   |   |   |
    +-------------+          |   |   |   |   |
    |      3      |          |   |   |   |   |
    +-------------+          +---+---+---+---+

In a *halo update*, source and target are the same local block: see `dask_p2p.plans.rank_halo`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dask_p2p.geometry import Box
from dask_p2p.plans.base import Fill, Piece
from dask_p2p.plans.grid import redistribution
from dask_p2p.plans.ranks import RankGrid


@dataclass(frozen=True)
class Exchange:
    """One rank's part of an exchange, from a source array to a target array."""

    before: tuple[int, ...]  # shape of the source
    after: tuple[int, ...]  # shape of the target
    axes: tuple[int, ...]  # axis i of the target is axis axes[i] of the source
    local: list[tuple[Box, Box]]  # regions that stay on the rank: in the source, and in the target
    fills: list[Fill]  # regions of the target with a constant value
    sends: dict[int, list[Box]]  # by receiver: boxes of the source, in the order of its boxes
    receives: dict[int, list[Box]]  # by sender: boxes of the target

    def shape_before(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a region's shape in the source, from the one in the target."""
        return tuple(shape[self.axes.index(axis)] for axis in range(len(shape)))


def redistribution_exchange(
    before: RankGrid,
    after: RankGrid,  # distribution of the array with permuted axes
    axes: Sequence[int],  # axis i of `after` is axis axes[i] of `before`
    rank: int,
    order: Sequence[int] | None = None,  # axis i of the target is axis order[i] of `after`
) -> Exchange:
    """Return the exchange between two distributions of an array, with at most one box a rank."""
    in_target = range(len(axes)) if order is None else order

    def permuted(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[axis] for axis in in_target)

    back = sorted(range(len(axes)), key=axes.__getitem__)
    received = _pieces(before, after, axes, rank)
    sent = _pieces(after, before, back, rank)
    own = received.pop(rank, None)
    sent.pop(rank, None)
    return Exchange(
        before=before.shape(rank),
        after=permuted(after.shape(rank)),
        axes=permuted(axes),
        local=[] if own is None else [(own.src, permuted(own.dst))],
        fills=[],
        sends={other: [piece.dst] for other, piece in sent.items()},
        receives={other: [permuted(piece.dst)] for other, piece in received.items()},
    )


def _pieces(before: RankGrid, after: RankGrid, axes: Sequence[int], rank: int) -> dict[int, Piece]:
    """Return the pieces of a rank's new local block by sender: at most one from each."""
    plan = redistribution(before.local_sizes, axes, after.local_sizes)
    block = plan.block(after.indices[rank])
    return {before.rank(block.sources[piece.source]): piece for piece in block.pieces}
