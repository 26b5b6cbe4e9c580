"""Layers and redistributions as expressions of array-expr, the query planning of `dask.array`.

Dask decides at the import of `dask.array` whether arrays are expressions. This module uses private
parts of Dask, and is only imported if arrays are expressions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from numbers import Integral
from typing import Any

from dask.array._array_expr._blockwise import Elemwise, Transpose
from dask.array._array_expr._collection import new_collection
from dask.array._array_expr._expr import ArrayExpr, unify_chunks_expr
from dask.array._array_expr._rechunk import Rechunk, TasksRechunk
from dask.array._array_expr._slicing import SliceSlicesIntegers
from dask.array.utils import meta_from_array

from dask_p2p.geometry import Chunks
from dask_p2p.graph.layer import LazyLayer
from dask_p2p.graph.redistribution import (
    Expressions,
    LateExchange,
    PassPlanner,
    is_plain,
    with_operands,
)


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
        made = SliceableElemwise.of(parent)
        return None if made is None else made._lower()  # with aligned operands, if they are not

    def _layer(self) -> Mapping[Any, Any]:
        tasks: Mapping[Any, Any] = self.lazy_layer.tasks(self._name, self.dependencies())
        return tasks


def layer_expr(layer: LazyLayer, inputs: Sequence[Any]) -> LayerExpr:
    """Return the expression of a layer."""
    return LayerExpr(layer, *inputs)


def redistribute_expr(
    x: Any, axes: tuple[int, ...], after: Chunks, passes: PassPlanner
) -> ExchangeExpr:
    """Return the expression of an array in other blocks, with permuted axes."""
    return ExchangeExpr(x, axes, after, passes)


class SliceableElemwise(Elemwise):  # type: ignore[misc]
    """An elementwise operation whose slices are taken of its operands."""

    @classmethod
    def of(cls, elementwise: Any) -> Any:
        """Return an elementwise operation of Dask as one of this class; None for others."""
        if type(elementwise) is not Elemwise or not is_plain(elementwise):
            return None
        return cls(*elementwise.operands)

    def __dask_tokenize__(self) -> Any:
        # Dask would take the original for it if both had one token.
        self._determ_token: str
        if not self._determ_token:
            self._determ_token = f"p2p-{super().__dask_tokenize__()}"
        return self._determ_token

    def _simplify_up(self, parent: Any, dependents: Any) -> Any:
        if not self.is_of_exchange:  # it is optimised again
            return None
        if _is_slice(parent) and _are_slices(self, dependents):
            return self._sliced(parent)
        return SliceableElemwise.of(parent)

    @cached_property
    def is_of_exchange(self) -> bool:
        """Return whether operands are redistributions, or such operations of them."""
        return any(
            isinstance(each, ExchangeExpr)
            or (isinstance(each, SliceableElemwise) and each.is_of_exchange)
            for each in self.elemwise_args
        )

    def _lower(self) -> Any:
        # Dask 2026.7.1 does not align `x.T + y`: it counts the indices of axes as operands.
        _, operands, changed = unify_chunks_expr(*self.args)
        return with_operands(self, operands) if changed else None

    def _sliced(self, parent: Any) -> Any:
        made = with_operands(self, [self._part(each, parent.index) for each in self.elemwise_args])
        return made if made.chunks == parent.chunks else None

    def _part(self, operand: Any, index: Sequence[Any]) -> Any:
        """Return the part of an operand that a slice of the result needs."""
        if not isinstance(operand, ArrayExpr) or not operand.ndim:
            return operand
        missing = self.ndim - operand.ndim
        of_operand = tuple(
            _of_one(each) if size == 1 < whole else each
            for each, size, whole in zip(
                index[missing:], operand.shape, self.shape[missing:], strict=True
            )
        )
        return new_collection(operand)[of_operand].expr


class ExchangeExpr(LateExchange, ArrayExpr):  # type: ignore[misc]
    """An array in other blocks, with permuted axes, which is planned last."""

    def _simplify_up(self, parent: Any, dependents: Any) -> Any:
        if _is_slice(parent):
            return self.sliced(parent) if _are_slices(self, dependents) else None
        is_elementwise = isinstance(parent, Elemwise)
        result = self.of_smaller(parent) if is_elementwise else self.merged(parent)
        others = {each._name for each in _dependents_of(self, dependents)} - {parent._name}
        if others and self.is_exchanged(result):
            result = None  # this array is made anyway
        return SliceableElemwise.of(parent) if is_elementwise and result is None else result


def _dependents_of(expr: Any, dependents: Any) -> list[Any]:
    references = dependents.get(expr._name, ())
    return [each for each in (reference() for reference in references) if each is not None]


def _are_slices(expr: Any, dependents: Any) -> bool:
    return all(map(_is_slice, _dependents_of(expr, dependents)))


def _is_slice(expr: Any) -> bool:
    return type(expr) is SliceSlicesIntegers


def _of_one(index: Any) -> Any:
    """Return the index of an axis of one element that is broadcast."""
    return 0 if isinstance(index, Integral) else slice(None)


ExchangeExpr.library = Expressions(
    is_transpose=lambda expr: isinstance(expr, Transpose),
    is_elementwise=lambda expr: isinstance(expr, Elemwise),
    is_rechunk=lambda expr: isinstance(expr, Rechunk) and not isinstance(expr, TasksRechunk),
    collection_of=new_collection,
    with_fixed_chunks=lambda expr: expr,
    of_layer=layer_expr,
)
