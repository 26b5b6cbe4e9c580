"""Checks of the arguments of `iterate` and `spmd`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import index as as_int
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.base import unpack_collections

from dask_p2p.backends import BACKENDS, Backend, backend_for
from dask_p2p.errors import AxesError, ChunksError, InputError, UnsupportedArrayError
from dask_p2p.graph.libraries import check_one_library
from dask_p2p.inputs import checked_count
from dask_p2p.ops.arguments import check_array, check_chunks_are_known
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.plans.partitions import divided_alike
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.plans.seats import ranks_for, room
from dask_p2p.plugins.registration import cluster_workers
from dask_p2p.types import DaskArray

#: Least size of local blocks for several ranks on a worker by default: they share Python's lock.
#: Two ranks took 0.6 times as long as one for Gray-Scott's blocks of 1 MiB. For 16 KiB they took
#: 2.5 times as long (8c61f8c4, two cores of an AMD EPYC).
_LEAST_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Whole:
    """An array that each rank receives as a whole: a constant of `iterate`, or an array of `spmd`.

    Parameters
    ----------
    value : object
        A Dask array, whose blocks are sent to all ranks. In `iterate` also any computed value, such
        as a NumPy array with a table of coefficients.
    """

    value: Any


class Inputs(NamedTuple):
    """The arrays that a section reads."""

    arrays: list[DaskArray]
    others: dict[int, RankGrid]  # by number: decompositions of arrays of other shapes
    wholes: frozenset[int]  # numbers of the arrays that each rank receives as a whole


def check_computed(*given: Any) -> None:
    """Refuse lazy values where computed ones are required: `InputError`."""
    lazy, _ = unpack_collections(given)
    lazy += [value for value in given if type(value).__name__ == "Future"]  # distributed's class
    if lazy:
        raise InputError(
            f"expected computed constants and keywords, got {lazy[0]!r}. Compute it first, or "
            f"give a Dask array as a constant of iterate or an array of spmd, dask_p2p.Whole(x)."
        )


def check_decompositions(arrays: Sequence[DaskArray]) -> None:
    """Refuse arrays that cannot be divided between ranks.

    Raises `InputError` for an empty sequence, and `ChunksError` if chunk sizes are unknown or
    differ. Raises `UnsupportedArrayError` if an array is no Dask array of NumPy or CuPy blocks, or
    if the arrays are of both kinds.
    """
    if not arrays:
        raise InputError("expected at least one Dask array after the function, got none.")
    check_one_library(arrays)
    for x in arrays:
        check_array(x)
        check_chunks_are_known(x)
        check_same_kind(backend_for(arrays[0]._meta), x._meta, "an array")
        if x.shape != arrays[0].shape:
            raise ChunksError(
                f"expected arrays of the first one's shape, {arrays[0].shape}, got {x.shape}."
            )
        if x.chunks != arrays[0].chunks:
            raise ChunksError(
                f"expected arrays of the first one's chunks, {arrays[0].chunks}, got "
                f"{x.chunks}. Call x.rechunk first."
            )


def checked_inputs(given: Sequence[Any], ranks: RankGrid) -> Inputs:
    """Return arrays with one block for each local block where a shape is another than the first's.

    The decompositions of these are those of `Context.grid_of`. Raises `ChunksError` if the number
    of axes differs; otherwise the same errors as `check_decompositions`.
    """
    wholes = frozenset(n for n, each in enumerate(given) if isinstance(each, Whole))
    arrays = [each.value if isinstance(each, Whole) else each for each in given]
    check_one_library(arrays)
    divided = [x for n, x in enumerate(arrays) if n not in wholes]
    check_decompositions([x for x in divided if getattr(x, "shape", None) == arrays[0].shape])
    found, others = list(arrays), dict[int, RankGrid]()
    for number, x in enumerate(arrays):
        check_input(x, arrays[0])
        if number in wholes or x.shape == arrays[0].shape:
            continue
        if x.ndim != arrays[0].ndim:
            raise ChunksError(
                f"expected arrays of {arrays[0].ndim} axes, like the first one, got one of shape "
                f"{x.shape}. Give each rank the whole array, dask_p2p.Whole(x), or add axes."
            )
        others[number] = own = divided_alike(ranks, x.shape)
        chunks = tuple(tuple(n for n in sizes if n) or (0,) for sizes in own.local_sizes)
        found[number] = x if x.chunks == chunks else rechunk(x, chunks)
    return Inputs(found, others, wholes)


def check_input(x: Any, first: DaskArray) -> None:
    """Refuse anything but a Dask array of known chunks, of the first array's library."""
    check_array(x)
    check_chunks_are_known(x)
    check_same_kind(backend_for(first._meta), x._meta, "an array")


