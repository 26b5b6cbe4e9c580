"""Chunks of one size along each dimension, for Zarr."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from dask_p2p.errors import ChunksError
from dask_p2p.ops.arguments import check_chunks_are_known
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.plans.regular import is_regular, regular_size
from dask_p2p.xarray.by_name import named_in_errors
from dask_p2p.xarray.variables import (
    as_dask,
    changed,
    chunked,
    in_memory,
    with_host_memory,
    without_file_chunks,
)


def regular(given: Any, sizes: Mapping[Hashable, Any]) -> Any:
    """Return an array or dataset with chunks of one size along each dimension, in host memory.

    Encodings lose the chunks of a file that do not fit the blocks.
    """

    def change(before: Any, _: Any, name: Hashable) -> Any:
        if in_memory(before):
            named = {dim: sizes[dim] for dim in before.dims if dim in sizes}
            return _checked(chunked(before, named, name), name) if named else before
        x = as_dask(before, name)
        check_chunks_are_known(x)
        wanted = {
            axis: sizes[dim] if dim in sizes else regular_size(x.chunks[axis])
            for axis, dim in enumerate(before.dims)
        }
        with named_in_errors(before.dims, wanted):
            after = _checked(before.copy(deep=False, data=rechunk(x, wanted)), name)
        return after if _fits(after) else without_file_chunks(after)

    return with_host_memory(changed(given, given, change))


def _checked(variable: Any, name: Hashable) -> Any:
    """Return a variable; raise `ChunksError` if it has blocks of several sizes."""
    for dim, blocks in zip(variable.dims, variable.chunks, strict=True):
        if not is_regular(blocks):
            raise ChunksError(
                f"{name!r}: expected chunks of one size along {dim!r}, as Zarr has them, got "
                f"{blocks}. Give one number: chunks={{{dim!r}: {max(blocks)}}}."
            )
    return variable


def _fits(variable: Any) -> bool:
    """Return whether each block has whole chunks of the file that the encoding describes."""
    of_file = variable.encoding.get("shards") or variable.encoding.get("chunks")
    if not isinstance(of_file, tuple) or len(of_file) != variable.ndim:
        return not of_file
    pairs = zip(variable.chunks, of_file, strict=True)
    return all(size and (len(blocks) == 1 or blocks[0] % size == 0) for blocks, size in pairs)
