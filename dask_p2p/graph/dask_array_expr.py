"""A layer as an expression of the package `dask_array`.

All private parts of that package that this one uses are used here. The module is only imported
where an array of `dask_array` exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from dask.array.utils import meta_from_array
from dask_array._expr import ArrayExpr, ChunksFreeze

from dask_p2p.geometry import Chunks
from dask_p2p.graph.layer import LazyLayer


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

    def _requires_grid_preservation(self, dependency: Any) -> bool:
        return True  # the layer's plan is one for the chunks of its inputs

    def _layer(self) -> Mapping[Any, Any]:
        tasks: Mapping[Any, Any] = self.lazy_layer.tasks(self._name, self.dependencies())
        return tasks


def layer_expr(layer: LazyLayer, inputs: Sequence[Any]) -> PlannerExpr:
    """Return the expression of a layer, whose inputs keep their chunks when they are optimised."""
    return PlannerExpr(layer, *map(_frozen, inputs))


def _frozen(expr: Any) -> Any:
    return expr if isinstance(expr, ChunksFreeze) else ChunksFreeze(expr, expr.chunks)
