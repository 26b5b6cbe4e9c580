"""Kinds of outputs of `spmd`, each with its division between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan, prod
from typing import Any, NamedTuple

import numpy as np

from dask_p2p import inputs
from dask_p2p.errors import InputError
from dask_p2p.geometry import Index, box_slices
from dask_p2p.graph.libraries import is_dask_array
from dask_p2p.plans.partitions import divided_alike
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.api.returned import checked_array, checked_value
from dask_p2p.sections.exchange.redistribution import checked_shape
from dask_p2p.types import DType, DTypeLike


class Output(ABC):
    """One array that the function of `spmd` returns."""

    is_numpy = False  # whether its blocks are of NumPy, also on GPUs
    dtype: Any

    @abstractmethod
    def chunks(self, ranks: RankGrid) -> tuple[tuple[float, ...], ...]:
        """Return the chunks of the array."""

    @abstractmethod
    def indices(self, ranks: RankGrid, rank: int) -> list[Index]:
        """Return the indices of the blocks that a rank returns."""

    @abstractmethod
    def blocks(self, ctx: Any, ranks: RankGrid, value: Any, name: str) -> list[Any]:
        """Return a rank's blocks. Raises `BlockMismatchError` if the value does not fit."""

    def size_bytes(self, ranks: RankGrid, rank: int) -> int:
        """Return the size of a rank's blocks, as far as it is known before."""
        return 0


@dataclass(frozen=True)
class LocalBlock(Output):
    """An array with the shape and chunks of the section's arrays. Ranks return their local blocks.

    Parameters
    ----------
    dtype : dtype, optional
        Data type of the array. Returned arrays are converted to it as by `numpy.can_cast` with
        "same_kind". By default output i has the dtype of array i, or of the first array if there is
        no such array; only the precision of floats is converted.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_p2p import LocalBlock, Same, spmd
    >>> def halves(ctx, x):
    ...     return {"half": x / 2, "sum": ctx.allreduce(x.sum())}
    >>> made = spmd(halves, da.ones(8, chunks=4), outputs={"half": LocalBlock(), "sum": Same(0.0)})
    >>> float(made["sum"].compute(scheduler="sync"))
    8.0
    """

    dtype: DTypeLike | None = None
    converts: bool = field(default=True, init=False, repr=False)

    def chunks(self, ranks: RankGrid) -> tuple[tuple[float, ...], ...]:
        return ranks.chunks

    def indices(self, ranks: RankGrid, rank: int) -> list[Index]:
        return [index for index, _ in ranks.blocks(rank)]

    def blocks(self, ctx: Any, ranks: RankGrid, value: Any, name: str) -> list[Any]:
        own = checked_array(ctx, value, name, ranks.shape(ctx.rank), self.dtype, self.converts)
        boxes = [box_slices(box) for _, box in ranks.blocks(ctx.rank)]
        return [ctx.device.block(own[box], self.dtype) for box in boxes]

    def size_bytes(self, ranks: RankGrid, rank: int) -> int:
        return prod(ranks.shape(rank)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Array(Output):
    """An array of any shape, divided between the ranks as ``ctx.grid_of(shape)`` divides it.

    Parameters
    ----------
    shape : sequence of int
        Shape of the whole array.
    dtype : dtype
        Data type of the array.

    Raises
    ------
    InputError
        If `shape` is no shape.
    """

    shape: Sequence[int]
    dtype: DTypeLike

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape))
        object.__setattr__(self, "dtype", checked_dtype(self.dtype))
        if not self.shape:
            raise InputError("shape: expected at least one axis, got (). Give Same(example).")

    @property
    def _is_empty(self) -> bool:
        return not prod(self.shape)

    def chunks(self, ranks: RankGrid) -> tuple[tuple[float, ...], ...]:
        if self._is_empty:
            return tuple((length,) for length in self.shape)
        # Dask's reductions fail on empty blocks.
        return tuple(tuple(filter(None, n)) for n in divided_alike(ranks, self.shape).local_sizes)

    def indices(self, ranks: RankGrid, rank: int) -> list[Index]:
        own = divided_alike(ranks, self.shape)
        if self._is_empty:
            return [(0,) * len(self.shape)] if rank == 0 else []
        if not prod(own.shape(rank)):
            return []
        before = zip(own.local_sizes, own.indices[rank], strict=True)
        return [tuple(sum(map(bool, sizes[:at])) for sizes, at in before)]

    def blocks(self, ctx: Any, ranks: RankGrid, value: Any, name: str) -> list[Any]:
        shape = divided_alike(ranks, self.shape).shape(ctx.rank)
        own = checked_array(ctx, value, name, shape, self.dtype)
        if self._is_empty:
            own = ctx.device.empty(self.shape, self.dtype)
        count = len(self.indices(ranks, ctx.rank))
        return [ctx.device.block(own, self.dtype)] * count

    def size_bytes(self, ranks: RankGrid, rank: int) -> int:
        shape = divided_alike(ranks, self.shape).shape(rank)
        return prod(shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Rows(Output):
    """An array of rows, any number from each rank, in order of rank: particles, events, points.

    The lengths of its chunks along axis 0 are unknown to Dask, until ``compute_chunk_sizes()``.

    Parameters
    ----------
    dtype : dtype
        Data type of the array.
    shape : sequence of int, optional
        Shape of one row. By default rows are numbers.

    Raises
    ------
    InputError
        If `shape` is no shape.
    """

    dtype: DTypeLike
    shape: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape))
        object.__setattr__(self, "dtype", checked_dtype(self.dtype))

    def chunks(self, ranks: RankGrid) -> tuple[tuple[float, ...], ...]:
        return ((nan,) * ranks.size, *((length,) for length in self.shape))

    def indices(self, ranks: RankGrid, rank: int) -> list[Index]:
        return [(rank, *(0 for _ in self.shape))]

    def blocks(self, ctx: Any, ranks: RankGrid, value: Any, name: str) -> list[Any]:
        own = checked_array(ctx, value, name, (None, *self.shape), self.dtype)
        return [ctx.device.block(own, self.dtype)]


