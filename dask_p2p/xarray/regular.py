"""Chunks of one size along each dimension, and in whole units of writing, for Zarr."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from dask_p2p.errors import InputError
from dask_p2p.geometry import Chunks
from dask_p2p.ops.arguments import check_chunks_are_known, checked_chunks
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.plans.regular import is_regular, regular_size
from dask_p2p.tools.zarr_stores import regular_chunks
from dask_p2p.xarray.by_name import named_in_errors
from dask_p2p.xarray.variables import (
    as_dask,
    changed,
    chunked,
    in_memory,
    with_host_memory,
    without_file_chunks,
)


def regular(
    given: Any,
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
        if in_memory(before):
            return _checked(chunked(before, named, name), name) if named else before
        x = as_dask(before, name)
        check_chunks_are_known(x)
        if not named and not {*existing_dims}.isdisjoint(before.dims):
            return before
        by_axis = {
            axis: sizes[dim] if dim in sizes else regular_size(x.chunks[axis])
            for axis, dim in enumerate(before.dims)
        }
        of_file = encoding.get(name, {})
        with named_in_errors(before.dims, by_axis):
            chunks = checked_chunks(by_axis, x.chunks, x.dtype)
            _check_one_size(chunks, before.dims, name)
            chunks = regular_chunks(chunks, of_file.get("shards") or of_file.get("chunks"))
            after = before.copy(deep=False, data=rechunk(x, chunks))
        return after if _fits(after) else without_file_chunks(after)

    return with_host_memory(changed(given, given, change))


def with_chunks_of_shards(
    encoding: Mapping[Hashable, Mapping[str, Any]], given: Any, sizes: Mapping[Hashable, Any]
) -> dict[Hashable, Any]:
    """Return encodings with chunks for all shards: those of `sizes`, or whole shards.

    xarray would take the blocks for chunks, which need not divide shards.
    """
    result = {**encoding}
    for name, of_file in encoding.items():
        is_array = not hasattr(given, "data_vars") and name not in given.coords
        dims = given.dims if is_array else given[name].dims
        shards = of_file.get("shards")
        if isinstance(shards, int):
            shards = (shards,) * len(dims)
        if shards and not of_file.get("chunks") and len(shards) == len(dims):
            numbers = {dim: n for dim, n in sizes.items() if isinstance(n, int) and n > 0}
            chunks = tuple(numbers.get(dim, n) for dim, n in zip(dims, shards, strict=True))
            result[name] = {**of_file, "chunks": chunks}
    return result


def _checked(variable: Any, name: Hashable) -> Any:
    """Return a variable; raise `InputError` if it has blocks of several sizes."""
    _check_one_size(variable.chunks, variable.dims, name)
    return variable


def _check_one_size(chunks: Chunks, dims: Sequence[Hashable], name: Hashable) -> None:
    for dim, blocks in zip(dims, chunks, strict=True):
        if not is_regular(blocks):
            raise InputError(
                f"{name!r}: expected chunks of one size along {dim!r}, as Zarr has them, got "
                f"{blocks}. Give one number: chunks={{{dim!r}: {max(blocks)}}}."
            )


def _fits(variable: Any) -> bool:
    """Return whether each block has whole chunks of the file that the encoding describes."""
    of_file = variable.encoding.get("shards") or variable.encoding.get("chunks")
    if not isinstance(of_file, tuple) or len(of_file) != variable.ndim:
        return not of_file
    pairs = zip(variable.chunks, of_file, strict=True)
    return all(size and (len(blocks) == 1 or blocks[0] % size == 0) for blocks, size in pairs)
