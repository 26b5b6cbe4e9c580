"""All outputs of a section: checks of the argument, and the division of returned values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan, prod
from typing import Any, NamedTuple

import numpy as np

from dask_p2p import inputs
from dask_p2p.backends.base import check_plain
from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.geometry import Index, box_slices
from dask_p2p.graph import is_dask_array
from dask_p2p.plans.ranks import RankGrid, distribute_alike
from dask_p2p.sections.exchange.redistribution import checked_shape
from dask_p2p.sections.exchange.values import as_numbers
from dask_p2p.types import DType, DTypeLike


@dataclass(frozen=True)
class Outputs:
    """The outputs of a function: one, several in order, or several by name."""

    specs: tuple[Output, ...]
    names: tuple[str, ...] | None = None  # None: the function returns the only output, or a tuple
    labels: tuple[str, ...] = ("the output",)  # for errors, without names
    is_sequence: bool = False  # the caller gave a sequence of outputs

    def values(self, ctx: Any, returned: Any) -> Sequence[Any]:
        """Return the values for the outputs. Raises `BlockMismatchError` if they differ."""
        if self.names is None:
            return self._in_order(ctx, returned)
        returned_names = set(returned) if isinstance(returned, Mapping) else set()
        if returned_names != {*self.names}:
            returned_text = (
                sorted(map(str, returned_names)) if returned_names else type(returned).__name__
            )
            raise BlockMismatchError(
                f"expected a dict of {', '.join(self.names)} from the function on rank {ctx.rank}, "
                f"got {returned_text}. Return a value for each name in outputs=."
            )
        return [returned[name] for name in self.names]

    def _in_order(self, ctx: Any, returned: Any) -> Sequence[Any]:
        """Return the values from a tuple, or the rows of an array; or the only value."""
        count, is_array = len(self.specs), isinstance(returned, ctx.device.module.ndarray)
        if count == 1 and not self.is_sequence:
            return [returned]
        has_rows = is_array and returned.shape[:1] == (count,) and not self.is_sequence
        values = returned if has_rows or isinstance(returned, (tuple, list)) else (returned,)
        if len(values) != count:
            raise BlockMismatchError(
                f"expected a tuple of {', '.join(self.labels)} from the function on rank "
                f"{ctx.rank}, got {len(values)} in all. Return all of them in one tuple."
            )
        return values

    def blocks(self, ctx: Any, ranks: RankGrid, returned: Any) -> list[list[Any]]:
        """Return a rank's blocks, by output."""
        values, names = self.values(ctx, returned), self.names or self.labels
        of_each = zip(self.specs, values, names, strict=True)
        return [output.blocks(ctx, ranks, value, name) for output, value, name in of_each]


def checked_outputs(outputs: Any, dtypes: Sequence[Any]) -> Outputs:
    """Return outputs with their dtypes; `dtypes` are those of the section's arrays.

    Raises `InputError` if `outputs` is no output, and no mapping or sequence of outputs.
    """
    if isinstance(outputs, Output):
        return Outputs((_with_dtype(outputs, 0, dtypes),))
    is_sequence = isinstance(outputs, (list, tuple)) and outputs
    if is_sequence and all(isinstance(output, Output) for output in outputs):
        in_order = tuple(_with_dtype(output, at, dtypes) for at, output in enumerate(outputs))
        labels = tuple(f"output {number}" for number, _ in enumerate(outputs))
        return Outputs(in_order, labels=labels, is_sequence=True)
    by_name = dict(outputs) if isinstance(outputs, Mapping) else {}
    if not by_name or not all(
        isinstance(name, str) and isinstance(output, Output) for name, output in by_name.items()
    ):
        raise InputError(
            f"outputs: expected a number of outputs, one of LocalBlock, Array, Rows, PerRank, "
            f"Same, or a list of these, or a dict of these by name, got {outputs!r}. Give one, "
            f'{{"u": LocalBlock()}}.'
        )
    each = [_with_dtype(output, at, dtypes) for at, output in enumerate(by_name.values())]
    return Outputs(tuple(each), tuple(by_name))


def outputs_in_order(dtypes: Sequence[Any], converts: bool, examples: Sequence[Any]) -> Outputs:
    """Return outputs of local blocks by dtype, and then of values that are like examples.

    Without `converts`, the local blocks may only change the precision of floats.
    """
    local_blocks = [_local_block(dtype, converts) for dtype in dtypes]
    labels = [f"output {number}" for number, _ in enumerate(dtypes)]
    labels += [f"per_rank[{number}]" for number, _ in enumerate(examples)]
    return Outputs((*local_blocks, *map(PerRank, examples)), labels=tuple(labels))


