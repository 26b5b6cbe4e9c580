"""Variables of xarray: their arrays, chunk sizes, and the chunks in their encodings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import is_dask_collection
from xarray.groupers import Resampler

from dask_p2p.backends import backend_for
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.graph import is_dask_array

# Encoding keys for chunks of a file: Zarr chunks, Zarr shards, chunks as read, netCDF chunks.
_CHUNKS_OF_FILES = frozenset({"chunks", "shards", "preferred_chunks", "chunksizes"})

# By package of arrays with a meaning beyond their values: how to get the plain array.
_WITHOUT_MEANING = {
    "pint": "Call .pint.dequantify() first, which turns the units into an attribute, and "
    ".pint.quantify() on the result"
}
_PLAIN = "Use the Dask array inside it as the data: a.copy(data=...)"
_LEAST_SIMILAR = 0.4  # similarity of a name in an error: of "lat" to "latitude" it is 0.5

#: Function of a variable before, the same after xarray's operation, and its name: the new variable.
Change: TypeAlias = Callable[[Any, Any, Hashable], Any]


def check_dimensions(
    names: Iterable[Hashable],
    dims: Sequence[Hashable],
    subject: str = "",  # argument that has the names
) -> None:
    """Refuse names that are no dimensions, with a similar one."""
    for name in names:
        if name not in dims:
            similar = get_close_matches(str(name), map(str, dims), 1, _LEAST_SIMILAR)
            raise InputError(
                f"{subject and f'{subject}: '}{name!r} is no dimension of the array; it has "
                f"{', '.join(map(repr, dims)) or 'none'}. "
                f"{f'Use {similar[0]!r}?' if similar else 'Use one of these.'}"
            )


def is_in_memory(variable: Any) -> bool:
    """Return whether a variable has no Dask array, also not inside another array."""
    return variable.chunks is None and not is_dask_collection(variable)


def as_dask(variable: Any, name: Hashable) -> Any:
    """Return the data of a variable as a Dask array, in one block if in memory."""
    if is_in_memory(variable):
        variable = variable.chunk()
    check_data(variable.data, name)
    return variable.data


def chunk_variable(variable: Any, sizes: Mapping[Any, Any], name: Hashable) -> Any:
    """Return a variable in memory as one with a Dask array, with chunks by dimension.

    Returns a variable with units unchanged if `sizes` is empty. Otherwise raises
    `UnsupportedArrayError`.
    """
    result = variable.chunk(sizes)
    if not sizes and _remedy(result.data) is not None:
        return variable
    check_data(result.data, name)
    return result


def _remedy(data: Any) -> str | None:
    """Return how to get the plain values of an array that is more; None for plain arrays."""
    kind = type(data._meta if is_dask_array(data) else data)
    remedy = _WITHOUT_MEANING.get(kind.__module__.partition(".")[0])
    if remedy is None and not is_dask_array(data):
        try:
            backend_for(data)
        except UnsupportedArrayError:
            return _PLAIN
    return remedy


def check_data(data: Any, name: Hashable) -> None:
    """Raise `UnsupportedArrayError` for arrays that are more than values, such as with units."""
    remedy = _remedy(data)
    if remedy is None:
        return
    kind = type(data._meta if is_dask_array(data) else data)
    subject = "the data" if name is None else f"{name!r}"
    raise UnsupportedArrayError(
        f"{subject}: expected an array of NumPy, CuPy or Dask, got {kind.__module__}."
        f"{kind.__qualname__}. The result would not keep that type. {remedy}."
    )


def check_labels(first: Any, second: Any, expected: str) -> None:
    """Refuse arrays with other labels: elements with the same index would not correspond."""
    try:
        xr.align(first, second, join="exact", copy=False)
    except ValueError as exc:
        raise InputError(
            f"{expected}: {str(exc).partition(chr(10))[0]}. Align them first: xarray.align."
        ) from exc


def sizes_of_groups(coordinate: Any, resampler: Resampler) -> tuple[int, ...]:
    """Return the sizes of the groups that a resampler makes along a coordinate, as xarray does."""
    name, n = coordinate.name, coordinate.size
    try:
        along = xr.DataArray(da.zeros(n, chunks=n), {name: coordinate.variable}, [name])
        sizes: tuple[int, ...] = along.chunk({name: resampler}).chunks[0]
    except Exception as exc:  # each kind of resampler has errors of its own
        raise InputError(
            f"expected a coordinate {name!r} that {resampler!r:.100} can group, got values of "
            f"{coordinate.dtype}: {exc}. Give sizes in place of the resampler."
        ) from exc
    return sizes


def host_values(variable: Any) -> Any:
    """Return the values of a variable as a NumPy array; xarray's ``values`` fails for CuPy."""
    if isinstance(variable, xr.IndexVariable):  # an index holds plain values
        return variable.values
    data = variable.compute().data
    return np.asarray(backend_for(data).to_host(data) if _is_on_device(data) else data)


