"""Layers and redistributions as expressions of the package `dask_array`.

All private parts of that package that this one uses are used here. The module is only imported
where an array of `dask_array` exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from numbers import Integral
from typing import Any, Protocol

from dask.array.utils import meta_from_array
from dask_array._expr import ArrayExpr, ChunksFreeze
from dask_array._materialize import _LOWER_CACHE
from dask_array._new_collection import new_collection as collection_of
from dask_array._overlap import MapOverlap
from dask_array._rechunk import Rechunk
from dask_array._rechunk import _choose_rechunk_method as choose_method
from dask_array.manipulation._transpose import Transpose
from dask_array.slicing import SliceSlicesIntegers

from dask_p2p.config import Options
from dask_p2p.geometry import Chunks, block_bounds
from dask_p2p.graph.layer import LazyLayer, PlannedLayer
from dask_p2p.plans import GridPlan

__all__ = ["MapOverlap", "Rechunk", "Transpose", "choose_method", "collection_of"]


class PassPlanner(Protocol):
    """The planner of a redistribution."""

    @property
    def options(self) -> Options:
        """Options that are sent with the tasks."""

    def __call__(
        self, before: Chunks, axes: tuple[int, ...], after: Chunks
    ) -> Sequence[tuple[GridPlan, Chunks]]:
        """Return the plans of the passes, with the chunks after each."""


class PlannerExpr(ArrayExpr):  # type: ignore[misc]
    """An array of a `LazyLayer`, which is the first operand; the others are its inputs."""

    _parameters = ("lazy_layer",)

    @cached_property
    def _name(self) -> str:
        name: str = self.lazy_layer.name(self.deterministic_token)
        return name

    @cached_property
    def chunks(self) -> Chunks:
        chunks: Chunks = self.lazy_layer.chunks
        return chunks

    @cached_property
    def _meta(self) -> Any:
        meta = self.lazy_layer.meta(next(iter(self.dependencies()), None))
        return meta_from_array(meta, len(self.chunks), meta.dtype)

    def _layer(self) -> Mapping[Any, Any]:
        tasks: Mapping[Any, Any] = self.lazy_layer.tasks(self._name, self.dependencies())
        return tasks


class RedistributeExpr(ArrayExpr):  # type: ignore[misc]
    """An array in other blocks, with permuted axes, which is planned last.

    So the optimiser merges it with slices, transposes and rechunks before and after it.
    """

    _parameters = ("array", "axes", "chunks", "passes")
    _allow_no_cull_slice_pushdown = True  # fewer bytes move, even if no block is left out

    @property
    def _prefix(self) -> str:
        return "p2p-rechunk" if _is_identity(self.axes) else "p2p-transpose"

    @cached_property
    def _name(self) -> str:
        return f"{self._prefix}-{self.deterministic_token}"

    @cached_property
    def _meta(self) -> Any:
        meta = self.array._meta
        return meta_from_array(meta, len(self.axes), meta.dtype)

    def _with(self, array: Any, axes: Sequence[int], chunks: Chunks) -> Any:
        """Return another redistribution by the same planner, or the array if nothing changes."""
        if _is_identity(axes) and array.chunks == chunks:
            return array
        return RedistributeExpr(array, tuple(axes), chunks, self.passes)

    def _simplify_down(self) -> Any:
        if _is_identity(self.axes) and self.array.chunks == self.chunks:
            return self.array
        return None

    def _simplify_up(self, parent: Any, dependents: Any) -> Any:
        if isinstance(parent, SliceSlicesIntegers):
            return self._slice_pushdown(parent, dependents)
        if self._other_dependents(parent, dependents):
            return None  # this array is made anyway
        if isinstance(parent, (Transpose, RedistributeExpr)):
            order = [self.axes[a] for a in parent.axes]
        elif type(parent) is Rechunk and _moves(parent, self.chunks):
            order = self.axes
        else:
            return None
        result = self._with(self.array, order, _integers(parent.chunks))
        result = self._preserve_grid_contract(parent, result, dependents)
        if result is not None:
            self._unlink_pushed_dependency(dependents)
        return result

    def _accept_slice(self, slice_expr: Any) -> Any:
        """Return the redistribution of the slice of the input that a slice needs."""
        index = (*slice_expr.index, *[slice(None)] * (self.ndim - len(slice_expr.index)))
        if any(not isinstance(each, (slice, Integral)) for each in index):
            return None
        by_input = dict(zip(self.axes, index, strict=True))
        given = collection_of(self.array)[tuple(by_input[a] for a in range(self.ndim))].expr
        # An integer drops its axis.
        kept = [a for a in range(self.ndim) if isinstance(by_input[a], slice)]
        order = [kept.index(a) for a in self.axes if a in kept]
        return self._with(given, order, _integers(slice_expr.chunks))

    def _lower(self) -> Any:
        x, axes = self.array, self.axes
        while True:
            if isinstance(x, Transpose):
                x, axes = x.array, tuple(x.axes[a] for a in axes)
            elif type(x) is Rechunk and x.method != "tasks" and _is_known(x.array.chunks):
                x = x.array
            else:
                break
        x = _frozen(x)
        if _is_identity(axes) and x.chunks == self.chunks:
            return x
        prefix = "p2p-rechunk" if _is_identity(axes) else "p2p-transpose"
        for plan, grid in self.passes(_integers(x.chunks), axes, self.chunks):
            x = layer_expr(PlannedLayer(prefix, plan, self.passes.options), [x])
            if plan.chunks != grid:
                x = x.rechunk(grid, method="tasks")  # views, on the same worker
        return x


def layer_expr(layer: LazyLayer, inputs: Sequence[Any]) -> PlannerExpr:
    """Return the expression of a layer, whose inputs keep their chunks when they are optimised."""
    return PlannerExpr(layer, *map(_frozen, inputs))


def redistribute_expr(x: Any, axes: tuple[int, ...], after: Chunks, passes: PassPlanner) -> Any:
    """Return the expression of an array in other blocks, with permuted axes."""
    return RedistributeExpr(x, axes, after, passes)


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


def _is_identity(axes: Sequence[int]) -> bool:
    return tuple(axes) == tuple(range(len(axes)))


def _is_known(chunks: Any) -> bool:
    return all(size == size for sizes in chunks for size in sizes)


def _integers(chunks: Any) -> Chunks:
    return tuple(tuple(map(int, sizes)) for sizes in chunks)


def _moves(rechunk: Any, before: Chunks) -> bool:
    """Return whether a rechunk of `dask_array` does more than split blocks, which are views."""
    if rechunk.method == "tasks" or not _is_known(rechunk.chunks):
        return False
    return any(
        not {*block_bounds(old)} <= {*block_bounds(new)}
        for old, new in zip(before, rechunk.chunks, strict=True)
    )