def _with_dtype(output: Output, position: int, dtypes: Sequence[Any]) -> Output:
    if not isinstance(output, LocalBlock):
        return output
    if not dtypes:
        raise InputError(
            "outputs: expected Array, Rows, PerRank or Same without arrays, got LocalBlock. Give "
            "the shape, Array(shape, dtype)."
        )
    if output.dtype is not None:
        return replace(output, dtype=checked_dtype(output.dtype))
    return _local_block(dtypes[position if position < len(dtypes) else 0], converts=False)


def _local_block(dtype: Any, converts: bool) -> LocalBlock:
    output = LocalBlock(np.dtype(dtype))
    object.__setattr__(output, "converts", converts)
    return output


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

    See Also
    --------
    Array, Rows, PerRank, Same : Outputs of other shapes.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_p2p import LocalBlock, Same, spmd
    >>> def halves(ctx, x):
    ...     return {"half": x / 2, "sum": ctx.allreduce(x.sum())}
    >>> outputs = {"half": LocalBlock(), "sum": Same(0.0)}
    >>> y = spmd(halves, da.ones(8, chunks=4), outputs=outputs)
    >>> y["half"].chunks, float(y["sum"].compute(scheduler="sync"))
    (((4, 4),), 8.0)
    """

    dtype: DTypeLike | None = None
    converts: bool = field(default=True, init=False, repr=False)

    def chunks(self, ranks: RankGrid) -> tuple[tuple[float, ...], ...]:
        return ranks.chunks

    def indices(self, ranks: RankGrid, rank: int) -> list[Index]:
        return [index for index, _ in ranks.blocks(rank)]

    def blocks(self, ctx: Any, ranks: RankGrid, value: Any, name: str) -> list[Any]:
        local_block = checked_array(
            ctx, value, name, ranks.shape(ctx.rank), self.dtype, self.converts
        )
        boxes = [box_slices(box) for _, box in ranks.blocks(ctx.rank)]
        return [ctx.device.block(local_block[box], self.dtype) for box in boxes]

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
        If `shape` is no shape, or `dtype` holds Python objects.

    See Also
    --------
    dask_p2p.results.Context.grid_of : The division of a shape.

    Examples
    --------
    >>> from dask_p2p import Array, spmd
    >>> def zeros(ctx):
    ...     return ctx.grid_of((4,)).zeros()
    >>> spmd(zeros, outputs=Array((4,), float), ranks=1).compute()
    array([0., 0., 0., 0.])
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
        local_sizes = distribute_alike(ranks, self.shape).local_sizes
        return tuple(tuple(filter(None, sizes)) for sizes in local_sizes)

    def indices(self, ranks: RankGrid, rank: int) -> list[Index]:
        grid = distribute_alike(ranks, self.shape)
        if self._is_empty:
            return [(0,) * len(self.shape)] if rank == 0 else []
        if not prod(grid.shape(rank)):
            return []
        before = zip(grid.local_sizes, grid.indices[rank], strict=True)
        return [tuple(sum(map(bool, sizes[:at])) for sizes, at in before)]

    def blocks(self, ctx: Any, ranks: RankGrid, value: Any, name: str) -> list[Any]:
        shape = distribute_alike(ranks, self.shape).shape(ctx.rank)
        local_block = checked_array(ctx, value, name, shape, self.dtype)
        if self._is_empty:
            local_block = ctx.device.empty(self.shape, self.dtype)
        count = len(self.indices(ranks, ctx.rank))
        return [ctx.device.block(local_block, self.dtype)] * count

    def size_bytes(self, ranks: RankGrid, rank: int) -> int:
        shape = distribute_alike(ranks, self.shape).shape(rank)
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
        If `shape` is no shape, or `dtype` holds Python objects.

    See Also
    --------
    PerRank : The same shape from each rank.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_p2p import Rows, spmd
    >>> y = spmd(lambda ctx, x: x[x > 2], da.arange(6), outputs=Rows(int))
    >>> y.compute(scheduler="sync")
    array([3, 4, 5])
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
        rows = checked_array(ctx, value, name, (None, *self.shape), self.dtype)
        return [ctx.device.block(rows, self.dtype)]


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
        dtype: DType = self.example.dtype
        return dtype


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

    See Also
    --------
    Same : One value of all ranks.

    Examples
    --------
    >>> from dask_p2p import PerRank, spmd
    >>> spmd(lambda ctx: ctx.rank, outputs=PerRank(0), ranks=1).compute()
    array([0])
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

    See Also
    --------
    PerRank : The values of all ranks.

    Examples
    --------
    >>> from dask_p2p import Same, spmd
    >>> y = spmd(lambda ctx: ctx.size, outputs=Same(0), ranks=1)
    >>> int(y.compute())
    1
    """

    example: Any

    def chunks(self, ranks: RankGrid) -> tuple[tuple[float, ...], ...]:
        return tuple((length,) for length in self.example.shape)

    def indices(self, ranks: RankGrid, rank: int) -> list[Index]:
        return [(0,) * len(self.example.shape)] if rank == 0 else []

    def blocks(self, ctx: Any, ranks: RankGrid, value: Any, name: str) -> list[Any]:
        block = checked_value(ctx, value, name, self.example)
        return [block] if ctx.rank == 0 else []


