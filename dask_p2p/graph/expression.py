"""A layer as an expression of array-expr, the query planning of `dask.array`.

Dask decides at the import of `dask.array` whether arrays are expressions. This module uses private
parts of Dask, and is only imported if arrays are expressions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from dask.array._array_expr._blockwise import Elemwise, Transpose
from dask.array._array_expr._expr import ArrayExpr, unify_chunks_expr
from dask.array.utils import meta_from_array

from dask_p2p.geometry import Chunks


class LayerExpr(ArrayExpr):  # type: ignore[misc]
    """An array of a `LazyLayer`, which is the first operand; the others are its inputs.

    Tasks are made when Dask requests the graph, since planning may first replace the inputs by
    equal ones with another name.
    """

    _parameters: tuple[str, ...] = ("lazy_layer",)

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

    def _simplify_up(self, parent: Any, dependents: Any) -> Any:
        # Align the chunks of `x.T + y` here. Dask 2026.7.1 does not, because it counts the indices
        # of the axes as operands.
        if not isinstance(parent, Elemwise):
            return None
        _, operands, changed = unify_chunks_expr(*parent.args)
        options = parent.operands[: len(parent._parameters)]
        return Elemwise(*options, *operands) if changed else None

    def _layer(self) -> Mapping[Any, Any]:
        tasks: Mapping[Any, Any] = self.lazy_layer.tasks(self._name, self.dependencies())
        return tasks


def transposed_by(expr: Any) -> tuple[int, ...] | None:
    """Return the order of axes of a transpose of `dask.array`; None for other expressions."""
    return tuple(axis % expr.ndim for axis in expr.axes) if isinstance(expr, Transpose) else None
