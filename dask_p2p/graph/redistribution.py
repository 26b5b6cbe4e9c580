"""Redistributions as expressions, which optimisers merge with operations around them.

Such an expression is planned last. Before that, slices move to its input, and neighbouring
transposes and rechunks become part of the same exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar, Protocol

from dask.array.utils import meta_from_array

from dask_p2p.config import Options
from dask_p2p.geometry import Chunks, block_bounds
from dask_p2p.graph.layer import LazyLayer, PlannedLayer
from dask_p2p.plans import GridPlan


class Planner(Protocol):
    """The planner of a redistribution."""

    @property
    def options(self) -> Options:
        """Options that are sent with the tasks."""

    def __call__(self, before: Chunks, axes: tuple[int, ...], after: Chunks) -> GridPlan:
        """Return the plan, whose blocks may be larger than the chunks `after`."""


@dataclass(frozen=True)
class Expressions:
    """The classes of a library's expressions, and functions that make them."""

    is_transpose: Callable[[Any], bool]
    is_elementwise: Callable[[Any], bool]
    is_rechunk: Callable[[Any], bool]  # whether the optimiser may still change the chunks
    collection_of: Callable[[Any], Any]
    with_fixed_chunks: Callable[[Any], Any]
    of_layer: Callable[[LazyLayer, Sequence[Any]], Any]


class LateExchange:
    """An array in other blocks, with permuted axes; a base of the libraries' expressions."""

    _parameters = ("array", "axes", "chunks", "planner")
    library: ClassVar[Expressions]
    # Parameters, and attributes of all expressions.
    array: Any
    axes: tuple[int, ...]
    chunks: Chunks
    planner: Planner
    ndim: int
    deterministic_token: str

    @cached_property
    def _name(self) -> str:
        return f"{_prefix(self.axes)}-{self.deterministic_token}"

    @cached_property
    def _meta(self) -> Any:
        meta = self.array._meta
        return meta_from_array(meta, len(self.axes), meta.dtype)

    def replaced(self, array: Any, axes: Sequence[int], chunks: Any) -> Any:
        """Return another redistribution by the same planner, or the array if nothing changes."""
        after = integers(chunks)
        if is_identity(axes) and array.chunks == after:
            return array
        return type(self)(array, tuple(axes), after, self.planner)  # type: ignore[call-arg]

    def merged(self, parent: Any) -> Any:
        """Return this redistribution and its neighbour `parent` as one; None for other parents."""
        if isinstance(parent, LateExchange) or self.library.is_transpose(parent):
            order = [self.axes[axis] for axis in parent.axes]
        elif self.library.is_rechunk(parent) and _moves(parent, self.chunks):
            order = [*self.axes]
        else:
            return None
        return self.replaced(self.array, order, parent.chunks)

    def of_smaller(self, elementwise: Any) -> Any:
        """Return the exchange of the result of an operation, if the result has fewer bytes."""
        operands = elementwise.elemwise_args
        if not is_plain(elementwise) or elementwise.dtype.itemsize >= self._meta.dtype.itemsize:
            return None
        if any(_has_axes(each) and getattr(each, "_name", None) != self._name for each in operands):
            return None
        given = [self.array if _has_axes(each) else each for each in operands]
        return self.replaced(with_operands(elementwise, given), self.axes, self.chunks)

    def is_exchanged(self, result: Any) -> bool:
        """Return whether a result of this class needs an exchange of the whole input."""
        if not isinstance(result, LateExchange):
            return False
        return self.library.is_elementwise(result.array) or result.array._name == self.array._name

    def sliced(self, parent: Any) -> Any:
        """Return the redistribution of the part of the input that a slice needs."""
        index = (*parent.index, *[slice(None)] * (self.ndim - len(parent.index)))
        if any(not isinstance(each, (slice, Integral)) for each in index):
            return None
        by_input = dict(zip(self.axes, index, strict=True))
        of_input = tuple(by_input[axis] for axis in range(self.ndim))
        given = self.library.collection_of(self.array)[of_input].expr
        # An integer drops its axis.
        kept = [axis for axis in range(self.ndim) if isinstance(by_input[axis], slice)]
        order = [kept.index(axis) for axis in self.axes if axis in kept]
        return self.replaced(given, order, parent.chunks)

    def _simplify_down(self) -> Any:
        if is_identity(self.axes) and self.array.chunks == self.chunks:
            return self.array
        if self.library.is_elementwise(self.array) and self._is_after_others():
            return self._before_elementwise()
        return None

    def _is_after_others(self) -> bool:
        """Return whether all operands of the elementwise input come from redistributions."""
        left, seen = [self.array], set[str]()
        while left:
            each = left.pop()
            if isinstance(each, LateExchange):
                continue
            if not self.library.is_elementwise(each) or not is_plain(each):
                return False
            if each._name not in seen:
                seen.add(each._name)
                arrays = [array for array in each.elemwise_args if _has_axes(array)]
                if not arrays or any(array.shape != each.shape for array in arrays):
                    return False
                left += arrays
        return True

    def _before_elementwise(self) -> Any:
        """Return the elementwise operation of redistributed operands: one exchange fewer."""
        operands = [
            self.replaced(each, self.axes, self.chunks) if _has_axes(each) else each
            for each in self.array.elemwise_args
        ]
        return with_operands(self.array, operands)

    def _lower(self) -> Any:
        library, x, axes = self.library, self.array, self.axes
        while True:
            if library.is_transpose(x):
                x, axes = x.array, tuple(x.axes[axis] for axis in axes)
            elif library.is_rechunk(x) and x.method != "tasks" and _is_known(x.array.chunks):
                x = x.array
            else:
                break
        x = library.with_fixed_chunks(x)
        if is_identity(axes) and x.chunks == self.chunks:
            return x
        plan = self.planner(integers(x.chunks), axes, self.chunks)
        x = library.of_layer(PlannedLayer(_prefix(axes), plan, self.planner.options), [x])
        if plan.chunks != self.chunks:
            x = x.rechunk(self.chunks, method="tasks")  # views, on the same worker
        return x


def is_plain(elementwise: Any) -> bool:
    """Return whether an elementwise operation has no arguments besides its operands."""
    if elementwise.where is not True or elementwise.operand("name") is not None:
        return False
    is_filled = getattr(elementwise, "out", None) is not None
    return not is_filled and not getattr(elementwise, "user_kwargs", None)


def with_operands(elementwise: Any, operands: Sequence[Any]) -> Any:
    """Return the same elementwise operation of other operands."""
    options = elementwise.operands[: len(elementwise._parameters)]
    return type(elementwise)(*options, *operands)


def is_identity(axes: Sequence[int]) -> bool:
    """Return whether a permutation keeps the order of axes."""
    return tuple(axes) == tuple(range(len(axes)))


def integers(chunks: Any) -> Chunks:
    """Return known chunks as integers of Python."""
    return tuple(tuple(map(int, sizes)) for sizes in chunks)


def _prefix(axes: Sequence[int]) -> str:
    return "p2p-rechunk" if is_identity(axes) else "p2p-transpose"


def _has_axes(operand: Any) -> bool:
    return bool(getattr(operand, "ndim", 0))


def _is_known(chunks: Any) -> bool:
    return all(size == size for sizes in chunks for size in sizes)


def _moves(rechunk: Any, before: Chunks) -> bool:
    """Return whether a rechunk of the library does more than split blocks, which are views."""
    if rechunk.method == "tasks" or not _is_known(rechunk.chunks):
        return False
    return any(
        not {*block_bounds(old)} <= {*block_bounds(new)}
        for old, new in zip(before, rechunk.chunks, strict=True)
    )
