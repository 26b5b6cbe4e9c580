"""Layers and redistributions as expressions of array-expr, the query planning of `dask.array`.

Dask decides at the import of `dask.array` whether arrays are expressions. This module uses private
parts of Dask, and is only imported if arrays are expressions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from numbers import Integral
from typing import Any

import numpy as np
from dask.array import reductions
from dask.array._array_expr._blockwise import Blockwise, Elemwise, Transpose
from dask.array._array_expr._collection import blockwise, new_collection
from dask.array._array_expr._expr import ArrayExpr, unify_chunks_expr
from dask.array._array_expr._rechunk import Rechunk, TasksRechunk
from dask.array._array_expr._reductions import PartialReduce, _tree_reduce
from dask.array._array_expr._slicing import SliceSlicesIntegers

from dask_p2p.geometry import Chunks
from dask_p2p.graph.redistribution import (
    Expressions,
    LateExchange,
    LayerArray,
    LazyLayer,
    Planner,
    is_plain,
    with_operands,
)

#: Reductions with the same result for every order of the elements, by functions of blocks.
_OF_ANY_ORDER: dict[Any, str] = {
    np.all: "all",
    np.any: "any",
    np.max: "max",
    np.min: "min",
    reductions.chunk_max: "max",
    reductions.chunk_min: "min",
    reductions._nanmax_skip: "nanmax",  # private, like `_nanmin_skip`
    reductions._nanmin_skip: "nanmin",
}
#: Reductions that have it for integers.
_OF_INTEGERS: dict[Any, str] = {
    np.prod: "prod",
    np.sum: "sum",
    np.nanprod: "prod",  # integers are never NaN
    np.nansum: "sum",
}


class LayerExpr(LayerArray, ArrayExpr):  # type: ignore[misc]
    """An array of a `LazyLayer`."""

    def _simplify_up(self, parent: Any, dependents: Any) -> Any:
        made = SliceableElemwise.of(parent)
        return None if made is None else made._lower()  # with aligned operands, if they are not


def layer_expr(layer: LazyLayer, inputs: Sequence[Any]) -> LayerExpr:
    """Return the expression of a layer."""
    return LayerExpr(layer, *inputs)


def redistribute_expr(
    x: Any, axes: tuple[int, ...], after: Chunks, planner: Planner
) -> ExchangeExpr:
    """Return the expression of an array in other blocks, with permuted axes."""
    return ExchangeExpr(x, axes, after, planner)


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
        if type(parent) is Blockwise:
            return self._reduced(parent, dependents)
        is_elementwise = isinstance(parent, Elemwise)
        result = self.of_smaller(parent) if is_elementwise else self.merged(parent)
        others = {each._name for each in _dependents_of(self, dependents)} - {parent._name}
        if others and self.is_exchanged(result):
            result = None  # this array is made anyway
        return SliceableElemwise.of(parent) if is_elementwise and result is None else result

    def _reduced(self, blocks: Any, dependents: Any) -> Any:
        """Return the exchange of the reduced input, in place of the blocks that Dask reduces.

        Dask combines reduced blocks in later steps, which then find one block along reduced axes.
        None for other functions of blocks, and for reductions whose results may depend on the
        order of the elements.
        """
        steps = _dependents_of(blocks, dependents)
        has_empty = any(0 in sizes for sizes in self.array.chunks)  # without a largest element
        if has_empty or not steps or not all(_is_exact(blocks, step) for step in steps):
            return None
        axes, function, dtype = blocks.kwargs["axis"], blocks.func, blocks.operand("dtype")
        of_input = tuple(sorted(self.axes[axis] for axis in axes))
        every = range(self.ndim)
        first = blockwise(
            *(function, every, self.array, every), axis=of_input, keepdims=True, dtype=dtype
        )
        made = _tree_reduce(first, function, of_input, True, dtype, combine=function).expr
        if len(axes) == self.ndim:  # one element
            return made
        after = ((1,) if axis in axes else sizes for axis, sizes in enumerate(self.chunks))
        return self.replaced(made, self.axes, tuple(after))


def _is_exact(blocks: Any, step: Any) -> bool:
    """Return whether blocks are the first step of a reduction with an exact result.

    `step` is the next one. The functions of both steps are those of Dask, as functions of users may
    take the same keywords.
    """
    if not isinstance(step, PartialReduce) or blocks.kwargs.keys() != {"axis", "keepdims"}:
        return False
    dtypes = (blocks.args[0].dtype, step.dtype)
    if all(dtype.kind in "biu" for dtype in dtypes):
        known = _OF_ANY_ORDER | _OF_INTEGERS
    elif not any(dtype.hasobject for dtype in dtypes):  # objects may be equal and differ
        known = _OF_ANY_ORDER
    else:
        return False
    # The function of the next step first concatenates blocks.
    functions = [blocks.func, *getattr(step.func, "funcs", ())]
    names = [known.get(_without_keywords(each)) for each in functions]
    return len(names) == 2 and names[0] == names[1] is not None


def _without_keywords(function: Any) -> Any:
    """Return the function that partial functions call; None for one that is no key of a dict."""
    while isinstance(function, partial):
        function = function.func
    return function if isinstance(function, Hashable) else None


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
