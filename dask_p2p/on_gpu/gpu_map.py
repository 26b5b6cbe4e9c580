"""The function of `map_on_gpu`, and the division of an array's blocks into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from dask_p2p.backends import SLOTS
from dask_p2p.config import Options, options
from dask_p2p.geometry import Chunks, Index, block_shape
from dask_p2p.ops.estimate import PartsEstimate
from dask_p2p.plans.parts import Input, PartPlan, Range, plan_parts
from dask_p2p.types import DType, Kind
from dask_p2p.versioned import versioned

# More parts overlap copies and function better, as long as a part takes much longer than the
# host needs to issue a step.
_PARTS = 8  # parts of a block, at least
_LEAST_PART_BYTES = 2**24  # copied in 0.33 ms, as long as the host needs for all steps


@versioned()
@dataclass(frozen=True)
class Argument:
    """An input array. Its axes are the last ones of the output."""

    chunks: Chunks  # without halo
    dtype: DType
    depth: tuple[Range, ...]  # by axis: halo widths before and after that the function requests
    halo: tuple[tuple[Range, ...], ...]  # by axis and by block along it: halo widths of the block

    def own_index(self, index: Index) -> Index:
        """Return the index of this array's block for an output block."""
        own = index[len(index) - len(self.chunks) :]
        return tuple(i if len(sizes) > 1 else 0 for i, sizes in zip(own, self.chunks, strict=True))

    def shape(self, index: Index) -> tuple[int, ...]:
        """Return the shape of this array's block for an output block, with its halo."""
        own_index = self.own_index(index)
        sizes = block_shape(self.chunks, own_index)
        halo = (along[i] for along, i in zip(self.halo, own_index, strict=True))
        return tuple(n + before + after for n, (before, after) in zip(sizes, halo, strict=True))

    def own_axis(self, axis: int, sizes: Chunks) -> int | None:
        """Return this array's axis for an axis of the output; None if it is broadcast along it."""
        own = axis - len(sizes) + len(self.chunks)
        is_whole = own < 0 or sum(self.chunks[own]) != sum(sizes[axis])
        return None if is_whole else own


@versioned(shared=True)  # one for all tasks of an array
@dataclass(frozen=True)
class GpuMap:
    """A function of parts of blocks, with the properties that all blocks of its output share."""

    function: Callable[..., Any]  # function of a part of each array; may overwrite its arguments
    arguments: tuple[Argument, ...]  # the input arrays
    axis: int  # axis of the output along which blocks are divided into parts

    sizes: Chunks  # common chunks of the broadcast arrays, without halo
    chunks: Chunks  # chunks of the output
    dtype: DType  # dtype of the output
    part_bytes: int  # upper bound of the input bytes of a part
    #: Function of the results of two parts. None: results are concatenated.
    reduce: Callable[[Any, Any], Any] | None = None
    fallback: Kind | None = None  # "numpy": NumPy arrays for the function if there is no GPU
    has_block_id: bool = False  # True if the function has a keyword ``block_id``
    options: Options = field(default_factory=options)

    def halo(self, axis: int, index: Index) -> Range:
        """Return the halo of the result along an axis, by the first array with this axis."""
        for each in self.arguments:
            if (own := each.own_axis(axis, self.sizes)) is not None:
                return each.halo[own][each.own_index(index)[own]]
        return 0, 0

    def result_shape(self, index: Index, length: int) -> tuple[int, ...]:
        """Return the shape of the function's result for a part of this length, with its halo."""
        shape = list(block_shape(self.chunks, index))
        if self.reduce is None:
            shape = [n + sum(self.halo(axis, index)) for axis, n in enumerate(shape)]
            shape[self.axis] = length
        return tuple(shape)

    def plan(self, index: Index, part_bytes: int | None = None) -> PartPlan:
        """Return the division of the block with this index into parts."""
        inputs = []
        for each in self.arguments:
            own = each.own_axis(self.axis, self.sizes)
            halo = (
                () if own is None else (each.halo[own][each.own_index(index)[own]], each.depth[own])
            )
            inputs.append(Input(each.shape(index), each.dtype.itemsize, own, *halo))
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
        has_halo = any(map(any, (width for each in self.arguments for width in each.depth)))
        return replace(plan, has_halo=has_halo and self.reduce is None)

    def estimate(self) -> PartsEstimate:
        """Return the peak GPU memory of one task."""
        plans = list(self.largest_plans())
        inputs, results = max((plan.device_bytes(SLOTS) for plan in plans), key=sum)
        return PartsEstimate(1, inputs, results, 0, 0, max(len(plan.parts) for plan in plans))

    def largest_plans(self) -> Iterator[PartPlan]:
        """Yield plans whose largest memory bounds that of every block."""
        # As if every block had a halo of full width. The division into parts is the same.
        whole = tuple(
            replace(each, halo=tuple((width,) * len(sizes) for width, sizes in pairs))
            for each in self.arguments
            for pairs in [zip(each.depth, each.chunks, strict=True)]
        )
        along = (
            {sizes: i for i, sizes in enumerate(zip(*both, strict=True))}.values()
            for both in zip(self.sizes, self.chunks, strict=True)
        )
        return map(replace(self, arguments=whole).plan, product(*along))
