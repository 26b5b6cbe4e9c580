"""Arguments and errors by names of dimensions, and `iterate` of arrays and datasets of xarray."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from dask_p2p.errors import InputError
from dask_p2p.geometry import Chunks
from dask_p2p.inputs import checked_count
from dask_p2p.ops.arguments import CHUNKS_REMEDY, check_chunks_are_known, checked_chunks
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.sections.iterate.iterate import iterate
from dask_p2p.sections.iterate.output.stores import Save
from dask_p2p.tools.zarr_stores import is_regular, regular_chunks, regular_size
from dask_p2p.xarray.variables import (
    as_dask,
    change_coords,
    change_variables,
    check_data,
    check_dimensions,
    check_labels,
    chunk_variable,
    copy_to_host,
    drop_file_chunks,
    host_values,
    is_in_memory,
)

#: Options of `iterate` that need names of fields.
_OF_NAMES = "record", "save", "checkpoint", "max_time"
_LABELS = "expected the sizes and labels of the newest field along its dimensions"


def by_dimension(dims: Sequence[Hashable], subject: str, value: Any) -> Mapping[Any, Any]:
    """Return values by dimension, from a mapping or from one value for all dimensions."""
    if not isinstance(value, (Mapping, tuple, list)):
        return dict.fromkeys(dims, value)
    if isinstance(value, Mapping):
        check_dimensions(value, dims, subject)
    else:
        raise InputError(
            f"expected {subject} of the dimensions {tuple(dims)}, got {value!r}. Use names "
            f"of dimensions as keys, like {{{next(iter(dims), 'x')!r}: ...}}."
        )
    return value


@contextmanager
def name_axes(dims: Sequence[Hashable], *values_by_axis: Mapping[int, Any]) -> Iterator[None]:
    """Replace numbers of axes in errors by names of dimensions."""
    try:
        yield
    except InputError as exc:
        text = str(exc).replace(CHUNKS_REMEDY, "Give sizes that fit, by dimension.")
        for by_axis in values_by_axis:
            text = text.replace(repr(by_axis), repr({dims[i]: n for i, n in by_axis.items()}))
        text = re.sub(r"axis (\d+)", lambda match: f"dimension {dims[int(match[1])]!r}", text)
        raise type(exc)(text) from exc.__cause__


def iterate_by_name(
    owner: Any,
    func: Callable[..., Any],
    depth: Any,
    steps: int,
    fields: Any,
    boundary: Any,
    constants: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """See `dask_p2p.xarray.P2PAccessor.iterate`."""
    if isinstance(fields, Mapping):
        return _iterate_coupled(owner, func, depth, steps, fields, boundary, constants, kwargs)
    if isinstance(constants, Mapping):
        raise InputError(
            f"constants: expected a list, as the fields have no names, got "
            f"{type(constants).__name__}. Give coupled fields of a dataset by name, "
            f"fields={{'u': 'temperature'}}, or constants=[...]."
        )
    for option in _OF_NAMES:
        if kwargs.get(option):
            raise InputError(
                f"{option}: expected fields by name, got fields={fields!r}. Give the variables of "
                f"a dataset by the names of the function's parameters, fields={{'u': "
                f"{_as_list(fields or 'u')[0]!r}}}."
            )
    levels = _levels(owner, fields)
    first = levels[0]
    dims, arrays = first.dims, _align_levels(levels)
    read = [_constant(owner, constant, first, arrays[0]) for constant in _as_list(constants)]
    is_list = isinstance(depth, list)
    depths = [_by_axis(dims, "depth", of_level) for of_level in (depth if is_list else [depth])]
    widths: Any = depths if is_list else depths[0]
    options = {**kwargs, "boundary": _by_axis(dims, "boundary", boundary), "constants": tuple(read)}
    x: Any = arrays[0] if fields is None else arrays
    with name_axes(dims, *depths, options["boundary"]):
        results: Any = iterate(func, x, widths, steps, **options)
    results = (results,) if fields is None else results
    pairs = zip(levels, results, strict=True)
    after = [_replace_data(level, dims, data) for level, data in pairs]
    if isinstance(owner, xr.Dataset):
        return owner.assign(dict(zip(_as_list(fields), after, strict=True)))
    return after[0] if fields is None else tuple(after)


def _iterate_coupled(
    dataset: Any,
    func: Any,
    depth: Any,
    steps: int,
    fields: Mapping[str, Any],
    boundary: Any,
    constants: Any,
    kwargs: Mapping[str, Any],
) -> Any:
    if not isinstance(dataset, xr.Dataset):
        raise InputError(
            f"fields: expected a dataset for fields by name, got {type(dataset).__name__}. Convert "
            f"it, xarray.Dataset({{'u': u}})."
        )
    if not isinstance(constants, Mapping) and constants != ():
        raise InputError(
            f"constants: expected a mapping by name, as the fields have, got "
            f"{type(constants).__name__}. Give {{'name': value}}."
        )
    names = [name for value in fields.values() for name in _as_list(value)]
    levels = _levels(dataset, names)
    first, aligned = levels[0], iter(_align_levels(levels))
    dims = first.dims
    arrays: dict[str, Any] = {}
    for key, value in fields.items():
        field_arrays = [next(aligned) for _ in _as_list(value)]
        arrays[key] = field_arrays if isinstance(value, (list, tuple)) else field_arrays[0]
    data = _as_list(next(iter(arrays.values())))[0]
    read = {key: _constant(dataset, x, first, data) for key, x in dict(constants).items()}
    widths, beyond = _by_axis(dims, "depth", depth), _by_axis(dims, "boundary", boundary)
    options = {**kwargs, "save": _name_frames(kwargs.get("save", ()), first, steps)}
    with name_axes(dims, widths, beyond):
        run = iterate(func, arrays, widths, steps, boundary=beyond, constants=read, **options)
    results = [result for key in arrays for result in _as_list(run[key])]
    changed = zip(names, levels, results, strict=True)
    series = {name: _series(dataset, name, run[name]) for name in run if name not in arrays}
    return dataset.assign(
        {name: _replace_data(level, dims, result) for name, level, result in changed} | series
    )


def _series(dataset: Any, name: str, data: Any) -> tuple[list[str], Any]:
    if name in dataset.variables:
        raise InputError(
            f"record: expected names that no variable of the dataset has, got {name!r}. Rename it."
        )
    later_dims = [f"{name}_{axis}" for axis in range(1, data.ndim)]
    return [f"{name}_record", *later_dims][: data.ndim], data


def _name_frames(save: Any, first: Any, steps: int) -> Any:
    coords = {}
    for name in first.dims:
        if name in first.coords and not isinstance(first.indexes.get(name), pd.MultiIndex):
            variable = first.coords[name].variable
            values = host_values(variable)
            on_host = xr.Variable(variable.dims, values, variable.attrs, variable.encoding)
            encoded = xr.conventions.encode_cf_variable(on_host, name=name)
            encoded.attrs.pop("_FillValue", None)  # the values are complete
            if encoded.dtype.kind in "biuf":
                coords[str(name)] = encoded
    return [
        replace(
            target,
            dims=[*map(str, first.dims)] if target.dims is None else target.dims,
            coords={"frame": _frame_steps(target, steps), **coords, **target.coords},
        )
        if isinstance(target, Save)
        else target
        for target in _as_list(save)
    ]


def _frame_steps(save: Save, steps: int) -> Any:
    every = checked_count("steps between frames", every=save.every)
    steps = checked_count("steps", steps=steps)
    return np.arange(every, steps + 1, every)


def _align_levels(levels: Sequence[Any]) -> list[Any]:
    first = levels[0]
    dims, arrays = first.dims, [as_dask(first.variable, first.name)]
    for level in levels[1:]:
        if set(level.dims) != set(dims):
            raise InputError(
                f"fields: expected the newest field's dimensions {dims} for all, got {level.dims}. "
                "Give all fields the same dimensions."
            )
        check_labels(first, level, f"fields: {_LABELS}")
        data = as_dask(level.variable.transpose(*dims), level.name)
        arrays.append(data if data.chunks == arrays[0].chunks else rechunk(data, arrays[0].chunks))
    return arrays


def _replace_data(level: Any, dims: Sequence[Hashable], data: Any) -> Any:
    turned = level.transpose(*dims)
    result = turned.copy(deep=False, data=data).assign_coords(change_coords(level, turned))
    result.encoding = {}  # the encoding belongs to other values
    return result


def _levels(data: Any, fields: Any) -> list[Any]:
    if isinstance(data, xr.Dataset):
        names = [] if fields is None else _as_list(fields)
        if not names or not all(isinstance(n, Hashable) and n in data.data_vars for n in names):
            raise InputError(
                f"fields: expected names of the dataset's arrays, {tuple(data.data_vars)}, the "
                f"newest time level first, got {fields!r}."
            )
        return [data[name] for name in names]
    earlier_levels = [] if fields is None else _as_list(fields)
    for level in earlier_levels:
        if not isinstance(level, xr.DataArray):
            raise InputError(
                f"fields: expected the time levels before this array, as DataArrays, got "
                f"{type(level).__name__}. Use names only for fields of a dataset."
            )
    return [data, *earlier_levels]


def _constant(owner: Any, constant: Any, field: Any, data: Any) -> Any:
    """Return a constant with the dimensions of the field; values that are no arrays unchanged."""
    if isinstance(constant, str):
        arrays = owner.variables if isinstance(owner, xr.Dataset) else owner.coords
        if constant not in arrays:
            raise InputError(
                f"constants: expected the name of one of {tuple(arrays)}, a DataArray or a value, "
                f"got {constant!r}."
            )
        constant = owner[constant]
    if not isinstance(constant, xr.DataArray):
        return constant
    if not constant.ndim and is_in_memory(constant.variable):
        check_data(constant.data, constant.name)
        return host_values(constant.variable)[()]
    if not set(constant.dims) <= set(field.dims):
        raise InputError(
            f"constants: expected only dimensions of the fields, {field.dims}, got an array with "
            f"{constant.dims}. Pass constant.values to give the whole array to all ranks."
        )
    check_labels(field, constant, f"constants: {_LABELS}")
    along = constant.variable.copy(data=as_dask(constant.variable, constant.name))
    # Rechunk before the array is repeated along the other dimensions.
    sizes = {dim: n for dim, n in zip(field.dims, data.chunks, strict=True) if dim in along.dims}
    return along.chunk(sizes).set_dims(dict(field.sizes)).data


def _by_axis(dims: Sequence[Hashable], subject: str, value: Any) -> dict[int, Any]:
    named = by_dimension(dims, subject, value)
    return {axis: named[dim] for axis, dim in enumerate(dims) if dim in named}


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def make_regular(
    data: Any,
    sizes: Mapping[Hashable, Any],
    encoding: Mapping[Hashable, Mapping[str, Any]],
    existing_dims: Collection[Hashable] = (),
) -> Any:
    """Return an array or dataset with chunks of one size along each dimension, in host memory.

    Blocks are whole shards, or chunks, of the `encoding` of their variable. Other encodings lose
    the chunks of a file that do not fit the blocks. A variable with `existing_dims`, whose array is
    in the store before, keeps its blocks if `sizes` has none of its dimensions.
    """

    def change(before: Any, _: Any, name: Hashable) -> Any:
        named = {dim: sizes[dim] for dim in before.dims if dim in sizes}
        if is_in_memory(before):
            if named:
                before = chunk_variable(before, named, name)
                _check_one_size(before.chunks, before.dims, name)
            return before
        x = as_dask(before, name)
        check_chunks_are_known(x)
        if not named and not {*existing_dims}.isdisjoint(before.dims):
            return before
        by_axis = {
            axis: sizes[dim] if dim in sizes else regular_size(x.chunks[axis])
            for axis, dim in enumerate(before.dims)
        }
        of_file = encoding.get(name, {})
        with name_axes(before.dims, by_axis):
            chunks = checked_chunks(by_axis, x.chunks, x.dtype)
            _check_one_size(chunks, before.dims, name)
            chunks = regular_chunks(chunks, of_file.get("shards") or of_file.get("chunks"))
            after = before.copy(deep=False, data=rechunk(x, chunks))
        return after if _fits(after) else drop_file_chunks(after)

    return copy_to_host(change_variables(data, data, change))


def add_chunks_of_shards(
    encoding: Mapping[Hashable, Mapping[str, Any]], data: Any, sizes: Mapping[Hashable, Any]
) -> dict[Hashable, Any]:
    """Return encodings with chunks for all shards: those of `sizes`, or whole shards.

    xarray would take the blocks for chunks, which need not divide shards.
    """
    result = {**encoding}
    for name, of_file in encoding.items():
        is_array = not hasattr(data, "data_vars") and name not in data.coords
        dims = data.dims if is_array else data[name].dims
        shards = of_file.get("shards")
        if isinstance(shards, int):
            shards = (shards,) * len(dims)
        if shards and not of_file.get("chunks") and len(shards) == len(dims):
            numbers = {dim: n for dim, n in sizes.items() if isinstance(n, int) and n > 0}
            chunks = tuple(numbers.get(dim, n) for dim, n in zip(dims, shards, strict=True))
            result[name] = {**of_file, "chunks": chunks}
    return result


def _check_one_size(chunks: Chunks, dims: Sequence[Hashable], name: Hashable) -> None:
    for dim, blocks in zip(dims, chunks, strict=True):
        if not is_regular(blocks):
            raise InputError(
                f"{name!r}: expected chunks of one size along {dim!r}, as Zarr has them, got "
                f"{blocks}. Give one number: chunks={{{dim!r}: {max(blocks)}}}."
            )


def _fits(variable: Any) -> bool:
    of_file = variable.encoding.get("shards") or variable.encoding.get("chunks")
    if not isinstance(of_file, tuple) or len(of_file) != variable.ndim:
        return not of_file
    pairs = zip(variable.chunks, of_file, strict=True)
    return all(size and (len(blocks) == 1 or blocks[0] % size == 0) for blocks, size in pairs)