def copy_to_host(data: Any) -> Any:
    """Return an array or dataset with copies of CuPy arrays in host memory, for xarray's files."""

    def copied(variable: Any) -> Any:
        if isinstance(variable, xr.IndexVariable) or not _is_on_device(variable.data):
            return variable
        if is_in_memory(variable):
            return variable.copy(deep=False, data=host_values(variable))
        x, meta = variable.data, np.empty((0,) * variable.ndim, variable.dtype)
        return variable.copy(deep=False, data=x.map_blocks(_to_host, meta=meta))

    coords = {name: copied(coordinate.variable) for name, coordinate in data.coords.items()}
    differing = {name: x for name, x in coords.items() if x is not data[name].variable}
    return change_data(data, data.assign_coords(differing), lambda _, after, name: copied(after))


def _is_on_device(data: Any) -> bool:
    try:
        return backend_for(data._meta if is_dask_array(data) else data).on_device
    except UnsupportedArrayError:
        return False


def _to_host(block: Any) -> Any:
    return backend_for(block).to_host(block)


def change_variables(original: Any, result: Any, change: Change) -> Any:
    """Return `result` with its variables changed, except coordinates in memory."""
    result = result.assign_coords(change_coords(original, result, change))
    return change_data(original, result, change)


def change_data(original: Any, result: Any, change: Change) -> Any:
    """Return `result` with its variables changed, except coordinates."""

    def changed_variable(before: Any, after: Any) -> Any:
        variable = change(before.variable, after.variable, before.name)
        return drop_old_chunks(before.variable, variable)

    if isinstance(original, xr.DataArray):
        variable = changed_variable(original, result)
        result = result.copy(deep=False, data=variable.data)
        result.encoding = variable.encoding
        return result
    names = original.data_vars
    return result.assign({name: changed_variable(original[name], result[name]) for name in names})


def change_coords(original: Any, result: Any, change: Change | None = None) -> dict[Hashable, Any]:
    """Return the coordinates of `result` that differ from those of `original`.

    `change` applies to coordinates with Dask arrays. Coordinates in memory may be transposed.
    """
    coords = {}
    for name, coordinate in original.coords.items():
        before, after = coordinate.variable, result[name].variable
        if change is not None and not is_in_memory(before):
            after = change(before, after, name)
        if before.ndim > 1 or after.chunks is not None:
            coords[name] = drop_old_chunks(before, after)
    return coords


def drop_old_chunks(before: Any, after: Any) -> Any:
    """Return `after` without the chunks of its file in the encoding, if the blocks have changed.

    xarray writes files with the chunks in the encoding, which may not fit the new blocks.
    """
    if after.dims == before.dims and after.chunks == before.chunks:
        return after
    return drop_file_chunks(after)


def drop_file_chunks(variable: Any) -> Any:
    """Return a variable whose encoding has no chunks of a file."""
    variable = variable.copy(deep=False)
    encoding = variable.encoding.items()
    variable.encoding = {key: value for key, value in encoding if key not in _CHUNKS_OF_FILES}
    return variable
