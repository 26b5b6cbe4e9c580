"""Checked arguments of the stores of `iterate`: frames of fields, and their regions and chunks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd, prod
from operator import index as as_int
from pathlib import Path
from typing import Any

from dask_p2p.backends.dlpack import LibraryFunction
from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, Chunks, block_bounds
from dask_p2p.inputs import checked_count
from dask_p2p.ops.arguments import check_function
from dask_p2p.sections.iterate.fields import check_name
from dask_p2p.sections.iterate.functions import OUT, Binding, bound_by_name
from dask_p2p.sections.iterate.output.groups import (
    Coordinate,
    absolute,
    checked_coords,
    checked_dims,
)

_MOST_PARTS = 16  # chunks of a store for each block of an array


@dataclass(frozen=True)
class ComputedField:
    """A field that a function computes for frames."""

    name: str
    function: Callable[..., Any]
    binding: Binding


@dataclass(frozen=True)
class SaveArguments:
    """The arguments of `Save`, as they were given."""

    path: str | Path
    every: int
    fields: Sequence[str] | None = None
    region: slice | tuple[slice, ...] = ()
    compute: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    dims: Sequence[str] | None = None
    coords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointArguments:
    """The arguments of `Checkpoint`."""

    path: str | Path
    every: int | str = "10 minutes"
    keep: int = 2
    resume: bool = True


@dataclass(frozen=True)
class FramesSpec:
    """The checked arguments of a `Save`."""

    path: str
    every: int
    fields: tuple[str, ...]
    computed: tuple[ComputedField, ...]
    region: tuple[slice, ...]  # empty: all
    chunks: tuple[int, ...]  # of the store's arrays, without the axis of frames
    dims: tuple[str, ...]  # names of the axes
    coords: Mapping[str, Coordinate]  # by name of an axis, or "frame"

    def size_bytes(self, box: Box, shape: Sequence[int], item_bytes: Mapping[str, int]) -> int:
        """Return the size of a frame's part in a box of the first field, which is named first."""
        along = zip(self.slices(len(shape)), shape, box, strict=True)
        rows = [part_of_slice(selection, length, *bounds)[0] for selection, length, bounds in along]
        first = next(iter(item_bytes.values()))
        sizes = [item_bytes.get(name, 0) for name in self.fields] + [first] * len(self.computed)
        count: int = prod(selected.stop - selected.start for selected in rows)
        return count * sum(sizes)

    def in_library(self, library: str) -> FramesSpec:
        """Return the same frames, computed by functions of arrays of another library."""
        computed = tuple(
            replace(field, function=LibraryFunction(field.function, library))
            for field in self.computed
        )
        return replace(self, computed=computed)

    def slices(self, ndim: int) -> tuple[slice, ...]:
        """Return the slice of each axis."""
        return self.region or (slice(None),) * ndim


@dataclass(frozen=True)
class StoreSpecs:
    """All stores of a run."""

    frames: tuple[FramesSpec, ...] = ()
    checkpoint: CheckpointArguments | None = None
    chunks: tuple[int, ...] = ()  # of the arrays of checkpoints

    def __bool__(self) -> bool:
        return bool(self.frames) or self.checkpoint is not None

    @property
    def names(self) -> set[str]:
        """Names of all values that the functions read."""
        computed = [field for frames in self.frames for field in frames.computed]
        return set().union(*(field.binding.names for field in computed))

    def in_library(self, library: str) -> StoreSpecs:
        """Return the same stores, with functions of arrays of another library."""
        return replace(self, frames=tuple(frames.in_library(library) for frames in self.frames))


NO_STORES = StoreSpecs()


def checked_frames(
    save: SaveArguments, names: Sequence[str], value_names: Collection[str], chunks: Chunks
) -> FramesSpec:
    """Return the checked arguments of a `Save`; raise `InputError` for invalid ones."""
    is_list = isinstance(save.fields, Collection) and not isinstance(save.fields, (str, bytes))
    if save.fields is not None and not is_list:
        raise InputError(
            f"save: expected a list of names of fields, {[*names]}, got "
            f"fields={save.fields!r:.80}. Give fields=[{names[0]!r}]."
        )
    fields = tuple(names if save.fields is None else save.fields)
    computed = _checked_computed(save.compute, names, value_names)
    if not (fields or computed) or not {*fields} <= {*names}:
        raise InputError(
            f"save: expected names of fields, {[*names]}, got {list(fields)}. Rename them."
        )
    every = checked_count("steps between frames", every=save.every)
    region = _checked_region(save.region, [sum(along) for along in chunks])
    sizes = _region_chunks(chunks, region) if region else store_chunks(chunks)
    dims = checked_dims(save.dims, len(chunks))
    along_axes = dict(zip(dims, [sum(along) for along in chunks], strict=True))
    coords = checked_coords(save.coords, along_axes, {*fields, *(field.name for field in computed)})
    return FramesSpec(absolute(save.path), every, fields, computed, region, sizes, dims, coords)


