"""The libraries of lazy arrays: `dask.array`, with graphs or expressions, and `dask_array`.

The package `dask_array` replaces `dask.array`; its arrays are expressions. It is never imported
from here first: an array of it exists only where the user has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import dask.array as da
from dask.array.core import Array as GraphArray

from dask_p2p.errors import UnsupportedArrayError

# Bound at import: `install` may replace Dask's function by this package's.
_rechunk = partial(da.rechunk, method="tasks")


def is_dask_array(x: Any) -> bool:
    """Return whether `x` is a lazy array of one of the libraries."""
    return library_of(x) is not None


def library_of(x: Any) -> str | None:
    """Return the name of the library that `x` is a lazy array of; None for other values."""
    if isinstance(x, GraphArray):
        return "dask.array"
    if isinstance(x, da.Array):
        return "dask.array with query planning"
    if is_of_dask_array(x):
        return "dask_array"
    return None


def is_of_dask_array(x: Any) -> bool:
    """Return whether `x` is an array of the package `dask_array`."""
    kind = getattr(sys.modules.get("dask_array"), "Array", None)  # None while it is imported
    return kind is not None and isinstance(x, kind)


def functions_of(x: Any) -> Any:
    """Return the module whose functions make arrays like `x`; `dask.array` for other values."""
    return sys.modules["dask_array"] if is_of_dask_array(x) else da


def check_one_library(arrays: Iterable[Any]) -> None:
    """Raise `UnsupportedArrayError` for lazy arrays of several libraries."""
    names = dict.fromkeys(filter(None, map(library_of, arrays)))
    if len(names) > 1:
        raise UnsupportedArrayError(
            f"expected arrays of one library in a call, got arrays of {' and of '.join(names)}. "
            f"Make all of them with one library."
        )


def fix_blocks(x: Any) -> Any:
    """Return the array, whose optimiser keeps its chunks; `dask_array` may choose others."""
    return x.freeze_chunks() if is_of_dask_array(x) else x


def rechunk_by_tasks(x: Any, chunks: Any, **options: Any) -> Any:
    """Return the array in other blocks, rechunked by tasks of its own library."""
    if is_of_dask_array(x):
        return x.rechunk(chunks, method="tasks", **options)
    return _rechunk(x, chunks, **options)
