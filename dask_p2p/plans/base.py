"""Plans: each output block assembled from regions of input blocks. Pure, no I/O.

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
A new operation needs a new plan; the engine stays the same. `stage_order` defines the order of
reads, and docs/design.md explains it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import prod
from typing import Any, NamedTuple, TypeVar

from dask_p2p.geometry import Box, Index, block_bounds, block_indices, round_up, split_evenly

_T = TypeVar("_T")


class Piece(NamedTuple):  # a tuple, for speed: a plan has one piece for each pair of blocks
    """One region of a source block, and the region of the output block that it fills.

    The destination box has the source box's lengths in the order of the plan's axes.
    """

    source: int  # position in `BlockPlan.sources`
    src: Box  # relative to the source block, in the source's order of axes
    dst: Box  # relative to the output block, in the output's order of axes


class Fill(NamedTuple):
    """A region of the output block that no source covers, with the value that fills it."""

    dst: Box
    value: Any


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


def block_plans(plan: Any) -> Iterator[tuple[Index, BlockPlan]]:
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
    reader_host = host_of(reader)
    near = ranked.pop(reader_host, [])
    offset = bisect_left(near, reader)
    hosts = sorted(ranked)
    later_hosts = _rotate(hosts, bisect_left(hosts, reader_host))
    remote = [_rotate(ranked[host], offset) for host in later_hosts]
    turns = zip_longest(*_rotate(remote, offset))
    far = [holder for stage in turns for holder in stage if holder is not None]
    return _rotate(near, offset) + far


def _rotate(items: list[_T], start: int) -> list[_T]:
    """Return the items from index `start` on, then the items before it.

    >>> _rotate([1, 2, 3], 4)
    [2, 3, 1]
    """
    start %= max(1, len(items))
    return items[start:] + items[:start]


# Parts of a block that go through a GPU one after another, and their schedule.
#
# ::
#
#     copies up     [part 0][part 1][part 2][part 3] ...
#     function              [part 0][part 1][part 2] ...
#     copies down                   [part 0][part 1] ...
#                    slot 0  slot 1  slot 2  slot 0
#
# A block is divided along one axis. If the function needs a halo, the input block has one at both
# ends, and the parts overlap in it. Their results do not overlap.

_ALIGNMENT_BYTES = 512  # alignment of arrays on a GPU

Range = tuple[int, int]


class Input(NamedTuple):
    """An input block with its halo."""

    shape: tuple[int, ...]
    item_bytes: int
    axis: int | None  # the block's axis to divide; None if each part reads the whole block
    halo: Range = (0, 0)  # widths of the block's halo before and after, along the axis
    depth: Range = (0, 0)  # widths of a part's halo; at an end of the array the block has less

    @property
    def row_bytes(self) -> int:
        undivided_lengths = (n for axis, n in enumerate(self.shape) if axis != self.axis)
        return prod(undivided_lengths) * self.item_bytes


class Part(NamedTuple):
    """A part of all inputs and of the output. Ranges are along the divided axis."""

    output_range: Range  # range of the output block
    reads: tuple[Range | None, ...]  # by input: range that is read; None: the whole input
    halo: tuple[Range, ...]  # by input: halo widths in that range, before and after

    @property
    def result_halo(self) -> Range:
        """Halo widths of the function's result: those of the first divided input."""
        pairs = zip(self.reads, self.halo, strict=True)
        return next((halo for read, halo in pairs if read is not None), (0, 0))

    @property
    def result_length(self) -> int:
        return self.output_range[1] - self.output_range[0] + sum(self.result_halo)


@dataclass(frozen=True)
class PartPlan:
    """The parts of one block that goes through a GPU."""

    inputs: tuple[Input, ...]  # the input blocks
    parts: tuple[Part, ...]  # at least one
    result_bytes: int  # largest size of the function's result for one part
    has_halo: bool = False  # true if halos are trimmed from results, by a copy

    def input_indices(self, part: Part) -> list[int]:
        """Return the byte offsets of a part's inputs in a slot, and the end of the last one."""
        sizes = (
            block.row_bytes * (1 if read is None else read[1] - read[0])
            for block, read in zip(self.inputs, part.reads, strict=True)
        )
        return list(block_bounds(map(_align_bytes, sizes)))

    @property
    def slot_bytes(self) -> int:
        return max(self.input_indices(part)[-1] for part in self.parts)

    @property
    def host_slot_bytes(self) -> int:
        return self.slot_bytes + _align_bytes(self.result_bytes)

    def device_bytes(self, slots: int) -> tuple[int, int]:
        count = min(slots, len(self.parts))
        return count * self.slot_bytes, (count + self.has_halo) * _align_bytes(self.result_bytes)


