"""Redistribution: local blocks of one partition become those of another, by exchanges of a gang."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import index
from typing import Any, TypeVar

from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.geometry import Box, normalize_axes
from dask_p2p.plans.ranks import (
    Exchange,
    RankGrid,
    distribute_array,
    partition_of,
    plan_rank_exchange,
)
from dask_p2p.sections.exchange.device import HOST, Host, check_kind
from dask_p2p.sections.exchange.regions import ExchangeCall
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array, DType

_T = TypeVar("_T")


class Partitions:
    """Partitions of a gang's arrays, and the exchanges between partitions."""

    def __init__(
        self,
        ranks: RankGrid,  # partition of the section's arrays
        rank: int,
        connections: Connections,  # connections to other ranks
        reads_memory: bool = True,  # whether ranks of one host may read each other's memory
        device: Host = HOST,  # device of the local blocks
    ) -> None:
        self._ranks, self._rank, self._device = ranks, rank, device
        self._regions = device.region_mover(connections, reads_memory)
        self._cache: dict[str, Any] = {}
        self.shape = tuple(map(sum, ranks.chunks))

    def shape_of(self, shape: Any) -> tuple[int, ...]:
        """Return the shape of an array; None: that of the section's arrays."""
        return self.shape if shape is None else checked_shape(shape)

    def ranks(
        self,
        partition: Any,  # axes that may be divided; None: those divided in the section's arrays
        shape: Any = None,  # shape of the array; None: that of the section's arrays
        name: str = "partition",  # parameter name of `partition`, for errors
    ) -> RankGrid:
        """Return the partition of an array.

        Raises `InputError` if the array has no such axes, or for an invalid shape.
        """
        global_shape = self.shape_of(shape)
        try:
            grid = partition_of(self._ranks) if partition is None else tuple(map(index, partition))
        except TypeError:
            grid = (len(global_shape),)
        if any(axis not in range(-len(global_shape), len(global_shape)) for axis in grid):
            raise InputError(
                f"{name}: expected a sequence of axes of an array of {len(global_shape)} "
                f"dimensions, got {partition!r}."
            )
        axes = {axis % len(global_shape) for axis in grid}
        if self._ranks.size > 1 and not axes:
            raise InputError(
                f"{name}: expected at least one axis that is divided between "
                f"{self._ranks.size} ranks, got {partition!r}."
            )
        return distribute_array(self._ranks, global_shape, tuple(sorted(axes)))

    def redistribution(
        self, partition: Any = None, from_partition: Any = None, axes: Any = None, shape: Any = None
    ) -> Redistribution:
        key = repr((partition, from_partition, axes, shape))
        return self.once(key, lambda: self._planned(partition, from_partition, axes, shape))

    def once(self, key: str, make: Callable[[], _T]) -> _T:
        """Return the object made for a request, cached by its text."""
        if key not in self._cache:
            self._cache[key] = make()
        cached: _T = self._cache[key]
        return cached

    def settle(self) -> None:
        """Complete the exchanges that were begun: see `Redistribution.begin`."""
        self._regions.settle()

    def _planned(
        self, partition: Any, from_partition: Any, axes: Any, shape: Any
    ) -> Redistribution:
        local_shape = self.shape
        ndim = len(self.shape_of(shape))
        order = tuple(range(ndim)) if axes is None else normalize_axes(axes, ndim)
        if order is None:
            raise InputError(f"axes: expected a permutation of {ndim} axes, got {axes!r}.")
        if (
            shape is None and partition is None and from_partition is not None
        ):  # back to the section's shape
            shape = [local_shape[order.index(axis)] for axis in range(ndim)]
        before = self.ranks(from_partition, shape, "from_partition")
        global_shape = tuple(map(sum, before.local_sizes))
        after = self.ranks(partition, [global_shape[axis] for axis in order])
        return self.between(before, after, order)

    def between(
        self,
        before: RankGrid,  # partition of the array
        after: RankGrid,  # partition of the array with permuted axes
        axes: tuple[int, ...],  # axis i of `after` is axis axes[i] of `before`
        name: str = "redistribute()",  # name of the call
        order: Sequence[int] | None = None,  # axis i of the result is axis order[i] of `after`
    ) -> Redistribution:
        """Return the exchange between two partitions, with permuted axes."""
        global_shape = tuple(map(sum, before.local_sizes))
        call = f"{name} of {global_shape}, {before.grid} to {after.grid}, axes {axes}"
        exchange = plan_rank_exchange(before, after, axes, self._rank, order)
        mean_elements = prod(global_shape) // before.size**2
        longest = [max(lengths, default=0) for lengths in before.local_sizes]
        after_longest = [max(lengths, default=0) for lengths in after.local_sizes]
        most_elements = prod(min(longest[axis], after_longest[n]) for n, axis in enumerate(axes))
        sizes = mean_elements, most_elements
        return Redistribution(exchange, call, *sizes, self._regions, self._device)


