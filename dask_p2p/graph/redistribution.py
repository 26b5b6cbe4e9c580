"""Redistributions as expressions, which optimisers merge with operations around them.

Such an expression is planned last. Before that, slices move to its input, and neighbouring
transposes and rechunks become part of the same exchange.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Integral
from typing import Any, ClassVar, Protocol

import dask.array as da
from dask.array.core import Array as GraphArray
from dask.array.utils import meta_from_array
from dask.tokenize import normalize_token, tokenize

from dask_p2p.backends import backend_for
from dask_p2p.config import Options
from dask_p2p.engine.assembly import OutputSpec
from dask_p2p.engine.task import AssembleTask, Blocks
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.geometry import Chunks, Index, block_bounds, block_indices
from dask_p2p.plans import GridPlan, Plan
from dask_p2p.plugins.registration import on_missing_plugin
from dask_p2p.shared import named_fields
from dask_p2p.types import Array


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


class LazyLayer(Protocol):
    """The tasks of an array, made when the names of its inputs are known.

    An optimiser may replace inputs by equal ones with other names and equal chunks.
    """

    @property
    def chunks(self) -> Chunks:
        """Chunks of the array."""

    @property
    def token(self) -> str:
        """Token that identifies the layer, without its inputs."""

    def meta(self, first: Any) -> Array:
        """Return an empty array like the blocks; `first` is the first input, or None."""

    def name(self, token: str) -> str:
        """Return the name of the array; `token` identifies the layer and its inputs."""

    def tasks(self, name: str, inputs: Sequence[Any]) -> Mapping[Any, Any]:
        """Return the tasks by key; `inputs` are arrays or expressions."""


class LayerArray:
    """An array of a `LazyLayer`, its first operand; a base of the libraries' expressions.

    The other operands are its inputs. Tasks are made when Dask requests the graph, since planning
    may first replace the inputs by equal ones with another name.
    """

    _parameters = ("lazy_layer",)
    # Parameters, and attributes of all expressions.
    lazy_layer: LazyLayer
    deterministic_token: str
    dependencies: Callable[[], list[Any]]

    @cached_property
    def _name(self) -> str:
        return self.lazy_layer.name(self.deterministic_token)

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks of the array."""
        return self.lazy_layer.chunks

    @cached_property
    def _meta(self) -> Any:
        meta = self.lazy_layer.meta(next(iter(self.dependencies()), None))
        return meta_from_array(meta, len(self.chunks), meta.dtype)

    def _layer(self) -> Mapping[Any, Any]:
        return self.lazy_layer.tasks(self._name, self.dependencies())


@dataclass(frozen=True)
class Epilogue:
    """A function that each task applies to its assembled block."""

    function: Callable[[Any, Index], Any]  # function of the assembled block and its index
    chunks: Chunks  # chunks of the function's results
    meta: Array  # empty array of the results' type and dtype

    def __dask_tokenize__(self) -> Any:
        # By default Dask would copy a CuPy array to the host, twice, and pickle the class.
        kind = type(self.meta)
        meta = (kind.__module__, kind.__qualname__, self.meta.shape, self.meta.dtype)
        return normalize_token((named_fields(self.function), self.chunks, meta))


@dataclass(frozen=True)
class PlannedLayer:
    """The tasks that assemble the blocks of a plan."""

    prefix: str  # prefix of the array's name, and so of its tasks
    plan: Plan
    options: Options  # sent with the tasks
    epilogue: Epilogue | None = None

    @cached_property
    def token(self) -> str:
        """Token of the layer; random if the function has no other, so it is computed once."""
        values = map(named_fields, (self.plan, self.options, self.epilogue))
        return str(tokenize(self.prefix, *values))

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.token

    @property
    def chunks(self) -> Chunks:
        """Chunks of the array."""
        return self.plan.chunks if self.epilogue is None else self.epilogue.chunks

    def meta(self, first: Any) -> Array:
        """Return an empty array like the blocks, perhaps of another number of dimensions."""
        return first._meta if self.epilogue is None else self.epilogue.meta

    def name(self, token: str) -> str:
        """Return the name of the array."""
        return f"{self.prefix}-{token}"

    def tasks(self, name: str, inputs: Sequence[Any]) -> dict[Any, AssembleTask]:
        """Return the tasks, by key, that assemble the blocks."""
        (x,) = inputs
        output = output_spec(x, self.options, self.epilogue)
        return assemble_tasks(name, self.plan, output)


