"""What the blocks of `map_on_gpu` have in common: a function, and how blocks are cut for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from dask_p2p.config import Options, options
from dask_p2p.geometry import Chunks, Index, block_shape
from dask_p2p.plans.parts import Input, PartPlan, Range, plan_parts
from dask_p2p.types import DType, Kind
from dask_p2p.versioned import versioned

logger = logging.getLogger(__name__)

OPERATION = "p2p-on-gpu"  # what Dask calls its tasks


# Copies and the function overlap the better the more parts there are, as long as these take much
# longer than the host takes to issue a step.
_PARTS = 8  # of a block, at least
_LEAST_PART_BYTES = 2**24  # which go up in 0.33 ms; the host takes as long to issue all steps


def run_name(key: Any) -> Any:
    """Return the name of a task's array: of `map_on_gpu` that of its own.

    Dask fuses such a task with what makes its input, and has both names in that of the new one.
    """
    name = key[0] if isinstance(key, tuple) else key
    start = name.find(OPERATION) if isinstance(name, str) else -1
    return name[start:] if start > 0 else name


def is_of_parts(key: Any) -> bool:
    """Return whether a task of this key makes a block of `map_on_gpu`."""
    return str(run_name(key)).startswith(OPERATION)


@versioned()
@dataclass(frozen=True)
class Argument:
    """An array that is read. Its axes are the last ones of the output."""

    chunks: Chunks  # without rims
    dtype: DType
    depth: tuple[Range, ...]  # by axis, before and after: widths that the function wants to see
    rims: tuple[tuple[Range, ...], ...]  # by axis, and block along it: widths that the block has

    def place(self, index: Index) -> Index:
        """Return which of its blocks goes with a block of the output."""
        own = index[len(index) - len(self.chunks) :]
        return tuple(i if len(sizes) > 1 else 0 for i, sizes in zip(own, self.chunks, strict=True))

    def shape(self, index: Index) -> tuple[int, ...]:
        """Return the shape of that block, with its rims."""
        place = self.place(index)
        sizes = block_shape(self.chunks, place)
        rims = (along[i] for along, i in zip(self.rims, place, strict=True))
        return tuple(n + before + after for n, (before, after) in zip(sizes, rims, strict=True))

    def own_axis(self, axis: int, sizes: Chunks) -> int | None:
        """Return which of its axes is this one of the output; None if it is broadcast along it."""
        own = axis - len(sizes) + len(self.chunks)
        is_whole = own < 0 or sum(self.chunks[own]) != sum(sizes[axis])
        return None if is_whole else own


@versioned(shared=True)  # one for all tasks of an array
@dataclass(frozen=True)
class Mapped:
    """A function of parts of blocks: what all blocks of an output have in common."""

    function: Callable[..., Any]  # takes a part of each array; it may overwrite what it gets
    arguments: tuple[Argument, ...]  # the arrays that are read
    axis: int  # of the output, along which blocks are cut
    sizes: Chunks  # that the arrays have together, without rims
    chunks: Chunks  # of the output
    dtype: DType  # of the output
    part_bytes: int  # that all inputs of a part take at most
    #: Combines the results of two parts; None if results are put one after another.
    reduce: Callable[[Any, Any], Any] | None = None
    fallback: Kind | None = None  # "numpy": without a GPU the function gets NumPy arrays
    has_block_id: bool = False  # whether the function is told the block's index
    options: Options = field(default_factory=options)

    def rims(self, axis: int, index: Index) -> Range:
        """Return the rims of the result along an axis: of the first array that has the axis."""
        for each in self.arguments:
            if (own := each.own_axis(axis, self.sizes)) is not None:
                return each.rims[own][each.place(index)[own]]
        return 0, 0

    def result_shape(self, index: Index, length: int) -> tuple[int, ...]:
        """Return the shape of what the function makes of a part so long, with its rims."""
        shape = list(block_shape(self.chunks, index))
        if self.reduce is None:
            shape = [n + sum(self.rims(axis, index)) for axis, n in enumerate(shape)]
            shape[self.axis] = length
        return tuple(shape)

    def plan(self, index: Index, part_bytes: int | None = None) -> PartPlan:
        """Return how the block of this index is cut."""
        inputs = []
        for each in self.arguments:
            own = each.own_axis(self.axis, self.sizes)
            rims = () if own is None else (each.rims[own][each.place(index)[own]], each.depth[own])
            inputs.append(Input(each.shape(index), each.dtype.itemsize, own, *rims))
        if part_bytes is None:
            block_bytes = sum(prod(each.shape) * each.item_bytes for each in inputs)
            part_bytes = min(self.part_bytes, max(_LEAST_PART_BYTES, block_bytes // _PARTS))
        plan = plan_parts(
            inputs,
            self.sizes[self.axis][index[self.axis]],
            part_bytes,
            prod(self.result_shape(index, 1)) * self.dtype.itemsize,
            is_reduced=self.reduce is not None,
        )
        has_rims = any(map(any, (width for each in self.arguments for width in each.depth)))
        return replace(plan, has_rims=has_rims and self.reduce is None)

    def largest_plans(self) -> Iterator[PartPlan]:
        """Yield plans of which one takes as much memory as any block does."""
        # As if all blocks had rims of their whole width; parts are cut alike.
        whole = tuple(
            replace(each, rims=tuple((width,) * len(sizes) for width, sizes in pairs))
            for each in self.arguments
            for pairs in [zip(each.depth, each.chunks, strict=True)]
        )
        along = (
            {sizes: i for i, sizes in enumerate(zip(*both, strict=True))}.values()
            for both in zip(self.sizes, self.chunks, strict=True)
        )
        return map(replace(self, arguments=whole).plan, product(*along))