def _checked_computed(
    functions: Any, names: Collection[str], value_names: Collection[str]
) -> tuple[ComputedField, ...]:
    if not isinstance(functions, Mapping):
        raise InputError(
            f"compute: expected a mapping of functions by name, got {type(functions).__name__}. "
            f"Give {{'speed': lambda u, v: (u**2 + v**2) ** 0.5}}."
        )
    computed = []
    for name, function in functions.items():
        check_name(name, "a computed field")
        check_function(function, "fields", "compute={'square': lambda u: u**2}")
        binding = bound_by_name(function, value_names)
        if name in names or binding.fills_out:
            raise InputError(
                f"compute: expected a name that no field has, and a function that returns a local "
                f"block, without a parameter {OUT}, got {name!r}. Change it."
            )
        computed.append(ComputedField(name, function, binding))
    return tuple(computed)


# --- regions and chunks


def _checked_region(region: Any, shape: Sequence[int]) -> tuple[slice, ...]:
    """Return a slice for each axis, or none for the whole array."""
    slices = (region,) if isinstance(region, slice) else region
    is_valid = isinstance(slices, tuple) and len(slices) <= len(shape)
    if not is_valid or not all(map(_is_slice, slices)):
        raise InputError(
            f"region: expected a tuple of slices with positive steps, at most {len(shape)}, got "
            f"{region!r}. Give numpy.s_[::4, :100], and a range for one index, 5:6."
        )
    if not all(range(n)[selection] for n, selection in zip(shape, slices, strict=False)):
        raise InputError(
            f"region: expected slices that select elements of an array of shape {tuple(shape)}, "
            f"got {region!r}. Give other ones."
        )
    return (*slices, *(slice(None) for _ in shape[len(slices) :])) if slices else ()


def _is_slice(value: Any) -> bool:
    if not isinstance(value, slice):
        return False
    try:
        numbers = [as_int(n) for n in (value.start, value.stop) if n is not None]
        return len(numbers) <= 2 and (value.step is None or as_int(value.step) > 0)
    except TypeError:
        return False


def part_of_slice(selection: slice, length: int, start: int, stop: int) -> tuple[slice, slice]:
    """Return the selected elements of a range: their positions among all, and in the range.

    >>> part_of_slice(slice(1, 9, 3), 10, 4, 10)  # of 1, 4, 7
    (slice(1, 3, None), slice(0, 6, 3))
    """
    rows = range(length)[selection]
    first, last = (min(max(0, -(-(n - rows.start) // rows.step)), len(rows)) for n in (start, stop))
    low = rows.start + first * rows.step - start
    return slice(first, last), slice(low, low + (last - first) * rows.step, rows.step)


def _region_chunks(chunks: Chunks, region: Sequence[slice]) -> tuple[int, ...]:
    """Return the chunks of a store for a region: such that ranks share none, if possible."""
    parts = []
    for selection, along in zip(region, chunks, strict=True):
        bounds = block_bounds(along)
        rows = [part_of_slice(selection, bounds[-1], *pair)[0] for pair in pairwise(bounds)]
        parts.append(
            tuple(
                selected.stop - selected.start
                for selected in rows
                if selected.stop > selected.start
            )
        )
    try:
        return store_chunks(tuple(parts))
    except InputError:
        return tuple(map(max, parts))  # ranks write in turn


def store_chunks(chunks: Chunks) -> tuple[int, ...]:
    """Return chunks of a store: of one size along each axis, and whole ones in each block."""
    sizes = []
    for along in chunks:
        size = max(1, along[0])
        if any(length != size for length in along[:-1]) or along[-1] > size:
            size = gcd(*block_bounds(along)[1:-1]) or 1
        sizes.append(size)
    count = prod(-(-sum(along) // size) for along, size in zip(chunks, sizes, strict=True))
    if count > _MOST_PARTS * prod(map(len, chunks)):
        raise InputError(
            f"expected fields with chunks that divide into chunks of one size, which Zarr needs, "
            f"got {chunks}. Rechunk them first, dask_p2p.rechunk(x, ...)."
        )
    return tuple(sizes)
