"""Constants of `iterate`: checks of the user's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dask_p2p.backends import backend_for
from dask_p2p.errors import ChunksError, InputError, UnsupportedArrayError
from dask_p2p.graph.libraries import check_one_library, functions_of, is_dask_array
from dask_p2p.ops.arguments import check_array
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.sections.api.arguments import (
    Whole,
    check_decompositions,
    check_input,
    check_same_kind,
)
from dask_p2p.sections.context.points import Points, checked_points
from dask_p2p.sections.iterate.fields import Field, FieldSpec, check_name, field_spec
from dask_p2p.types import DaskArray


@dataclass(frozen=True)
class ConstantSpec:
    """One constant: a value, or an array that is divided between ranks like the fields."""

    name: str
    value: Any = None  # unless it is divided
    #: Number of dimensions of a divided array. It has the last axes of the fields.
    ndim: int | None = None
    shape: tuple[int, ...] = ()  # of a divided array
    is_whole: bool = False  # whether each rank receives all blocks of an array


def constants_by_position(
    constants: Any, field: DaskArray
) -> tuple[list[ConstantSpec], list[DaskArray]]:
    """Return the specs of constants, and the arrays of those that are divided."""
    if not isinstance(constants, (list, tuple)):
        raise InputError(
            f"constants: expected a tuple of arguments for the function, got "
            f"{type(constants).__name__}. Give one as (constant,)."
        )
    specs: list[ConstantSpec] = []
    arrays: list[DaskArray] = []
    for number, constant in enumerate(constants):
        check_kind_of(constant, field)
        name = f"constants[{number}]"
        if isinstance(constant, Whole) or not is_dask_array(constant) or not constant.ndim:
            specs.append(_whole_constant(name, constant, field, arrays))
            continue
        if constant.shape != field.shape:
            raise ChunksError(
                f"constants: expected Dask arrays of the fields' shape, {field.shape}, got one of "
                f"shape {constant.shape}. Give each rank the whole array by dask_p2p.Whole(...)."
            )
        specs.append(ConstantSpec(name, ndim=constant.ndim))
        arrays.append(_aligned(constant, field))
    return specs, arrays


def named_constants(
    constants: Any, field: DaskArray
) -> tuple[list[ConstantSpec], list[DaskArray], list[FieldSpec], list[DaskArray]]:
    """Return the specs of constants without a halo, their divided arrays; the same with a halo.

    NumPy and CuPy arrays are divided as Dask arrays are, by the rules of broadcasting.
    """
    if not isinstance(constants, Mapping) and not (type(constants) is tuple and not constants):
        raise InputError(
            f"constants: expected a mapping of names, as the fields have, got "
            f"{type(constants).__name__}. Give {{'name': value}}."
        )
    specs: list[ConstantSpec] = []
    with_halo: list[FieldSpec] = []
    arrays: list[DaskArray] = []
    halo_arrays: list[DaskArray] = []
    for name, given in dict(constants).items():
        check_name(name, "a constant")
        if isinstance(given, Points):
            xy = checked_points(given.xy, field.shape, given.weights)
            specs.append(ConstantSpec(name, Points(xy)))
            continue
        own = given if isinstance(given, Field) else Field(given)
        check_kind_of(own.value, field)
        if isinstance(own.value, Whole) or not len(getattr(own.value, "shape", ())):
            specs.append(_whole_constant(name, own.value, field, arrays))
            continue
        array = _divided(name, own.value, field)
        if own is given:
            own = replace(own, value=_whole_array(name, array, field))
            boundary = "none" if own.boundary is None else own.boundary
            own = replace(own, depth=own.depth or 0, boundary=boundary)
            spec, levels = field_spec(name, replace(own, corners=own.corners is not False))
            with_halo.append(replace(spec, is_constant=True))
            halo_arrays += levels
        else:
            specs.append(ConstantSpec(name, ndim=array.ndim, shape=array.shape))
            arrays.append(array[(None,) * (field.ndim - array.ndim)])
    return specs, arrays, with_halo, halo_arrays


def _whole_constant(
    name: str, given: Any, field: DaskArray, arrays: list[DaskArray]
) -> ConstantSpec:
    """Return the spec of a constant that is not divided; add it to `arrays` if it is lazy."""
    value = given.value if isinstance(given, Whole) else given
    if not is_dask_array(value):
        return ConstantSpec(name, value)
    check_input(value, field)
    arrays.append(value)
    return ConstantSpec(name, is_whole=True)


def check_kind_of(constant: Any, field: DaskArray) -> None:
    """Refuse a constant of another array library than the fields': `UnsupportedArrayError`."""
    value = constant.value if isinstance(constant, Whole) else constant
    check_one_library([field, value])
    check_same_kind(backend_for(field._meta), getattr(value, "_meta", value), "a constant")


def _divided(name: str, given: Any, field: DaskArray) -> DaskArray:
    """Return a constant as a Dask array with the chunks of the field's last axes."""
    array = given
    if not is_dask_array(given):
        if not hasattr(given, "dtype"):  # such as tables of pandas
            raise UnsupportedArrayError(
                f"constants: expected numbers, or arrays of NumPy, CuPy or Dask, got {name!r} of "
                f"class {type(given).__name__}. Convert it, np.asarray(...)."
            )
        array = functions_of(field).from_array(given, chunks=-1, asarray=False)
    check_array(array)
    lengths = field.shape[field.ndim - array.ndim :] if array.ndim <= field.ndim else ()
    if len(lengths) != array.ndim or any(
        own not in (1, length) for own, length in zip(array.shape, lengths, strict=True)
    ):
        raise ChunksError(
            f"constants: expected arrays whose shape broadcasts to that of the fields, "
            f"{field.shape}, got {name!r} of shape {array.shape}. Give each rank the whole array "
            f"by dask_p2p.Whole(...)."
        )
    chunks = field.chunks[field.ndim - array.ndim :]
    wanted = tuple(
        (1,) if own == 1 else sizes for own, sizes in zip(array.shape, chunks, strict=True)
    )
    return array if array.chunks == wanted else rechunk(array, wanted)


def _whole_array(name: str, array: DaskArray, field: DaskArray) -> DaskArray:
    if array.shape != field.shape:
        raise ChunksError(
            f"constants: expected an array of the fields' shape, {field.shape}, for a constant "
            f"with a halo, got {name!r} of shape {array.shape}. Broadcast it, da.broadcast_to."
        )
    return array


def _aligned(constant: DaskArray, field: DaskArray) -> DaskArray:
    aligned = constant if constant.chunks == field.chunks else rechunk(constant, field.chunks)
    check_decompositions([aligned])
    return aligned