def checked_dtype(dtype: Any) -> DType:
    """Return a dtype. Raises `InputError` for others, and if its elements are Python objects."""
    numpy_dtype: DType = inputs.checked_dtype("dtype", dtype)
    if numpy_dtype.hasobject:
        raise InputError(
            f"dtype: expected one without Python objects, got {dtype!r:.80}. Give a dtype of "
            f"numbers."
        )
    return numpy_dtype


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


def shape_of(name: str, array: Any, kind: Any = np.ndarray) -> tuple[int, ...] | str:
    """Return the shape of a returned value, or its type if it is no array.

    Raises `UnsupportedArrayError` if the array is more than its elements.
    """
    check_plain(name, array)
    if isinstance(array, (kind, np.generic)):
        shape: tuple[int, ...] = array.shape
        return shape
    module = "" if kind is np.ndarray else f"{type(array).__module__}."  # perhaps NumPy's own
    return f"{module}{type(array).__name__}"


def becomes(value_dtype: DType, dtype: DType, converts: bool) -> bool:
    """Return whether a returned dtype may be converted to the declared one.

    Without `converts`, as without a dtype from the caller, floats may only change their precision.
    """
    if converts or value_dtype.kind == dtype.kind in "fc":
        return np.can_cast(value_dtype, dtype, "same_kind")
    return value_dtype.kind == dtype.kind and np.can_cast(value_dtype, dtype, "safe")


def holds(dtype: DType, array: Any) -> bool:
    """Return whether a dtype holds the values of an array, apart from the precision of floats."""
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        return False
    return dtype.kind not in "biu" or bool((array.astype(dtype) == array).all())


def checked_array(
    ctx: Any, value: Any, name: str, shape: tuple[Any, ...], dtype: Any, converts: bool = True
) -> Any:
    """Return a returned array of a shape, where None is any length."""
    value_shape = shape_of(name, value, ctx.device.module.ndarray)
    lengths = value_shape if isinstance(value_shape, tuple) else (-1,)
    has_shape = len(lengths) == len(shape) and all(
        length in (None, value_length) for length, value_length in zip(shape, lengths, strict=True)
    )
    if not has_shape or isinstance(value_shape, str):
        text = str(shape).replace("None", "any number")
        raise BlockMismatchError(
            f"{name}: expected an array of shape {text} from the function on rank {ctx.rank}, got "
            f"{value_shape}. Return this rank's part of the output."
        )
    if not becomes(value.dtype, dtype, converts):
        raise BlockMismatchError(
            f"{name}: expected an array that becomes {dtype} from the function on rank "
            f"{ctx.rank}, got {value.dtype}. Give the output dtype={str(value.dtype)!r}, or "
            f"convert the array, astype(...)."
        )
    return value


def checked_value(ctx: Any, value: Any, name: str, example: Any) -> Any:
    """Return a returned value that is like an example."""
    check_plain(name, value)
    array = as_numbers(ctx.device.to_host(value))
    if array.shape != example.shape or not holds(example.dtype, array):
        raise BlockMismatchError(
            f"{name}: expected a value of shape {example.shape} that becomes {example.dtype} from "
            f"the function on rank {ctx.rank}, got {array.shape} {array.dtype}."
        )
    return array.astype(example.dtype)
