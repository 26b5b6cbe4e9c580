"""Methods of expressions of `dask_array` that `install` replaces.

Its optimiser first moves rechunks and overlaps to where they cost least, some of them into reads of
files. So this package takes those that are left when the optimiser makes tasks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.graph.dask_array_expr import (
    MapOverlap,
    Rechunk,
    Transpose,
    choose_method,
    collection_of,
    forget_lowered,
    is_settled,
)
from dask_p2p.ops.arguments import has_unknown_chunks
from dask_p2p.ops.overlap import mapped
from dask_p2p.ops.rechunk import rechunk
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
    made = mapped(
        asked.func,
        tuple(map(collection_of, asked.arrays)),
        dict(asked.kwargs or {}),
        list(asked.depth),
        list(asked.boundary),
        trim=bool(asked.trim_output),
        align_arrays=False,
        allow_rechunk=bool(asked.allow_rechunk),
    )
    if made.chunks != asked.chunks:
        raise InputError(f"expected the chunks {asked.chunks}, got {made.chunks}.")
    return made.expr


#: Methods of expressions, and the functions that replace them: see `dask_p2p.tools.dropin`.
RULES = (
    (Rechunk, "_simplify_up", merged),
    (Transpose, "_simplify_up", by_method),
    (Rechunk, "_lower", lowered),
    (MapOverlap, "_lower", mapped_late),
)