def plan_parts(
    inputs: Sequence[Input],  # the input blocks
    length: int,  # length of the output block along the axis
    part_bytes: int,  # limit of a part's inputs together, halos included
    #: Bytes of the function's result for one element along the axis, other axes' halos included.
    #: For reductions: bytes of the result of any part.
    result_row_bytes: int,
    is_reduced: bool = False,  # true if results are combined; otherwise they are concatenated
) -> PartPlan:
    """Divide a block into parts of nearly equal lengths.

    A part has at least one element along the axis, even above the limit.

    >>> block = Input(shape=(10, 4), item_bytes=8, axis=0, halo=(1, 1), depth=(1, 1))
    >>> for part in plan_parts([block], 8, 5 * 32, 32).parts:
    ...     print(part.output_range, "of", part.reads[0])
    (0, 3) of (0, 5)
    (3, 6) of (3, 8)
    (6, 8) of (6, 10)
    """
    cut = [block for block in inputs if block.axis is not None]
    fixed_bytes = sum(block.row_bytes for block in inputs if block.axis is None)
    fixed_bytes += sum(sum(block.depth) * block.row_bytes for block in cut)
    row_bytes = sum(block.row_bytes for block in cut)
    rows = max(1, (part_bytes - fixed_bytes) // row_bytes) if row_bytes else max(1, length)
    bounds = block_bounds(split_evenly(length, max(1, -(-length // rows))))
    parts = tuple(_plan_part(inputs, length, output_range) for output_range in pairwise(bounds))
    longest = 1 if is_reduced else max(part.result_length for part in parts)
    return PartPlan(tuple(inputs), parts, result_row_bytes * longest)


def _plan_part(inputs: Sequence[Input], length: int, output_range: Range) -> Part:
    reads: list[Range | None] = []
    halo: list[Range] = []
    for block in inputs:
        if block.axis is None:
            reads.append(None)
            halo.append((0, 0))
            continue
        at = block.halo[0]  # offset of the block's own elements
        start = max(0, at + output_range[0] - block.depth[0])
        stop = min(at + length + block.halo[1], at + output_range[1] + block.depth[1])
        reads.append((start, stop))
        halo.append((at + output_range[0] - start, stop - at - output_range[1]))
    return Part(output_range, tuple(reads), tuple(halo))


def _align_bytes(size_bytes: int) -> int:
    return round_up(size_bytes, _ALIGNMENT_BYTES)


class Step(NamedTuple):
    """An operation on one part, by the host or queued on a stream."""

    #: "fill": threads of the host start to copy the part into pinned memory; "up" waits for them.
    #: "up", "run", "down": operations of three streams. "empty": threads copy the result out of
    #: pinned memory.
    action: str
    part: int
    #: Steps of other timelines that must end before. The host waits for them before "fill" and
    #: "empty"; the step's stream waits for them before other steps. Copies without pinned memory
    #: in between have no "fill" or no "empty", and the host does not wait.
    after: tuple[tuple[str, int], ...] = ()


def schedule_steps(
    count: int,  # number of parts
    #: Number of slots, at least 2. A slot holds a part from its copy up to the end of its result's
    #: copy down, because a result may use its part's memory.
    slots: int,
    is_reduced: bool = False,  # true if only the combined result of all parts goes down
) -> Iterator[Step]:
    """Yield the steps of all parts in the host's order.

    A part goes up before the function is called for the previous part, so that a function that
    waits for its own work does not delay copies. Threads start to fill the next slot before that,
    and continue in the background. The slot of a part is its number modulo `slots`.

    >>> for step in schedule_steps(2, 2):
    ...     print(step.action, step.part, step.after)
    fill 0 ()
    fill 1 ()
    up 0 ()
    up 1 ()
    run 0 (('up', 0),)
    down 0 (('run', 0),)
    run 1 (('up', 1),)
    down 1 (('run', 1),)
    empty 0 (('down', 0),)
    empty 1 (('down', 1),)
    """
    last = count - 1
    freed = "run" if is_reduced else "down"
    for number in range(count + 3):
        if (part := number) < count:
            # After the part that used the slot before, if any.
            yield Step("fill", part, () if part < slots else (("up", part - slots),))
        if 0 <= (part := number - 1) < count:
            yield Step("up", part, () if part < slots else ((freed, part - slots),))
        if 0 <= (part := number - 2) < count:
            yield Step("run", part, (("up", part),))
            if part == last or not is_reduced:
                yield Step("down", part, (("run", part),))
        if 0 <= (part := number - 3) < count and (part == last or not is_reduced):
            yield Step("empty", part, (("down", part),))