class _Like(NamedTuple):
    """The properties of an example: series of millions of steps must not travel with each task."""

    shape: tuple[int, ...]
    dtype: DType


class _OfExample(Output):
    """An output of NumPy values that are like an example, which is replaced by its properties."""

    example: Any
    is_numpy = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "example", _checked_example(self.example))

    @property
    def dtype(self) -> DType:
        """Data type of the values."""
        found: DType = self.example.dtype
        return found


@dataclass(frozen=True)
class PerRank(_OfExample):
    """An array with one value of each rank, along a new first axis.

    Parameters
    ----------
    example : number or numpy.ndarray
        A value of the shape and dtype that each rank returns.

    Raises
    ------
    InputError
        If `example` holds no numbers.
    """

    example: Any

    def chunks(self, ranks: RankGrid) -> tuple[tuple[float, ...], ...]:
        return ((1,) * ranks.size, *((length,) for length in self.example.shape))

    def indices(self, ranks: RankGrid, rank: int) -> list[Index]:
        return [(rank, *(0 for _ in self.example.shape))]

    def blocks(self, ctx: Any, ranks: RankGrid, value: Any, name: str) -> list[Any]:
        return [checked_value(ctx, value, name, self.example)[np.newaxis]]


@dataclass(frozen=True)
class Same(_OfExample):
    """One value that all ranks have: that of rank 0.

    Parameters
    ----------
    example : number or numpy.ndarray
        A value of its shape and dtype.

    Raises
    ------
    InputError
        If `example` holds no numbers.
    """

    example: Any

    def chunks(self, ranks: RankGrid) -> tuple[tuple[float, ...], ...]:
        return tuple((length,) for length in self.example.shape)

    def indices(self, ranks: RankGrid, rank: int) -> list[Index]:
        return [(0,) * len(self.example.shape)] if rank == 0 else []

    def blocks(self, ctx: Any, ranks: RankGrid, value: Any, name: str) -> list[Any]:
        own = checked_value(ctx, value, name, self.example)
        return [own] if ctx.rank == 0 else []


def checked_dtype(dtype: Any) -> DType:
    """Return a dtype. Raises `InputError` for others, and if its elements are Python objects."""
    found: DType = inputs.checked_dtype("dtype", dtype)
    if found.hasobject:
        raise InputError(
            f"dtype: expected one without Python objects, got {dtype!r:.80}. Give a dtype of "
            f"numbers."
        )
    return found


def _checked_example(example: Any) -> _Like:
    if isinstance(example, _Like):  # of a copy, by dataclasses.replace
        return example
    value = np.asarray(example)
    if is_dask_array(example) or value.dtype.kind in "OSU":
        raise InputError(
            f"expected a number or a NumPy array as an example, got {type(example).__name__}. Give "
            f"a value of the shape and dtype that the function returns."
        )
    return _Like(value.shape, value.dtype)