def check_same_kind(backend: Backend, value: Any, name: str) -> None:
    """Refuse an array of a library other than the section's: `UnsupportedArrayError`."""
    found = type(value).__module__.partition(".")[0]
    if found in BACKENDS and found != backend.name and np.ndim(value):
        convert = "cupy.asarray" if backend.on_device else "cupy.asnumpy"
        raise UnsupportedArrayError(
            f"expected {backend.title} blocks, like the first array's, got {name} of "
            f"{BACKENDS[found].title}: a section computes with one library. Convert it first, "
            f"x.map_blocks({convert}), or {convert}(x) if it is no Dask array; or give numbers."
        )


def chosen_ranks(x: DaskArray, ranks: int | None, partition: Sequence[int] | None) -> RankGrid:
    """Return the decomposition of an array between ranks.

    Raises `InputError` if the number of ranks is invalid here, and `AxesError` if the array has no
    such axis.
    """
    on_device = backend_for(x._meta).on_device
    size_bytes = prod(x.shape) * x.dtype.itemsize  # expressions have no `nbytes`
    most = most_ranks(ranks, 0 if on_device else size_bytes)
    try:
        axes = list(range(x.ndim) if partition is None else map(as_int, partition))
    except TypeError:
        axes = [x.ndim]
    if not all(axis in range(-x.ndim, x.ndim) for axis in axes):
        raise AxesError(
            f"partition: expected a tuple of axes of an array of {x.ndim} dimensions, got "
            f"{partition!r}."
        )
    divided = [axis % x.ndim for axis in axes]
    return RankGrid.at_most(x.chunks, most, divided)


def ranks_without_arrays(ranks: int | None) -> RankGrid:
    """Return the decomposition of a section without arrays: `ranks` ranks in a line.

    Raises `InputError` if the number of ranks is missing or invalid.
    """
    if ranks is None:
        raise InputError(
            "ranks: expected a number of ranks for a section without arrays, got None. Give one, "
            "such as the number of workers."
        )
    return RankGrid.in_line(most_ranks(ranks))


def most_ranks(ranks: int | None, size_bytes: int = 0) -> int:
    """Return the largest number of ranks; None: the default for an array of a size.

    Raises `InputError` if the number is invalid here.
    """
    try:
        ranks = ranks if ranks is None else checked_count("ranks", ranks=ranks)
    except InputError as exc:
        raise InputError(f"{exc} Leave ranks= out for the default.") from None
    return _default_ranks(size_bytes) if ranks is None else ranks


def _default_ranks(size_bytes: int) -> int:
    """Return a number of ranks that the workers can run at a time; 1 without a cluster.

    Each worker that has the annotated resources runs one, or more in its threads if the local
    blocks are large. The scheduler refuses a section with more ranks than can run.
    """
    needs = dask.get_annotations().get("resources")
    if not isinstance(needs, dict):  # perhaps a function of keys
        needs = {}
    threads = [
        min(worker["nthreads"], room(worker.get("resources", {}), needs))
        for worker in cluster_workers()
    ]
    able = [int(count) for count in threads if count >= 1]
    return ranks_for(able, size_bytes, _LEAST_BLOCK_BYTES)
