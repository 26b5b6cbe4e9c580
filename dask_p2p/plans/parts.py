"""Parts of a block that go through a GPU one after another, and in which order.

::

    copies up     [part 0][part 1][part 2][part 3] ...
    function              [part 0][part 1][part 2] ...
    copies down                   [part 0][part 1] ...
                   slot 0  slot 1  slot 2  slot 0

A block is cut along one axis. Parts with rims overlap in the block that they are read from, as that
has rims of its own at both ends; what is written of their results does not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from dask_p2p.geometry import block_bounds, split_evenly

_ALIGNMENT_BYTES = 512  # of what is allocated on a GPU

Range = tuple[int, int]


class Input(NamedTuple):
    """A block that is read, with its rims."""

    shape: tuple[int, ...]
    item_bytes: int
    axis: int | None  # of its own, along which it is cut; None if each part reads all of it
    rims: Range = (0, 0)  # widths that the block has before and after, along that axis
    depth: Range = (0, 0)  # widths that a part wants; at an end of the array the block has less

    @property
    def row_bytes(self) -> int:
        """Of one element along the axis, or of all if it is not cut."""
        others = (n for axis, n in enumerate(self.shape) if axis != self.axis)
        return prod(others) * self.item_bytes


class Part(NamedTuple):
    """A part of all inputs, and of the output. Ranges are along the axis that is cut."""

    own: Range  # of the output block
    reads: tuple[Range | None, ...]  # of each input; None: all of it
    rims: tuple[Range, ...]  # widths in what is read of each input, before and after its own

    @property
    def result_rims(self) -> Range:
        """Widths in what the function returns: those of the first input that is cut."""
        pairs = zip(self.reads, self.rims, strict=True)
        return next((rims for read, rims in pairs if read is not None), (0, 0))

    @property
    def result_length(self) -> int:
        """Of what the function returns, along the axis."""
        return self.own[1] - self.own[0] + sum(self.result_rims)


@dataclass(frozen=True)
class PartPlan:
    """How one block goes through a GPU."""

    inputs: tuple[Input, ...]  # the blocks that are read
    parts: tuple[Part, ...]  # at least one
    result_bytes: int  # of what the function makes of one part, at most
    has_rims: bool = False  # whether rims are cut off that: what is left is copied

    def places(self, part: Part) -> list[int]:
        """Return where in a slot each input of a part lies, and where the last one ends: bytes."""
        sizes = (
            each.row_bytes * (1 if read is None else read[1] - read[0])
            for each, read in zip(self.inputs, part.reads, strict=True)
        )
        return list(block_bounds(map(_aligned, sizes)))

    @property
    def slot_bytes(self) -> int:
        """What all inputs of the largest part take."""
        return max(self.places(part)[-1] for part in self.parts)

    @property
    def host_slot_bytes(self) -> int:
        """What a slot of host memory takes: the inputs of a part, and after them its result."""
        return self.slot_bytes + _aligned(self.result_bytes)

    def device_bytes(self, slots: int) -> tuple[int, int]:
        """Return the memory of a device that parts take, and what the function makes of them."""
        count = min(slots, len(self.parts))
        return count * self.slot_bytes, (count + self.has_rims) * _aligned(self.result_bytes)


def plan_parts(
    inputs: Sequence[Input],  # the blocks that are read
    length: int,  # of the output block along the axis
    part_bytes: int,  # that all inputs of a part take together, rims included
    #: Of what the function makes for one element along the axis, other axes' rims included; if
    #: parts are reduced, of what it makes of any part.
    result_row_bytes: int,
    is_reduced: bool = False,  # whether results are combined, rather than put one after another
) -> PartPlan:
    """Cut a block into parts of nearly the same length.

    A part has one element along the axis at least, even if that takes more than it may.

    Examples
    --------
    >>> block = Input(shape=(10, 4), item_bytes=8, axis=0, rims=(1, 1), depth=(1, 1))
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
    rims: list[Range] = []
    for each in inputs:
        if each.axis is None:
            reads.append(None)
            rims.append((0, 0))
            continue
        at = each.rims[0]  # where the own elements of the block begin in it
        start = max(0, at + own[0] - each.depth[0])
        stop = min(at + length + each.rims[1], at + own[1] + each.depth[1])
        reads.append((start, stop))
        rims.append((at + own[0] - start, stop - at - own[1]))
    return Part(own, tuple(reads), tuple(rims))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Step(NamedTuple):
    """Something that is done with one part, or given to a stream to be done."""

    #: "fill": threads of the host begin to copy the part into pinned memory, and "up" waits for
    #: them. "up", "run", "down": on a stream each. "empty": threads copy the result out of pinned
    #: memory.
    what: str
    part: int
    #: Steps of other timelines that have to be done before: the host waits for these before "fill"
    #: and "empty", and the step's stream before the others. Where copies need no pinned memory
    #: between, there is no "fill" or no "empty", and with it no waiting of the host.
    after: tuple[tuple[str, int], ...] = ()


def steps(
    count: int,  # of parts
    #: At least 2. Each holds a part from its way up until its result is down, since a result may
    #: lie in the memory of the part that it was made of.
    slots: int,
    is_reduced: bool = False,  # whether only what was made of all parts goes down
) -> Iterator[Step]:
    """Yield the steps of so many parts in the order in which the host does them, or issues them.

    A part goes up before the function is called for the one before it: a function that waits for
    its own work does not keep copies waiting. Threads begin to fill the next slot before that, and
    are at it meanwhile. The slot of a part is its number modulo `slots`.

    Examples
    --------
    >>> for step in steps(2, 2):
    ...     print(step.what, step.part, step.after)
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
            # The part that had the slot before, if there was one.
            yield Step("fill", part, () if part < slots else (("up", part - slots),))
        if 0 <= (part := number - 1) < count:
            yield Step("up", part, () if part < slots else ((freed, part - slots),))
        if 0 <= (part := number - 2) < count:
            yield Step("run", part, (("up", part),))
            if part == last or not is_reduced:
                yield Step("down", part, (("run", part),))
        if 0 <= (part := number - 3) < count and (part == last or not is_reduced):
            yield Step("empty", part, (("down", part),))