def output_spec(x: Any, options: Options, epilogue: Epilogue | None) -> OutputSpec:
    """Return the properties that all output blocks share; `x` is the input, or its expression."""
    after = (None, None) if epilogue is None else (epilogue.function, epilogue.chunks)
    return OutputSpec((x.name,), x.dtype, backend_for(x._meta).name, options, *after)


def assemble_tasks(name: str, plan: Plan, output: OutputSpec) -> dict[Any, AssembleTask]:
    """Return the tasks, by key, that assemble a plan's output blocks. The output has this name."""
    shared: dict[tuple[Index, ...], Blocks] = {}
    tasks = {}
    for index in block_indices(plan.chunks):
        key = (name, *index)
        sources = plan.sources(index)
        blocks = shared.get(sources)
        if blocks is None:
            blocks = shared[sources] = Blocks(*map(output.key, sources))
        tasks[key] = AssembleTask.of(key, plan, index, output, blocks, on_missing=on_missing_plugin)
    return tasks


# The libraries of lazy arrays: `dask.array`, with graphs or expressions, and `dask_array`.
#
# The package `dask_array` replaces `dask.array`; its arrays are expressions. It is never
# imported from here first: an array of it exists only where the user has imported it.

# Bound at import: `install` may replace Dask's functions by this package's.
_transpose, _rechunk = da.transpose, partial(da.rechunk, method="tasks")


def is_dask_array(x: Any) -> bool:
    """Return whether `x` is a lazy array of one of the libraries."""
    return library_of(x) is not None


def library_of(x: Any) -> str | None:
    """Return the name of the library that `x` is a lazy array of; None for other values."""
    if isinstance(x, GraphArray):
        return "dask.array"
    if isinstance(x, da.Array):
        return "dask.array with query planning"
    if is_of_dask_array(x):
        return "dask_array"
    return None


def is_of_dask_array(x: Any) -> bool:
    """Return whether `x` is an array of the package `dask_array`."""
    kind = getattr(sys.modules.get("dask_array"), "Array", None)  # None while it is imported
    return kind is not None and isinstance(x, kind)


def functions_of(x: Any) -> Any:
    """Return the module whose functions make arrays like `x`; `dask.array` for other values."""
    return sys.modules["dask_array"] if is_of_dask_array(x) else da


def check_one_library(arrays: Iterable[Any]) -> None:
    """Raise `UnsupportedArrayError` for lazy arrays of several libraries."""
    found = dict.fromkeys(filter(None, map(library_of, arrays)))
    if len(found) > 1:
        raise UnsupportedArrayError(
            f"expected arrays of one library in a call, got arrays of {' and of '.join(found)}. "
            f"Make all of them with one library."
        )


def with_fixed_blocks(x: Any) -> Any:
    """Return the array, whose optimiser keeps its chunks; `dask_array` may choose others."""
    return x.freeze_chunks() if is_of_dask_array(x) else x


def rechunk_by_tasks(x: Any, chunks: Any, **options: Any) -> Any:
    """Return the array in other blocks, rechunked by tasks of its own library."""
    if is_of_dask_array(x):
        return x.rechunk(chunks, method="tasks", **options)
    return _rechunk(x, chunks, **options)


def transpose_by_tasks(x: Any, axes: tuple[int, ...]) -> Any:
    """Return the array with permuted axes, by one task of its own library for each block."""
    return x.transpose(axes) if is_of_dask_array(x) else _transpose(x, axes)
