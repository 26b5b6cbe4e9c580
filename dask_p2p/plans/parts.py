"""Parts of a block that go through a GPU one after another, and their schedule.

::

    copies up     [part 0][part 1][part 2][part 3] ...
    function              [part 0][part 1][part 2] ...
    copies down                   [part 0][part 1] ...
                   slot 0  slot 1  slot 2  slot 0

A block is divided along one axis. If the function needs a halo, the input block has one at both
ends, and the parts overlap in it. Their results do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from dask_p2p.geometry import block_bounds, round_up, split_evenly

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
        """Bytes of one element along the axis, or of the whole undivided block."""
        others = (n for axis, n in enumerate(self.shape) if axis != self.axis)
        return prod(others) * self.item_bytes


class Part(NamedTuple):
    """A part of all inputs and of the output. Ranges are along the divided axis."""

    own: Range  # range of the output block
    reads: tuple[Range | None, ...]  # by input: range that is read; None: the whole input
    halo: tuple[Range, ...]  # by input: halo widths in that range, before and after

    @property
    def result_halo(self) -> Range:
        """Halo widths of the function's result: those of the first divided input."""
        pairs = zip(self.reads, self.halo, strict=True)
        return next((halo for read, halo in pairs if read is not None), (0, 0))

    @property
    def result_length(self) -> int:
        """Length of the function's result along the axis."""
        return self.own[1] - self.own[0] + sum(self.result_halo)


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
            each.row_bytes * (1 if read is None else read[1] - read[0])
            for each, read in zip(self.inputs, part.reads, strict=True)
        )
        return list(block_bounds(map(_aligned, sizes)))

    @property
    def slot_bytes(self) -> int:
        """Bytes of all inputs of the largest part."""
        return max(self.input_indices(part)[-1] for part in self.parts)

    @property
    def host_slot_bytes(self) -> int:
        """Bytes of a slot in host memory: the inputs of a part, then its result."""
        return self.slot_bytes + _aligned(self.result_bytes)

    def device_bytes(self, slots: int) -> tuple[int, int]:
        """Return the bytes on the device of all slots, and of the function's results."""
        count = min(slots, len(self.parts))
        return count * self.slot_bytes, (count + self.has_halo) * _aligned(self.result_bytes)


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

    Examples
    --------
    >>> block = Input(shape=(10, 4), item_bytes=8, axis=0, halo=(1, 1), depth=(1, 1))
    >>> for part in plan_parts([block], 8, 5 * 32, 32).parts:
    ...     print(part.own, "of", part.reads[0])
    (0, 3) of (0, 5)
    (3, 6) of (3, 8)
    (6, 8) of (6, 10)
    """
    cut = [each for each in inputs if each.axis is not None]
    fixed_bytes = sum(each.row_bytes for each in inputs if each.axis is None)
    fixed_bytes += sum(sum(each.depth) * each.row_bytes for each in cut)
    row_bytes = sum(each.row_bytes for each in cut)
    rows = max(1, (part_bytes - fixed_bytes) // row_bytes) if row_bytes else max(1, length)
    bounds = block_bounds(split_evenly(length, max(1, -(-length // rows))))
    parts = tuple(_part(inputs, length, own) for own in pairwise(bounds))
    longest = 1 if is_reduced else max(part.result_length for part in parts)
    return PartPlan(tuple(inputs), parts, result_row_bytes * longest)


def _part(inputs: Sequence[Input], length: int, own: Range) -> Part:
    reads: list[Range | None] = []
    halo: list[Range] = []
    for each in inputs:
        if each.axis is None:
            reads.append(None)
            halo.append((0, 0))
            continue
        at = each.halo[0]  # offset of the block's own elements
        start = max(0, at + own[0] - each.depth[0])
        stop = min(at + length + each.halo[1], at + own[1] + each.depth[1])
        reads.append((start, stop))
        halo.append((at + own[0] - start, stop - at - own[1]))
    return Part(own, tuple(reads), tuple(halo))


def _aligned(size_bytes: int) -> int:
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


def steps(
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

    Examples
    --------
    >>> for step in steps(2, 2):
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
