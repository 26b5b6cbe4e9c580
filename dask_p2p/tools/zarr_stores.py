"""Writes of whole units to Zarr: shards, or chunks of arrays without shards.

A task with a part of a unit reads the unit, changes the part, and writes the unit. So two tasks
lose values if they write to one unit at the same time. `dask.array.store` lets them, and so
do all functions of Dask and xarray that write to Zarr, since each of them calls it. Here arrays get
blocks of whole units first, in one exchange.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, pairwise, repeat
from math import gcd, prod
from threading import RLock
from typing import Any
from weakref import WeakSet

from dask import config
from dask.array.core import normalize_chunks
from dask.array.slicing import normalize_index
from distributed import Lock

from dask_p2p.errors import InputError, P2PWarning, RegistrationError
from dask_p2p.geometry import Chunks, block_bounds
from dask_p2p.graph import functions_of, is_dask_array, rechunk_by_tasks
from dask_p2p.ops.arguments import check_chunks_are_known, has_unknown_chunks
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.plugins.registration import connection_of, current_client
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
    Raises `InputError` if chunk sizes of an array for Zarr are unknown.
    """
    is_one = is_dask_array(sources)
    arrays, stores = ([sources], [targets]) if is_one else ([*sources], [*targets])
    is_shared = isinstance(regions, tuple) or regions is None
    selections = [*repeat(regions, len(arrays))] if is_shared else [*regions]
    are_pairs = len(arrays) == len(stores) == len(selections)
    if are_pairs and all(map(is_dask_array, arrays)) and any(map(is_zarr_array, stores)):
        areas = [*map(_area, arrays, stores, selections)]
        arrays = [*map(_align_to_units, arrays, stores, areas)]
        if not isinstance(lock, Lock) and _share_units(stores, areas):
            lock = True  # of the cluster
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
        arr = _rechunk_by_exchange(arr, regular_chunks(arr.chunks, units))
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


def _align_to_units(x: DaskArray, target: Any, area: Area) -> DaskArray:
    if area is None:
        return x
    pairs = zip(target.shards or target.chunks, area, strict=True)
    units = [size for size, rows in pairs if isinstance(rows, range)]
    chunks = aligned_chunks(x.chunks, units, _without_numbers(area))
    return x if chunks == x.chunks else _rechunk_by_exchange(x, chunks)


def _rechunk_by_exchange(x: DaskArray, chunks: Chunks) -> DaskArray:
    result = try_replace("store", rechunk, x, chunks)
    return rechunk_by_tasks(x, chunks) if result is None else result


def _share_units(targets: Sequence[Any], areas: Sequence[Area]) -> bool:
    writes = [pair for pair in zip(targets, areas, strict=True) if is_zarr_array(pair[0])]
    return any(area is None for _, area in writes) or any(
        first.store_path == second.store_path
        and all(map(_share_unit, area or (), other_area or (), first.shards or first.chunks))
        for (first, area), (second, other_area) in combinations(writes, 2)
    )


def _share_unit(rows: range | int, other_rows: range | int, size: int) -> bool:
    """Return whether rows lie in one unit along an axis."""
    spans = [
        range(item, item + 1) if isinstance(item, int) else item for item in (rows, other_rows)
    ]
    if not all(spans):
        return False
    first, second = spans
    return first[0] // size <= second[-1] // size and second[0] // size <= first[-1] // size


LOCK = RLock()
#: Installations that have not ended: each counts calls in its `counts`.
ACTIVE: set[Any] = set()
#: Connections to clusters that lack the package.
LACKING: WeakSet[Any] = WeakSet()


def is_taken_in_any_case(before: Any, after: Any) -> bool:
    """Return whether an installation takes a rechunk, even if Dask would choose tasks."""
    takes_all = any(installation.takes_all for installation in [*ACTIVE])
    if not takes_all or config.get("array.rechunk.method", None) is not None:
        return False
    connection = connection_of(current_client())
    if connection is None or connection in LACKING:
        return False
    pairs = [*zip(before, after, strict=True)]
    if any(size != size for along in pairs for sizes in along for size in sizes):
        return False
    # Blocks that are only split stay on their workers.
    return any(not {*accumulate(old)} <= {*accumulate(new)} for old, new in pairs)


