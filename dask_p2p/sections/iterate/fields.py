"""Fields of `iterate`: checks of the user's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dask_p2p.backends import backend_for
from dask_p2p.backends.base import check_plain
from dask_p2p.errors import BlockMismatchError, InputError, UnsupportedArrayError
from dask_p2p.graph import check_one_library, functions_of, is_dask_array
from dask_p2p.inputs import checked_dtype, checked_flag
from dask_p2p.ops.arguments import check_array, checked_boundaries, checked_depths
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.api.graph import Whole, check_decompositions, check_input, check_same_kind
from dask_p2p.sections.api.outputs import LocalBlock
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.context.grids import OTHERS, Points, by_name, checked_points
from dask_p2p.sections.iterate.functions import AT, OUT
from dask_p2p.types import BoundaryLike, DaskArray, DepthLike, DType, DTypeLike


@dataclass(frozen=True)
class Field:
    """A field of `iterate` with options of its own.

    Parameters
    ----------
    value : dask.array.Array, list of them or number
        The initial field, or its time levels, the newest first. A number is the same on all ranks.
    depth : int, tuple, dict or list, optional
        Width of its halo; in a list one for each time level. By default that of `iterate`.
    boundary : str, scalar, tuple or dict, optional
        Values beyond the ends of the array. By default those of `iterate`.
    dtype : dtype, optional
        Dtype of the field and of the result. By default that of the array.
    corners : bool, optional
        Whether the halo includes corners. By default as in `iterate`.

    See Also
    --------
    iterate : Its errors are those of a field.

    Examples
    --------
    A field with a halo, and one without:

    >>> import dask.array as da
    >>> from dask_p2p import Field, iterate
    >>> def smooth(u, rate):
    ...     return {"u": rate * (u[:-2] + u[2:])}
    >>> u = Field(da.arange(4.0), depth=1, boundary="nearest")
    >>> y = iterate(smooth, {"u": u, "rate": 0.5}, depth=0, steps=1)
    >>> y["u"].compute(scheduler="sync")
    array([0.5, 1. , 2. , 2.5])
    """

    value: Any
    depth: DepthLike | None = None
    boundary: BoundaryLike | None = None
    dtype: DTypeLike | None = None
    corners: bool | None = None


@dataclass(frozen=True)
class FieldSpec:
    """One field: its halo, and its number of time levels."""

    name: str
    depths: tuple[tuple[tuple[int, int], ...], ...]  # of each time level
    boundary: tuple[Any, ...]
    corners: bool
    dtype: DType
    is_list: bool  # whether the result is a list of time levels
    is_constant: bool = False  # a constant with a halo
    extra: tuple[int, ...] = ()  # by axis: by how much it is longer than the first field

    @property
    def widest(self) -> tuple[tuple[int, int], ...]:
        """Width of all halos: a level gets its halo when it is the newest, and keeps it."""
        by_axis = zip(*self.depths, strict=True)
        return tuple((max(b for b, _ in sides), max(a for _, a in sides)) for sides in by_axis)


@dataclass(frozen=True)
class FieldOutput(LocalBlock):
    """A field as an output of the section."""

    extra: tuple[int, ...] = ()  # by axis: by how much it is longer than the first field
    shares_memory: bool = False  # whether a rank's only block is its local block, and no copy

    def chunks(self, ranks: RankGrid) -> tuple[tuple[float, ...], ...]:
        return ranks.extend(self.extra).chunks

    def blocks(self, ctx: Any, ranks: RankGrid, value: Any, name: str) -> list[Any]:
        ranks = ranks.extend(self.extra)
        if (
            self.shares_memory
            and value.flags.c_contiguous
            and len(self.indices(ranks, ctx.rank)) == 1
        ):
            return [value]
        return super().blocks(ctx, ranks, value, name)

    def size_bytes(self, ranks: RankGrid, rank: int) -> int:
        return super().size_bytes(ranks.extend(self.extra), rank)


def check_fields(of_all: Field) -> tuple[list[FieldSpec], list[DaskArray], dict[str, Any]]:
    """Return the specs of a mapping of fields, their arrays, and the numbers by name."""
    fields: Mapping[str, Any] = of_all.value
    if not fields:
        raise InputError("expected at least one field, {'u': u}, got an empty mapping.")
    for name in fields:
        check_name(name, "a field")
    depths = by_name("depth", of_all.depth, fields, 0)
    boundaries = by_name("boundary", of_all.boundary, fields)
    specs, scalars, without = [], dict[str, Any](), list[str]()
    arrays: list[DaskArray] = []
    for name, value in fields.items():
        field = value if isinstance(value, Field) else Field(value)
        is_number = isinstance(field.value, (bool, int, float, complex, np.number, np.bool_))
        if is_number or (isinstance(field.value, np.ndarray) and not field.value.ndim):
            scalars[name] = checked_scalar(name, field.value, field.dtype)
            continue
        options = replace(
            field,
            depth=depths[name] if field.depth is None else field.depth,
            boundary=boundaries[name] if field.boundary is None else field.boundary,
            dtype=of_all.dtype if field.dtype is None else field.dtype,
            corners=of_all.corners if field.corners is None else field.corners,
        )
        spec, levels = make_field_spec(name, options)
        if options.boundary is None and any(map(any, spec.widest)):
            without.append(name)
        if arrays:
            spec, levels = _stagger(spec, levels, arrays[0])
        specs.append(spec)
        arrays += levels
    if without:
        raise InputError(
            f"boundary: expected one for each field that has a halo, got none for {without}. Give "
            f"one by name, or {{..., {OTHERS!r}: 'periodic'}} for all others."
        )
    if not arrays:
        raise InputError(
            f"expected at least one Dask array among the fields, got only numbers, "
            f"{[*fields]}. Give the arrays of the step, too."
        )
    return specs, arrays, scalars


def _stagger(
    spec: FieldSpec, levels: list[DaskArray], first: DaskArray
) -> tuple[FieldSpec, list[DaskArray]]:
    """Return the spec and the levels of a field that may be one longer than the first field."""
    level = levels[0]
    extra = tuple(
        length - first_length
        for length, first_length in zip(level.shape, first.shape, strict=False)
    )
    if level.ndim != first.ndim or not any(extra):
        check_decompositions([first, *levels])
        return spec, levels
    if not {*extra} <= {0, 1}:
        raise InputError(
            f"expected fields of the first one's shape, {first.shape}, or one longer along some "
            f"axes, got {spec.name!r} of shape {level.shape}. Give a field of the smallest shape "
            f"first."
        )
    check_same_kind(backend_for(first._meta), level._meta, "an array")
    chunks = tuple(
        (*sizes[:-1], sizes[-1] + longer_by)
        for sizes, longer_by in zip(first.chunks, extra, strict=True)
    )
    return replace(spec, extra=extra), [
        level if level.chunks == chunks else rechunk(level, chunks) for level in levels
    ]


def make_field_spec(name: str, field: Field) -> tuple[FieldSpec, list[DaskArray]]:
    """Return the spec of a field, and its time levels, converted to one dtype."""
    is_list = isinstance(field.value, (list, tuple))
    levels = checked_levels(field.value, field.dtype)
    shapes = [level.shape for level in levels]
    if isinstance(field.boundary, list):
        raise InputError(
            f"boundary: expected one for all time levels of a field, got {field.boundary!r}. Give "
            f"one boundary instead of a list."
        )
    spec = FieldSpec(
        name=name,
        depths=tuple(checked_depths(field.depth, shapes)),
        boundary=checked_boundaries(field.boundary, shapes, levels[0].dtype, in_section=True)[0],
        corners=True if field.corners is None else checked_flag("corners", field.corners),
        dtype=levels[0].dtype,
        is_list=is_list,
    )
    return spec, levels


def checked_levels(value: Any, dtype: DTypeLike | None) -> list[DaskArray]:
    """Return the time levels of a field, converted to their common dtype."""
    levels = list(value) if isinstance(value, (list, tuple)) else [value]
    check_decompositions(levels)
    kind: DType = levels[0].dtype if dtype is None else checked_dtype("dtype", dtype)
    if kind.hasobject:
        raise UnsupportedArrayError(
            f"expected fields without Python objects, which ranks cannot exchange, got {kind}. "
            f"Convert them, x.astype(...)."
        )
    for level in levels if dtype is None else ():
        if not np.can_cast(level.dtype, kind, "same_kind"):
            raise InputError(
                f"expected fields that become {kind}, like the first one, got one of "
                f"{level.dtype}. Give a dtype for all fields, "
                f"dtype={str(np.result_type(*levels))!r}."
            )
    return [level.astype(kind) for level in levels]


def check_name(name: Any, title: str) -> None:
    """Raise `InputError` unless a function can have a parameter of this name."""
    if not isinstance(name, str) or not name.isidentifier() or name in (OUT, AT):
        raise InputError(
            f"expected the name of a parameter for {title}, got {name!r}. Use letters, digits and "
            f"underscores, but neither {OUT!r} nor {AT!r}."
        )


def checked_scalar(name: str, value: Any, dtype: DTypeLike | None) -> Any:
    """Return a number as a scalar of NumPy; its dtype is that of `value` by default."""
    check_plain(name, value)
    number = np.asarray(value)
    dtype = number.dtype if dtype is None else checked_dtype("dtype", dtype)
    if number.dtype.kind not in "biufc" or not np.can_cast(number.dtype, dtype, "same_kind"):
        raise InputError(
            f"expected a number that becomes {dtype} as the field {name!r}, got "
            f"{value!r}. Give another dtype, dask_p2p.Field({value!r}, dtype=...)."
        )
    return number.astype(dtype)[()]


class Scalars:
    """The numbers of one rank."""

    def __init__(self, first: Mapping[str, Any], ctx: Context) -> None:
        self._ctx = ctx
        #: The newest values.
        self.values = {**first}

    def update(self, values: Mapping[str, Any]) -> None:
        """Take over new values that a function has returned."""
        for name, value in values.items():
            check_plain(f"the field {name!r}", value)
            dtype = self.values[name].dtype
            number = np.asarray(self._ctx.device.to_host(value))
            if number.ndim or not np.can_cast(number.dtype, dtype, "same_kind"):
                raise BlockMismatchError(
                    f"expected a number that becomes {dtype} from the function as the field "
                    f"{name!r}, got {number.dtype} of shape {number.shape}. Give the field another "
                    f"number at the start, such as 0.0 in place of 0."
                )
            self.values[name] = number.astype(dtype)[()]

    def check(self) -> None:
        """Raise `BlockMismatchError` if a number differs between ranks."""
        if not self.values:
            return
        numbers = np.array([*self.values.values()], complex)
        bounds = np.stack([numbers.real, numbers.imag, -numbers.real, -numbers.imag])
        least = self._ctx.allreduce(bounds, "min")
        for name, low, high in zip(self.values, least[:2].T, -least[2:].T, strict=True):
            if not np.array_equal(low, high, equal_nan=True):
                raise BlockMismatchError(
                    f"expected the same number from the function on all ranks as the field "
                    f"{name!r}, got {low[0]:g} to {high[0]:g}. Compute it from numbers that all "
                    f"ranks have: record a value of all ranks, and read at.last[...]."
                )


@dataclass(frozen=True)
class ConstantSpec:
    """One constant: a value, or an array that is divided between ranks like the fields."""

    name: str
    value: Any = None  # unless it is divided
    #: Number of dimensions of a divided array. It has the last axes of the fields.
    ndim: int | None = None
    shape: tuple[int, ...] = ()  # of a divided array
    is_whole: bool = False  # whether each rank receives all blocks of an array

    @property
    def is_divided(self) -> bool:
        """True if each rank has a part of an array, or of points."""
        return self.ndim is not None or isinstance(self.value, Points)


def name_constants(constants: Any, field: DaskArray) -> dict[str, Any]:
    """Return constants by names, in the form of those of named fields.

    Raises `InputError` for other values than a tuple, and for arrays of another shape.
    """
    if not isinstance(constants, (list, tuple)):
        raise InputError(
            f"constants: expected a tuple of arguments for the function, got "
            f"{type(constants).__name__}. Give one as (constant,)."
        )
    named: dict[str, Any] = {}
    for number, constant in enumerate(constants):
        is_divided = not isinstance(constant, Whole) and is_dask_array(constant) and constant.ndim
        if is_divided and constant.shape != field.shape:
            raise InputError(
                f"constants: expected Dask arrays of the fields' shape, {field.shape}, got one of "
                f"shape {constant.shape}. Give each rank the whole array by dask_p2p.Whole(...)."
            )
        is_whole = is_divided or isinstance(constant, Whole)
        named[f"constants[{number}]"] = constant if is_whole else Whole(constant)
    return named


def divide_constants(
    constants: Mapping[str, Any], field: DaskArray
) -> tuple[list[ConstantSpec], list[Any], list[FieldSpec], list[DaskArray]]:
    """Return the specs of constants without a halo, their lazy arrays; the same with a halo.

    NumPy and CuPy arrays are divided as Dask arrays are, by the rules of broadcasting.
    """
    specs: list[ConstantSpec] = []
    with_halo: list[FieldSpec] = []
    arrays: list[Any] = []  # divided ones, and `Whole` ones
    halo_arrays: list[DaskArray] = []
    for name, constant in constants.items():
        if isinstance(constant, Points):
            xy = checked_points(constant.xy, field.shape, constant.weights)
            specs.append(ConstantSpec(name, Points(xy)))
            continue
        options = constant if isinstance(constant, Field) else Field(constant)
        is_whole = isinstance(options.value, Whole)
        value = options.value.value if is_whole else options.value
        check_one_library([field, value])
        check_same_kind(backend_for(field._meta), getattr(value, "_meta", value), "a constant")
        if is_whole or not len(getattr(value, "shape", ())):
            if is_dask_array(value):
                check_input(value, field)
                specs.append(ConstantSpec(name, is_whole=True))
                arrays.append(Whole(value))
            else:
                specs.append(ConstantSpec(name, value))
            continue
        array = _divide_constant(name, value, field)
        if options is not constant:
            specs.append(ConstantSpec(name, ndim=array.ndim, shape=array.shape))
            arrays.append(array[(None,) * (field.ndim - array.ndim)])
            continue
        if array.shape != field.shape:
            raise InputError(
                f"constants: expected an array of the fields' shape, {field.shape}, for a constant "
                f"with a halo, got {name!r} of shape {array.shape}. Broadcast it, da.broadcast_to."
            )
        boundary, corners = options.boundary, options.corners is not False
        boundary = "none" if boundary is None else boundary
        options = Field(array, options.depth or 0, boundary, options.dtype, corners)
        spec, levels = make_field_spec(name, options)
        with_halo.append(replace(spec, is_constant=True))
        halo_arrays += levels
    return specs, arrays, with_halo, halo_arrays


def _divide_constant(name: str, constant: Any, field: DaskArray) -> DaskArray:
    """Return a constant as a Dask array with the chunks of the field's last axes."""
    array = constant
    if not is_dask_array(constant):
        if not hasattr(constant, "dtype"):  # such as tables of pandas
            raise UnsupportedArrayError(
                f"constants: expected numbers, or arrays of NumPy, CuPy or Dask, got {name!r} of "
                f"class {type(constant).__name__}. Convert it, np.asarray(...)."
            )
        array = functions_of(field).from_array(constant, chunks=-1, asarray=False)
    check_array(array)
    lengths = field.shape[field.ndim - array.ndim :] if array.ndim <= field.ndim else ()
    if len(lengths) != array.ndim or any(
        size not in (1, length) for size, length in zip(array.shape, lengths, strict=True)
    ):
        raise InputError(
            f"constants: expected arrays whose shape broadcasts to that of the fields, "
            f"{field.shape}, got {name!r} of shape {array.shape}. Give each rank the whole array "
            f"by dask_p2p.Whole(...)."
        )
    chunks = field.chunks[field.ndim - array.ndim :]
    array_chunks = tuple(
        (1,) if size == 1 else sizes for size, sizes in zip(array.shape, chunks, strict=True)
    )
    return array if array.chunks == array_chunks else rechunk(array, array_chunks)
