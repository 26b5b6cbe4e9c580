"""Writes of whole units to Zarr: shards, or chunks of arrays without shards.

A task with a part of a unit reads the unit, changes the part, and writes the unit. So two tasks
lose values if they write to one unit at the same time. `dask.array.store` lets them, and so
do all functions of Dask and xarray that write to Zarr, since each of them calls it. Here arrays get
blocks of whole units first, in one exchange.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import combinations, repeat
from typing import Any

from dask.array.core import normalize_chunks
from dask.array.slicing import normalize_index

from dask_p2p.geometry import Chunks
from dask_p2p.graph.libraries import functions_of, is_dask_array, rechunk_by_tasks
from dask_p2p.ops.arguments import check_chunks_are_known, has_unknown_chunks
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.plans.regular import aligned_chunks, is_regular, regular_size
from dask_p2p.tools.dispatch import try_replace
from dask_p2p.types import DaskArray


def store(
    original: Callable[..., Any],
    sources: Any,
    targets: Any,
    lock: Any = True,
    regions: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Store arrays as `dask.array.store` does, `original`, in whole units of Zarr arrays.

    If two arrays write to one unit, or a region is not made of slices, tasks write in turn.
    Raises `ChunksError` if chunk sizes of an array for Zarr are unknown.
    """
    is_one = is_dask_array(sources)
    arrays, stores = ([sources], [targets]) if is_one else ([*sources], [*targets])
    is_shared = isinstance(regions, tuple) or regions is None
    selections = [*repeat(regions, len(arrays))] if is_shared else [*regions]
    are_pairs = len(arrays) == len(stores) == len(selections)
    if are_pairs and all(map(is_dask_array, arrays)) and any(map(is_zarr_array, stores)):
        areas = [*map(_area, arrays, stores, selections)]
        arrays = [*map(_aligned, arrays, stores, areas)]
        if not _is_cluster_lock(lock) and _share_units(stores, areas):
            lock = True
        sources = arrays[0] if is_one else arrays
        targets = stores[0] if is_one else stores
        regions = selections
    return original(sources, targets, lock, regions, *args, **kwargs)


def to_zarr(original: Callable[..., Any], arr: Any, url: Any, *args: Any, **kwargs: Any) -> Any:
    """Write an array as `dask.array.to_zarr` does, `original`, with one exchange at most.

    Dask itself would first rechunk by tasks: for an existing array to blocks of another size, and
    blocks of several sizes to the largest one.
    """
    if not is_dask_array(arr) or has_unknown_chunks(arr):
        return original(arr, url, *args, **kwargs)
    options = inspect.signature(original).bind(arr, url, *args, **kwargs).arguments
    if is_zarr_array(url):
        import zarr

        region = options.get("region")
        rows = _rows(url.shape, region)
        has_shape = rows is not None and (*map(len, _without_numbers(rows)),) == arr.shape
        if has_shape and not isinstance(url.store, zarr.storage.MemoryStore):
            names = ("compute", "return_stored")
            flags = {name: options[name] for name in names if name in options}
            return functions_of(arr).store(arr, url, lock=False, regions=[region], **flags)
    elif not all(map(is_regular, arr.chunks)):
        of_array = options.get("zarr_array_kwargs") or {}
        units = of_array.get("shards") or of_array.get("chunks")
        arr = _rechunked(arr, regular_chunks(arr.chunks, units))
    return original(arr, url, *args, **kwargs)


