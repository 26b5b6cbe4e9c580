"""Layers and redistributions as expressions of the package `dask_array`.

All private parts of that package that this one uses are used here. The module is only imported
where an array of `dask_array` exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask_array import _overlap as overlaps
from dask_array._blockwise import Elemwise
from dask_array._expr import ArrayExpr, ChunksFreeze
from dask_array._materialize import _LOWER_CACHE
from dask_array._new_collection import new_collection as collection_of
from dask_array._overlap import MapOverlap, OverlapInternal
from dask_array._rechunk import Rechunk
from dask_array._rechunk import _choose_rechunk_method as choose_method
from dask_array.manipulation._transpose import Transpose
from dask_array.reductions import _reduction as reductions
from dask_array.slicing import SliceSlicesIntegers

from dask_p2p.geometry import Chunks
from dask_p2p.graph.redistribution import (
    Expressions,
    LateExchange,
    LayerArray,
    LazyLayer,
    PlannedLayer,
    Planner,
)

__all__ = [
    "MapOverlap",
    "OverlapInternal",
    "Rechunk",
    "Transpose",
    "choose_method",
    "collection_of",
    "overlaps",
]

#: Reductions whose results do not depend on the order of the elements.
_OF_ANY_ORDER = {
    *(reductions.All, reductions.Any, reductions.Max, reductions.Min),
    *(reductions.NanMax, reductions.NanMin),
}
#: Reductions whose results do not depend on it for integers, either.
_EXACT = _OF_ANY_ORDER | {
    *(reductions.NanProd, reductions.NanSum, reductions.Prod, reductions.Sum),
}


class PlannerExpr(LayerArray, ArrayExpr):  # type: ignore[misc]
    """An array of a `LazyLayer`."""


class P2PRechunk(PlannerExpr):
    """A rechunk; `dask_array` shows the name of the class in lists of operations."""


class P2PTranspose(PlannerExpr):
    """A transpose."""


class P2POverlap(PlannerExpr):
    """Blocks with halos, or a function of them."""


class P2PTransform(PlannerExpr):
    """A stage of a Fourier transform."""


_BY_PREFIX = {
    "p2p-fft": P2PTransform,
    "p2p-overlap": P2POverlap,
    "p2p-rechunk": P2PRechunk,
    "p2p-transpose": P2PTranspose,
}


class EagerElemwise(Elemwise):  # type: ignore[misc]
    """An elementwise operation of exchanged arrays: its slices make the exchanges smaller."""

    _allow_no_cull_slice_pushdown = True  # also for slices of all blocks

    def _simplify_up(self, parent: Any, dependents: Any) -> Any:
        if type(parent) is Elemwise:
            return EagerElemwise(*parent.operands)
        return super()._simplify_up(parent, dependents)


class RedistributeExpr(LateExchange, ArrayExpr):  # type: ignore[misc]
    """An array in other blocks, with permuted axes, which is planned last.

    So the optimiser merges it with slices, transposes and rechunks before and after it.
    """

    _allow_no_cull_slice_pushdown = True  # fewer bytes move, even if no block is left out

    def _simplify_up(self, parent: Any, dependents: Any) -> Any:
        if isinstance(parent, SliceSlicesIntegers):
            return self._slice_pushdown(parent, dependents)
        if type(parent) in _EXACT:
            result = self._reduced(parent)
        elif isinstance(parent, Elemwise):
            result = self.of_smaller(parent)
        else:
            result = self.merged(parent)
        if self._other_dependents(parent, dependents) and self.is_exchanged(result):
            result = None  # this array is made anyway
        if result is None:
            return EagerElemwise(*parent.operands) if type(parent) is Elemwise else None
        if (kept := self._preserve_grid_contract(parent, result, dependents)) is not None:
            self._unlink_pushed_dependency(dependents)
        return kept

    def _accept_slice(self, slice_expr: Any) -> Any:
        return self.sliced(slice_expr)

    def _reduced(self, reduction: Any) -> Any:
        """Return the redistribution of the reduced input, for reductions with exact results."""
        has_empty = any(0 in sizes for sizes in self.array.chunks)  # without a largest element
        if reduction.weights is not None or has_empty or not _is_exact(reduction):
            return None
        axes, split = reduction.axis, reduction.split_every
        given = {
            **dict(zip(reduction._parameters, reduction.operands, strict=True)),
            "array": self.array,
            "axis": tuple(self.axes[axis] for axis in axes),
            "split_every": {self.axes[axis]: n for axis, n in split.items()}
            if isinstance(split, dict)
            else split,
        }
        kept = range(self.ndim) if reduction.keepdims else sorted({*range(self.ndim)} - {*axes})
        by_input = sorted(self.axes[axis] for axis in kept)
        order = [by_input.index(self.axes[axis]) for axis in kept]
        return self.replaced(type(reduction)(*given.values()), order, reduction.chunks)


def layer_expr(layer: LazyLayer, inputs: Sequence[Any]) -> PlannerExpr:
    """Return the expression of a layer, whose inputs keep their chunks when they are optimised."""
    prefix = layer.prefix if isinstance(layer, PlannedLayer) else ""
    return _BY_PREFIX.get(prefix, PlannerExpr)(layer, *map(_frozen, inputs))


def redistribute_expr(
    x: Any, axes: tuple[int, ...], after: Chunks, planner: Planner
) -> RedistributeExpr:
    """Return the expression of an array in other blocks, with permuted axes."""
    return RedistributeExpr(x, axes, after, planner)


def is_settled(rechunk: Any) -> bool:
    """Return whether `dask_array` would neither drop a rechunk, nor move it into its input."""
    if rechunk.chunks == rechunk.array.chunks and not rechunk.balance:
        return False
    return rechunk._pushdown_into_io() is None and rechunk._pushdown_through_concatenate() is None


def forget_lowered() -> None:
    """Clear the plans that `dask_array` keeps of expressions in use, so that it plans again."""
    _LOWER_CACHE.clear()


def _frozen(expr: Any) -> Any:
    return expr if isinstance(expr, ChunksFreeze) else ChunksFreeze(expr, expr.chunks)


def _is_exact(reduction: Any) -> bool:
    """Return whether a reduction has the same result for every order of its elements."""
    dtypes = (reduction.array.dtype, reduction.dtype)
    if type(reduction) in _OF_ANY_ORDER:
        return not any(dtype.hasobject for dtype in dtypes)  # objects may be equal and differ
    return all(dtype.kind in "biu" for dtype in dtypes)


RedistributeExpr.library = Expressions(
    is_transpose=lambda expr: isinstance(expr, Transpose),
    is_elementwise=lambda expr: isinstance(expr, Elemwise),
    is_rechunk=lambda expr: type(expr) is Rechunk,
    collection_of=collection_of,
    with_fixed_chunks=_frozen,
    of_layer=layer_expr,
)