@dataclass(frozen=True)
class Redistribution:
    """Reusable exchange from the local blocks of one partition to those of another."""

    exchange: Exchange  # sends and receives of this rank
    call: str  # text of the call, the same on all ranks
    mean_elements: int  # mean number of elements from one rank to another
    most_elements: int  # upper bound of it, for any two ranks
    regions: Any  # of `Host.region_mover`: moves the data
    device: Host = HOST  # device of the local blocks

    def __call__(self, local_block: Any, out: Array | None = None, order: str = "auto") -> Array:
        """Return this rank's local block of the new partition, from that of the old one.

        Raises `InputError` for an unsuitable `local_block` or `out`, and `SectionError` if the
        ranks made different calls.
        """
        finish = self.begin(local_block, out, order)
        self.regions.settle()
        return finish

    def begin(self, local_block: Any, out: Array | None = None, order: str = "auto") -> Array:
        """Begin the exchange: `local_block` must not change until `Partitions.settle`.

        On a GPU, `local_block` may be `Pieces`.
        """
        if not isinstance(local_block, Pieces):
            local_block = self.device.as_array(local_block)
            self.check(local_block)
        if out is None:
            out = self.device.empty(self.exchange.after, local_block.dtype)
        else:
            self._check_out(out, local_block)
        text = f"{self.call}, {local_block.dtype}"
        sizes = self.mean_elements, self.most_elements
        call = ExchangeCall(text, local_block.dtype, self.exchange, order, *sizes)
        self.regions.bring(call, local_block, out)
        return out

    def check(self, local_block: Array) -> None:
        """Raise an error unless `local_block` is this rank's local block of the old partition."""
        try:
            check_kind(self.device, "a", local_block)
        except UnsupportedArrayError as exc:
            raise UnsupportedArrayError(f"a: {exc}") from None
        if local_block.dtype.hasobject:
            raise InputError(
                f"a: expected elements of a fixed size, got dtype {local_block.dtype}. Ranks "
                f"cannot exchange Python objects. Convert the array to numbers."
            )
        shape = self.exchange.before
        if local_block.shape != shape:
            raise InputError(
                f"a: expected an array of shape {shape}, as this rank's local block, "
                f"got one of shape {local_block.shape}. Give from_partition= for another "
                f"partition, and shape= if the whole array has another shape than the section's "
                f"arrays."
            )

    def _check_out(self, out: Any, local_block: Array) -> None:
        shape, dtype = self.exchange.after, local_block.dtype
        module = self.device.module
        if not isinstance(out, module.ndarray) or (out.shape, out.dtype) != (shape, dtype):
            actual = getattr(out, "shape", type(out).__name__), getattr(out, "dtype", "no dtype")
            raise InputError(
                f"out: expected an array of shape {shape} and dtype {dtype}, got {actual[0]} and "
                f"{actual[1]}."
            )
        is_fixed = not getattr(out.flags, "writeable", True)  # CuPy has no such flag
        if is_fixed or module.may_share_memory(out, local_block):
            raise InputError(
                "out: expected a writable array that shares no memory with a. Give another array."
            )


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return lengths of axes as integers. Raises `InputError` for an invalid shape."""
    try:
        lengths = tuple(map(index, shape))
    except TypeError:
        lengths = (-1,)
    if min(lengths, default=0) < 0:
        raise InputError(
            f"shape: expected lengths of axes, at least 0, got {shape!r:.80}. Give a tuple, (3, 4)."
        )
    return lengths


MOST_PIECES = 8


@dataclass(frozen=True)
class Pieces:
    """A local block that is computed in pieces along one of its axes."""

    dtype: DType
    axis: int  # that is divided into pieces
    bounds: tuple[int, ...]  # of at most `MOST_PIECES` pieces
    make: Callable[[int], Array]  # makes a piece by its number: once for each, in order

    @classmethod
    def one(cls, local_block: Array) -> Pieces:
        ends = (0, local_block.shape[0] if local_block.ndim else 1)
        return cls(local_block.dtype, 0, ends, lambda _: local_block)

    def intersect(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yield the pieces of a box: number, part in the piece's indices, and in the box's."""
        if not box:
            yield 0, box, box
            return
        start, stop = box[self.axis]
        for number, (low, high) in enumerate(pairwise(self.bounds)):
            first, end = max(start, low), min(stop, high)
            if first < end:
                inside = tuple((0, hi - lo) for lo, hi in box)
                yield (
                    number,
                    along(self.axis, box, (first - low, end - low)),
                    along(self.axis, inside, (first - start, end - start)),
                )


def along(axis: int, box: Box, bounds: tuple[int, int]) -> Box:
    """Return a box with its bounds along one axis replaced."""
    return (*box[:axis], bounds, *box[axis + 1 :])
