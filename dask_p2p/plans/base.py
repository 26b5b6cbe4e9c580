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
fills. Any redistribution of blocks is a set of pieces and a permutation of the axes. A plain
rechunk has the identity permutation, a halo exchange has boxes that reach over the blocks' edges.
A new operation needs a new `Plan`; the engine stays the same. `stage_order` defines the order of
reads, and docs/design.md explains it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol, TypeVar

from dask_p2p.geometry import Box, Chunks, Index, block_indices
from dask_p2p.versioned import versioned

_T = TypeVar("_T")


@versioned()
class Piece(NamedTuple):  # a tuple, for speed: a plan has one piece for each pair of blocks
    """One region of a source block, and the region of the output block that it fills.

    The destination box has the source box's lengths in the order of the plan's axes.
    """

    source: int  # position in `BlockPlan.sources`
    src: Box  # relative to the source block, in the source's order of axes
    dst: Box  # relative to the output block, in the output's order of axes


@versioned()
class Fill(NamedTuple):
    """A region of the output block that no source covers, with the value that fills it."""

    dst: Box
    value: Any


@versioned()
@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The pieces and fills of one output block.

    They do not overlap, and together cover the block.
    """

    shape: tuple[int, ...]  # of the output block
    axes: tuple[int, ...]  # output axis i is source axis axes[i]
    sources: tuple[Index, ...]  # blocks of the input
    source_shapes: tuple[tuple[int, ...], ...]  # declared shapes of the sources, in order
    pieces: tuple[Piece, ...]
    fills: tuple[Fill, ...] = ()

    @property
    def is_copy(self) -> bool:
        """True if the output block equals one source block."""
        return (
            self.source_shapes == (self.shape,)
            and len(self.pieces) == 1
            and self.pieces[0].src == self.pieces[0].dst
            and self.axes == tuple(range(len(self.axes)))
        )

    def destination(self, piece: Piece, part: Box) -> Box:
        """Return the box of the output block that a part of a piece's source box fills."""
        return tuple(
            (start + part[axis][0] - piece.src[axis][0], start + part[axis][1] - piece.src[axis][0])
            for axis, (start, _) in zip(self.axes, piece.dst, strict=True)
        )


class Plan(Protocol):
    """The assembly of all output blocks from blocks of the input.

    Every task carries the plan: a small value (hashable, picklable) of integers only. Each task
    makes the pieces of its own block only.
    """

    @property
    def chunks(self) -> Chunks:
        """Chunks of the blocks that are assembled."""

    @property
    def largest_piece(self) -> int:
        """Elements of the largest piece of any block, or an upper bound."""

    def sources(self, index: Index) -> tuple[Index, ...]:
        """Return the input blocks that an output block reads, in the order of its block plan.

        Output blocks with the same sources get equal tuples, so that tasks share derived data.
        """

    def source_elements(self, index: Index) -> tuple[int, ...]:
        """Return the number of elements that the output block reads from each source."""

    def block(self, index: Index) -> BlockPlan:
        """Return the plan of the output block at `index`."""


def block_plans(plan: Plan) -> Iterator[tuple[Index, BlockPlan]]:
    """Return each output block's index and plan."""
    return ((index, plan.block(index)) for index in block_indices(plan.chunks))


def stage_order(
    holders: Iterable[str],  # addresses, or other names; duplicates do not count
    reader: str,
    host_of: Callable[[str], str] = lambda address: "",  # host of an address
) -> list[str]:
    """Return a reader's order of holders: itself first, then the holders after it.

    A reader without blocks starts at the next holder in sorted order.

    With holders on several hosts, a reader visits the holders of its own host first, then one
    holder of each other host in turn. Readers of one host start at different hosts, and at
    different holders there. If hosts have equal numbers of holders, each holder therefore serves
    one reader at any stage, as on one host.

    >>> stage_order(["c", "a", "b"], "b")
    ['b', 'c', 'a']
    >>> stage_order(["a1", "a2", "b1", "b2", "c1", "c2"], "b1", lambda name: name[0])
    ['b1', 'b2', 'c1', 'a1', 'c2', 'a2']
    """
    ranked: defaultdict[str, list[str]] = defaultdict(list)  # by host
    for holder in sorted(set(holders)):
        ranked[host_of(holder)].append(holder)
    own = host_of(reader)
    near = ranked.pop(own, [])
    offset = bisect_left(near, reader)
    hosts = sorted(ranked)
    others = [_rotated(ranked[host], offset) for host in _rotated(hosts, bisect_left(hosts, own))]
    turns = zip_longest(*_rotated(others, offset))
    far = [holder for turn in turns for holder in turn if holder is not None]
    return _rotated(near, offset) + far


def _rotated(items: list[_T], start: int) -> list[_T]:
    """Return the items from index `start` on, then the items before it.

    >>> _rotated([1, 2, 3], 4)
    [2, 3, 1]
    """
    start %= max(1, len(items))
    return items[start:] + items[:start]
