"""Variables of xarray: the arrays in them, sizes of their chunks, and chunks in their encodings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import dask.array as da
import xarray as xr
from dask.base import is_dask_collection
from xarray.groupers import Resampler

from dask_p2p.backends import backend_for
from dask_p2p.errors import ChunksError, UnsupportedArrayError
from dask_p2p.ops.arguments import is_dask_array

# Chunks of a file: of Zarr, of its shards, of both and netCDF as read, of netCDF.
_CHUNKS_OF_FILES = frozenset({"chunks", "shards", "preferred_chunks", "chunksizes"})

# Arrays that add a meaning to other arrays, by package: how to get at an array without it.
_WITHOUT_MEANING = {
    "pint": "Call .pint.dequantify() first, which makes the units an attribute, and "
    ".pint.quantify() on the result",
}
_PLAIN = "Give the Dask array in it as the data: a.copy(data=...)"

#: Returns a variable in the place of one, given as it was and as xarray has made it, and its name.
Change: TypeAlias = Callable[[Any, Any, Hashable], Any]


def in_memory(variable: Any) -> bool:
    """Return whether a variable has no Dask array, and none within another array."""
    return variable.chunks is None and not is_dask_collection(variable)


def as_dask(variable: Any, name: Hashable) -> Any:
    """Return the data of a variable as a Dask array, in one block if in memory.

    `UnsupportedArrayError` if it is another array around a Dask array, or has units.
    """
    if in_memory(variable):
        variable = variable.chunk()
    check_data(variable.data, name)
    return variable.data


def chunked(variable: Any, sizes: Mapping[Any, Any], name: Hashable) -> Any:
    """Return a variable that is in memory as one of a Dask array, with chunks by dimension.

    One with units stays as it is if there are no chunks for it; else `UnsupportedArrayError`.
    """
    result = variable.chunk(sizes)
    if not sizes and _remedy(result.data) is not None:
        return variable
    check_data(result.data, name)
    return result


def _remedy(data: Any) -> str | None:
    """Return how to get at the values of an array that is more than these; None if it is not."""
    kind = type(data._meta if is_dask_array(data) else data)
    remedy = _WITHOUT_MEANING.get(kind.__module__.partition(".")[0])
    if remedy is None and not is_dask_array(data):
        try:
            backend_for(data)
        except UnsupportedArrayError:
            return _PLAIN
    return remedy


def check_data(data: Any, name: Hashable) -> None:
    """Refuse arrays that are more than their values, such as those with units.

    `UnsupportedArrayError` if `data`, or a block of it, is such an array. Operations check the
    blocks of other Dask arrays themselves.
    """
    remedy = _remedy(data)
    if remedy is None:
        return
    kind = type(data._meta if is_dask_array(data) else data)
    of = "the data" if name is None else f"{name!r}"
    raise UnsupportedArrayError(
        f"{of}: expected an array of NumPy, CuPy or Dask, got {kind.__module__}."
        f"{kind.__qualname__}, which the result would lose. {remedy}."
    )


def sizes_by_name(chunks: Mapping[Any, Any], given: Any) -> dict[Hashable, Any]:
    """Return chunks by dimension; in the place of a resampler the sizes of its groups."""
    return {
        dim: _sizes_of_groups(given[dim], size) if isinstance(size, Resampler) else size
        for dim, size in chunks.items()
    }


def _sizes_of_groups(coordinate: Any, resampler: Resampler) -> tuple[int, ...]:
    """Return the sizes of the groups that a resampler makes along a coordinate, as xarray does."""
    name, n = coordinate.name, coordinate.size
    try:
        along = xr.DataArray(da.zeros(n, chunks=n), {name: coordinate.variable}, [name])
        sizes: tuple[int, ...] = along.chunk({name: resampler}).chunks[0]
    except Exception as exc:  # each kind of resampler has errors of its own
        raise ChunksError(
            f"expected a coordinate {name!r} that {resampler!r:.100} divides, got values of "
            f"{coordinate.dtype}: {exc}. Give sizes in place of the resampler."
        ) from exc
    return sizes


def changed(given: Any, result: Any, change: Change) -> Any:
    """Return `result` with its variables changed; coordinates in memory are not."""
    result = result.assign_coords(changed_coords(given, result, change))
    return with_data(given, result, change)


def with_data(given: Any, result: Any, change: Change) -> Any:
    """Return `result` with its variables changed that are no coordinates."""

    def changed_variable(before: Any, after: Any) -> Any:
        variable = change(before.variable, after.variable, before.name)
        return without_old_chunks(before.variable, variable)

    if isinstance(given, xr.DataArray):
        variable = changed_variable(given, result)
        result = result.copy(deep=False, data=variable.data)
        result.encoding = variable.encoding
        return result
    names = given.data_vars
    return result.assign({name: changed_variable(given[name], result[name]) for name in names})


def changed_coords(given: Any, result: Any, change: Change | None = None) -> dict[Hashable, Any]:
    """Return the coordinates of `result` that differ from those of `given`.

    `change` is applied to those of Dask arrays. Those in memory may have been transposed.
    """
    coords = {}
    for name, coordinate in given.coords.items():
        before, after = coordinate.variable, result[name].variable
        if change is not None and not in_memory(before):
            after = change(before, after, name)
        if before.ndim > 1 or after.chunks is not None:
            coords[name] = without_old_chunks(before, after)
    return coords


def without_old_chunks(before: Any, after: Any) -> Any:
    """Return a variable without the chunks of the file that it came from, if it has others now.

    Files are written with the chunks in the encoding, which may not fit the blocks.
    """
    if after.dims == before.dims and after.chunks == before.chunks:
        return after
    after = after.copy(deep=False)
    after.encoding = {k: v for k, v in after.encoding.items() if k not in _CHUNKS_OF_FILES}
    return after