def try_replace(verb: str, make: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return the array that `make` returns, and count the call under `verb`.

    None if this package does not support the arguments, or the cluster lacks the package.
    """
    connection = connection_of(current_client())
    if connection in LACKING:
        return None
    try:
        result = make(*args, **kwargs)
    except InputError:
        return None
    except RegistrationError as exc:
        if connection is not None:
            LACKING.add(connection)
        warnings.warn(f"dask_p2p: Dask's own function is used: {exc}", P2PWarning, stacklevel=4)
        return None
    if result is not None:
        with LOCK:
            for installation in ACTIVE:
                installation.counts[verb] += 1
    return result


def is_regular(sizes: Sequence[int]) -> bool:
    """Return whether all blocks have one size, except that the last one may be smaller.

    >>> is_regular((4, 4, 2)), is_regular((3, 3, 2, 2)), is_regular((2, 4))
    (True, False, False)
    """
    return len({*sizes[:-1]}) <= 1 and sizes[-1] <= sizes[0]


def regular_size(sizes: Sequence[int]) -> int:
    """Return the chunk size that moves the fewest elements to other blocks.

    The candidates are the given sizes, their greatest common divisor and the even size. Sizes below
    half of the even one would make too many chunks.

    >>> regular_size((3, 3, 2, 2)), regular_size((100, 200, 100, 200))
    (3, 100)
    """
    if is_regular(sizes):
        return sizes[0]
    even = -(-sum(sizes) // len(sizes))
    candidates = {even, *(size for size in (*sizes, gcd(*sizes)) if 2 * size >= even)}
    return min(candidates, key=lambda size: (_moved_elements(sizes, size), -size))


def aligned_chunks(
    chunks: Chunks, units: Sequence[int], rows: Sequence[range] | None = None
) -> Chunks:
    """Return chunks of an array such that no two blocks share a unit of the store.

    A store writes a unit at once: a shard, or a chunk. `rows` are the positions in the
    store of the indices along each axis, by default the indices themselves.

    The bounds of the blocks are multiples of one size in the store, so the first and the last block
    may be short. An axis that fits keeps its chunks. But no block has more than twice the elements
    of the largest block before, or of a unit.

    >>> aligned_chunks(((5, 5, 5, 5), (7,)), (8, 4))
    ((8, 8, 4), (7,))
    >>> aligned_chunks(((5, 5),), (4,), [range(9, 19)])  # appended to 9 elements
    ((3, 4, 3),)
    """
    if rows is None:
        rows = [range(sum(sizes)) for sizes in chunks]
    fitting = list(map(_has_whole_units, chunks, units, rows))
    if all(fitting):
        return chunks
    result = [
        sizes if fits else _between_multiples(unit * max(1, row.step * max(sizes) // unit), row)
        for sizes, fits, unit, row in zip(chunks, fitting, units, rows, strict=True)
    ]
    per_unit = [
        max(1, min(-(-unit // row.step), len(row))) for unit, row in zip(units, rows, strict=True)
    ]
    size_limit = 2 * max(prod(map(max, chunks)), prod(per_unit))
    while prod(map(max, result)) > size_limit:
        counts = [-(-max(sizes) // n) for sizes, n in zip(result, per_unit, strict=True)]
        count = max(counts)  # of units along a block
        if count == 1:
            break
        axis = counts.index(count)
        result[axis] = _between_multiples(units[axis] * (count // 2), rows[axis])
    return tuple(result)


def _has_whole_units(sizes: Sequence[int], unit: int, row: range) -> bool:
    bounds = {*block_bounds(sizes)} - {0, len(row)}
    return all(row[bound] // unit > row[bound - 1] // unit for bound in bounds)


def _between_multiples(size: int, row: range) -> tuple[int, ...]:
    if not row:
        return (0,)
    multiples = range((row[0] // size + 1) * size, row[-1] + 1, size)
    bounds = {0, len(row), *(-(-(multiple - row.start) // row.step) for multiple in multiples)}
    return tuple(stop - start for start, stop in pairwise(sorted(bounds)))


def _moved_elements(sizes: Sequence[int], size: int) -> int:
    """Return the number of elements outside of the block with the largest part of their chunk."""
    bounds = block_bounds(sizes)
    length, block, unmoved = bounds[-1], 0, 0
    for start in range(0, length, size):
        stop, largest = min(start + size, length), 0
        while bounds[block] < stop:
            part = min(stop, bounds[block + 1]) - max(start, bounds[block])
            largest = max(largest, part)
            if bounds[block + 1] > stop:  # the next chunk has a part of this block, too
                break
            block += 1
        unmoved += largest
    return length - unmoved
