"""Methods of expressions of `dask_array` that `install` replaces.

Its optimiser first moves rechunks and overlaps to where they cost least, some of them into reads of
files. So this package takes those that are left when the optimiser makes tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dask_p2p.config import checked_options
from dask_p2p.errors import InputError
from dask_p2p.graph.arrays import planned_array
from dask_p2p.graph.dask_array_expr import (
    MapOverlap,
    OverlapInternal,
    Rechunk,
    Transpose,
    choose_method,
    collection_of,
    forget_lowered,
    is_settled,
    overlaps,
)
from dask_p2p.ops.arguments import check_array, check_chunks_are_known, has_unknown_chunks
from dask_p2p.ops.halo import checked_depths
from dask_p2p.ops.overlap import mapped
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.plans import halo_plan
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.tools.taken import method_of, tried

__all__ = ["RULES", "forget_lowered"]


def lowered(asked: Any) -> Any:
    """Rechunk an expression, in place of `Rechunk._lower`; None leaves it to `dask_array`."""
    if not is_settled(asked) or not _is_taken(asked):
        return None
    return tried("rechunk", _redistributed, asked)


def merged(asked: Any, parent: Any, dependents: Any) -> Any:
    """Merge a rechunk and its transpose, in place of `Rechunk._simplify_up`."""
    if type(asked) is not Rechunk or not isinstance(parent, Transpose):
        return None
    if asked._other_dependents(parent, dependents) or asked._pushdown() is not None:
        return None
    if not _is_taken(asked):
        return None
    return tried("rechunk", _redistributed, asked, parent)


def by_method(transpose: Any, parent: Any, dependents: Any) -> Any:
    """Rechunk a transpose by the method ``p2p``, in place of `Transpose._simplify_up`.

    The optimiser moves such a rechunk before the transpose, without its method.
    """
    if type(parent) is not Rechunk or parent.method != "p2p" or not _is_taken(parent):
        return None
    if transpose._other_dependents(parent, dependents):
        return None
    return tried("rechunk", _redistributed, parent)


def mapped_late(asked: Any) -> Any:
    """Map a function over blocks with halos, in place of `MapOverlap._lower`."""
    if asked._native_moving_window is not None:  # needs no halo
        return None
    return tried("map_overlap", _mapped, asked)


def mapped_now(
    func: Any,
    arrays: Sequence[Any],
    depth: Sequence[Any],
    boundary: Sequence[Any],
    trim: Any,
    allow_rechunk: Any,
    kwargs: Mapping[str, Any],
) -> Any:
    """Map a function that changes axes or chunks, in place of `_map_overlap_direct`.

    `dask_array` has no expression of such a map, so this package takes it when it is called.
    """
    if func is np.lib.stride_tricks.sliding_window_view:  # the optimiser looks for its blocks
        return None
    given = {"trim": trim, "allow_rechunk": allow_rechunk, "kwargs": kwargs}
    return tried("map_overlap", _mapped_arrays, func, arrays, depth, boundary, **given)


def with_halo(asked: Any) -> Any:
    """Assemble blocks with the halos of their neighbours, in place of `OverlapInternal._lower`."""
    return tried("map_overlap", _with_halo, asked)


def _is_taken(asked: Any) -> bool:
    """Return whether this package runs a rechunk."""
    before, after = asked.array.chunks, asked.chunks
    if before == after or (has_unknown_chunks(asked) and isinstance(asked._meta, np.ndarray)):
        return False
    return (asked.method or method_of(choose_method, before, after, asked.threshold)) == "p2p"


def _redistributed(asked: Any, transpose: Any = None) -> Any:
    x = collection_of(asked.array)
    if transpose is None:
        return rechunk(x, asked.chunks).expr
    return rechunk(x, transpose.chunks, axes=transpose.axes).expr


def _mapped(asked: Any) -> Any:
    arrays = [*map(collection_of, asked.arrays)]
    given = {"trim": asked.trim_output, "allow_rechunk": asked.allow_rechunk}
    made = _mapped_arrays(
        asked.func, arrays, asked.depth, asked.boundary, kwargs=asked.kwargs or {}, **given
    )
    return _with_chunks(asked, made)


def _mapped_arrays(
    func: Any,
    arrays: Sequence[Any],
    depth: Sequence[Any],
    boundary: Sequence[Any],
    *,
    trim: Any,
    allow_rechunk: Any,
    kwargs: Mapping[str, Any],
) -> Any:
    return mapped(
        func,
        tuple(arrays),
        dict(kwargs),
        list(depth),
        list(boundary),
        trim=bool(trim),
        align_arrays=False,
        allow_rechunk=bool(allow_rechunk),
    )


def _with_halo(asked: Any) -> Any:
    x = collection_of(asked.array)
    check_array(x)
    check_chunks_are_known(x)
    depth = {axis: width for axis, width in asked.axes.items() if len(x.chunks[axis]) > 1}
    (widths,) = checked_depths(depth, [x.shape])
    register_if_possible()
    plan = halo_plan(x.chunks, widths, ["none"] * x.ndim)
    return _with_chunks(asked, planned_array("p2p-overlap", x, plan, checked_options()))


def _with_chunks(asked: Any, made: Any) -> Any:
    """Return the expression of an array; raises `InputError` if its chunks are others."""
    if made.chunks != asked.chunks:
        raise InputError(f"expected the chunks {asked.chunks}, got {made.chunks}.")
    return made.expr


#: Methods of expressions and a function, with their replacements: see `dask_p2p.tools.dropin`.
RULES = (
    (Rechunk, "_simplify_up", merged),
    (Transpose, "_simplify_up", by_method),
    (Rechunk, "_lower", lowered),
    (MapOverlap, "_lower", mapped_late),
    (OverlapInternal, "_lower", with_halo),
    (overlaps, "_map_overlap_direct", mapped_now),
)