def xarray_to_zarr(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """Write as a method ``to_zarr`` of xarray does, `original`, also blocks that do not fit.

    xarray refuses such blocks, but here they are rechunked when they are stored. Regions are left
    to xarray, since several programs may write to regions of one chunk.
    """
    arguments = inspect.signature(original).bind(data, *args, **kwargs).arguments
    is_dataset = isinstance(data, sys.modules["xarray"].Dataset)
    variables = data.data_vars.values() if is_dataset else [data]
    arrays = [item.data for item in (*variables, *data.coords.values()) if item.chunks is not None]
    if all(map(is_dask_array, arrays)) and not {"safe_chunks", "region"} & {*arguments}:
        kwargs["safe_chunks"] = False
    return original(data, *args, **kwargs)


def is_zarr_array(target: Any) -> bool:
    """Return whether a value is an array of Zarr, which is not imported for this."""
    zarr = sys.modules.get("zarr")
    return zarr is not None and isinstance(target, zarr.Array)


def regular_chunks(chunks: Chunks, units: Any = None) -> Chunks:
    """Return chunks of one size along each axis, in whole units if their sizes are numbers.

    >>> regular_chunks(((3, 3, 2, 2),)), regular_chunks(((3, 3, 2, 2),), 4)
    (((3, 3, 3, 1),), ((4, 4, 2),))
    """
    sizes = tuple(max(1, regular_size(along)) for along in chunks)
    result: Chunks = normalize_chunks(sizes, tuple(map(sum, chunks)))
    if isinstance(units, int):
        units = (units,) * len(chunks)
    is_shape = isinstance(units, (tuple, list)) and len(units) == len(chunks)
    if is_shape and all(isinstance(size, int) and size > 0 for size in units):
        return aligned_chunks(result, units)
    return result


# --- positions of an array in a store

#: Rows of a Zarr array along each of its axes, or one number of a row. None: not known.
Area = Sequence[range | int] | None


def _area(x: DaskArray, target: Any, region: Any) -> Area:
    """Return the rows that an array gets in a Zarr array."""
    if not is_zarr_array(target):
        return None
    check_chunks_are_known(x)
    area = [*map(range, x.shape)] if not region else _rows(target.shape, region)
    if area is None or len(_without_numbers(area)) != x.ndim or len(area) != target.ndim:
        return None
    lengths = iter(x.shape)
    return [
        n if isinstance(n, int) else range(n.start, n.start + next(lengths) * n.step, n.step)
        for n in area
    ]


def _rows(shape: Sequence[int], region: Any) -> Area:
    """Return the rows that a region selects, or None if it is not made of slices and numbers."""
    try:
        index = normalize_index(region or (), tuple(shape))
    except IndexError:
        return None  # Dask or Zarr raise an error
    rows = []
    for n, item in zip(shape, index, strict=False):
        if not isinstance(item, (int, slice)):
            return None
        rows.append(range(n)[item])
    is_forward = all(isinstance(row, int) or row.step > 0 for row in rows)
    return rows if is_forward and len(index) == len(shape) else None


def _without_numbers(area: Sequence[range | int]) -> list[range]:
    return [rows for rows in area if isinstance(rows, range)]


# --- whole units


def _units(target: Any) -> Sequence[int]:
    units: Sequence[int] = target.shards or target.chunks
    return units


def _aligned(x: DaskArray, target: Any, area: Area) -> DaskArray:
    if area is None:
        return x
    pairs = zip(_units(target), area, strict=True)
    units = [size for size, rows in pairs if isinstance(rows, range)]
    chunks = aligned_chunks(x.chunks, units, _without_numbers(area))
    return x if chunks == x.chunks else _rechunked(x, chunks)


def _rechunked(x: DaskArray, chunks: Chunks) -> DaskArray:
    """Return an array in other blocks; by Dask's tasks if this package does not support it."""
    result = try_replace("store", rechunk, x, chunks)
    return rechunk_by_tasks(x, chunks) if result is None else result


def _is_cluster_lock(lock: Any) -> bool:
    from distributed import Lock

    return lock is True or isinstance(lock, Lock)


def _share_units(targets: Sequence[Any], areas: Sequence[Area]) -> bool:
    """Return whether tasks may write to one unit of a Zarr array."""
    writes = [pair for pair in zip(targets, areas, strict=True) if is_zarr_array(pair[0])]
    return any(area is None for _, area in writes) or any(
        first.store_path == second.store_path
        and all(map(_overlap, area or (), other_area or (), _units(first)))
        for (first, area), (second, other_area) in combinations(writes, 2)
    )


def _overlap(rows: range | int, other_rows: range | int, size: int) -> bool:
    """Return whether rows lie in one unit along an axis."""
    spans = [
        range(item, item + 1) if isinstance(item, int) else item for item in (rows, other_rows)
    ]
    if not all(spans):
        return False
    first, second = spans
    return first[0] // size <= second[-1] // size and second[0] // size <= first[-1] // size
