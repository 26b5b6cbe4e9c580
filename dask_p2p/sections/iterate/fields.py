"""Fields of `iterate`: checks of the user's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dask_p2p.backends import backend_for
from dask_p2p.errors import ChunksError, InputError, UnsupportedArrayError
from dask_p2p.geometry import Index
from dask_p2p.inputs import checked_dtype, checked_flag
from dask_p2p.ops.halo import checked_boundaries, checked_depths
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.api.arguments import check_decompositions, check_same_kind
from dask_p2p.sections.api.output_kinds import LocalBlock, Output
from dask_p2p.sections.context.grids import OTHERS, by_name
from dask_p2p.sections.iterate.functions.binding import AT, OUT
from dask_p2p.sections.iterate.scalars import ScalarSpec, is_scalar, scalar_spec
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
class FieldOutput(Output):
    """A field as an output of the section."""

    dtype: DType
    extra: tuple[int, ...]  # by axis: by how much it is longer than the first field

    def chunks(self, ranks: RankGrid) -> tuple[tuple[float, ...], ...]:
        return ranks.extended(self.extra).chunks

    def indices(self, ranks: RankGrid, rank: int) -> list[Index]:
        return LocalBlock(self.dtype).indices(ranks, rank)

    def blocks(self, ctx: Any, ranks: RankGrid, value: Any, name: str) -> list[Any]:
        return LocalBlock(self.dtype).blocks(ctx, ranks.extended(self.extra), value, name)

    def size_bytes(self, ranks: RankGrid, rank: int) -> int:
        return LocalBlock(self.dtype).size_bytes(ranks.extended(self.extra), rank)


def named_fields(
    of_all: Field,
) -> tuple[list[FieldSpec], list[DaskArray], tuple[ScalarSpec, ...]]:
    """Return the specs of a mapping of fields, their arrays, and the specs of numbers.

    Raises
    ------
    InputError
        If a name, a depth or a boundary is invalid.
    ChunksError, UnsupportedArrayError
        If an array cannot be divided between ranks.
    """
    fields: Mapping[str, Any] = of_all.value
    if not fields:
        raise InputError("expected at least one field, {'u': u}, got an empty mapping.")
    for name in fields:
        check_name(name, "a field")
    depths = by_name("depth", of_all.depth, fields, 0)
    boundaries = by_name("boundary", of_all.boundary, fields)
    specs, scalars, without = [], [], list[str]()
    arrays: list[DaskArray] = []
    for name, given in fields.items():
        own = given if isinstance(given, Field) else Field(given)
        if is_scalar(own.value):
            scalars.append(scalar_spec(name, own.value, own.dtype))
            continue
        options = replace(
            own,
            depth=depths[name] if own.depth is None else own.depth,
            boundary=boundaries[name] if own.boundary is None else own.boundary,
            dtype=of_all.dtype if own.dtype is None else own.dtype,
            corners=of_all.corners if own.corners is None else own.corners,
        )
        spec, levels = field_spec(name, options)
        if options.boundary is None and any(map(any, spec.widest)):
            without.append(name)
        if arrays:
            spec, levels = _staggered(spec, levels, arrays[0])
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
    return specs, arrays, tuple(scalars)


def _staggered(
    spec: FieldSpec, levels: list[DaskArray], first: DaskArray
) -> tuple[FieldSpec, list[DaskArray]]:
    """Return the spec and the levels of a field that may be one longer than the first field."""
    level = levels[0]
    extra = tuple(own - whole for own, whole in zip(level.shape, first.shape, strict=False))
    if level.ndim != first.ndim or not any(extra):
        check_decompositions([first, *levels])
        return spec, levels
    if not {*extra} <= {0, 1}:
        raise ChunksError(
            f"expected fields of the first one's shape, {first.shape}, or one longer along some "
            f"axes, got {spec.name!r} of shape {level.shape}. Give a field of the smallest shape "
            f"first."
        )
    check_same_kind(backend_for(first._meta), level._meta, "an array")
    chunks = tuple(
        (*sizes[:-1], sizes[-1] + more) for sizes, more in zip(first.chunks, extra, strict=True)
    )
    return replace(spec, extra=extra), [
        each if each.chunks == chunks else rechunk(each, chunks) for each in levels
    ]


def field_spec(name: str, field: Field) -> tuple[FieldSpec, list[DaskArray]]:
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


def checked_levels(given: Any, dtype: DTypeLike | None) -> list[DaskArray]:
    """Return the time levels of a field, converted to their common dtype."""
    levels = list(given) if isinstance(given, (list, tuple)) else [given]
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
