"""Transforms of one block along axes that are whole, run by the tasks of `dask_p2p.fft`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dask_p2p.backends import backend_for, memory_order
from dask_p2p.backends.cufft import is_quick_along_first
from dask_p2p.backends.host import competing_bytes
from dask_p2p.config import checked_options
from dask_p2p.engine.context import SMALLER_CHUNKS, MemoryNeed, in_memory_bytes, where_is
from dask_p2p.engine.task import AssembleTask, current_worker
from dask_p2p.geometry import Chunks, Index
from dask_p2p.graph import (
    Epilogue,
    PlannedLayer,
    array_of_plan,
    is_expression,
    plan_redistribution,
    rechunk_by_tasks,
)
from dask_p2p.plans.fft import ReorderedPlan
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.types import Array, DaskArray, DType

PREFIX = "p2p-fft"


def run_stage(x: DaskArray, grid: Chunks, order: tuple[int, ...], epilogue: Epilogue) -> DaskArray:
    """Return the array of transformed blocks; `order` is the order of a block's axes in memory."""
    register_if_possible()
    options = checked_options()
    in_memory = tuple(grid[axis] for axis in order)
    plan = plan_redistribution(x.chunks, order, in_memory, options)
    reordered = ReorderedPlan(plan, order)
    together = tuple(
        sizes if larger == before else larger
        for sizes, larger, before in zip(epilogue.chunks, reordered.chunks, grid, strict=True)
    )
    x = array_of_plan(
        PREFIX, x, reordered, options, Epilogue(epilogue.function, together, epilogue.meta)
    )
    return rechunk_by_tasks(x, epilogue.chunks)  # views, where the plan made larger blocks


def find_input_chunks(x: DaskArray) -> Chunks | None:
    """Return the chunks of the array whose transform `x` was computed from; None if not found.

    The search goes up the graph through the tasks that changed the spectrum.
    """
    has_layers = not is_expression(x)
    waiting: deque[Any] = deque([x.name if has_layers else x.expr])  # names of layers, or parts
    visited = set[str]()
    while waiting:
        part, input_chunks = waiting.popleft(), None
        while (stage := _find_stage(x, part)) is not None:
            plan, part = stage
            input_chunks = plan.src_chunks
        if input_chunks is not None:
            return input_chunks
        before = sorted(x.dask.dependencies.get(part, ())) if has_layers else part.dependencies()
        for source in before:
            name = source if has_layers else source._name
            if name not in visited:
                visited.add(name)
                waiting.append(source)
    return None


def _find_stage(x: Any, part: Any) -> tuple[ReorderedPlan, Any] | None:
    """Return the plan and the input of a layer, or expression, if it is a stage of a transform."""
    plan, source = None, None
    if not isinstance(part, str):
        layer = getattr(part, "lazy_layer", None)
        if isinstance(layer, PlannedLayer) and layer.prefix == PREFIX:
            plan, (source,) = layer.plan, part.dependencies()
            while type(source).__name__ == "ChunksFreeze":
                (source,) = source.dependencies()
    elif part.startswith(PREFIX) and part in x.dask.layers:
        task = next(iter(x.dask.layers[part].values()))
        if isinstance(task, AssembleTask):
            plan, (source,) = task.plan, task.output.array
    return (plan, source) if isinstance(plan, ReorderedPlan) else None


TO_COMPLEX = ("rfft", "ihfft")  # from real numbers, along the first transformed axis
TO_REAL = ("irfft", "hfft")  # from complex numbers, along the last transformed axis
INVERSE = ("ifft", "irfft", "ihfft")

_AS_ONE: dict[tuple[str, ...], str] = {("rfft", "fftn"): "rfftn", ("ifftn", "irfft"): "irfftn"}

#: Name of a function, axes, and the transform's length along each axis.
Step: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class LocalTransform:
    """A transform of one block, in one or more steps."""

    steps: tuple[Step, ...]  # steps in their order, with axes of the result
    norm: str  # NumPy's `norm`

    #: Axis order of an assembled block, which the transform may overwrite: axis ``i`` of the block
    #: is axis ``order[i]`` of the result. None: a block of another task, in the result's order.
    order: tuple[int, ...] | None = None

    #: Factor for the result of all steps, in place of each step's scaling by `norm`. Used on GPUs,
    #: where CuPy scales after each step, which takes as long as copying the block.
    scale: float | None = None

    @property
    def __name__(self) -> str:
        return "fft"

    def extra_bytes(self, shape: tuple[int, ...], dtype: DType) -> int:
        """Return the peak memory in bytes, in addition to a block that may be overwritten.

        Work areas that FFT libraries allocate and free are not included.
        """
        peak = current = 0
        for name, axes, lengths in self.steps:
            before, shape = shape, self._shape(shape, name, axes, lengths)
            is_complex = dtype.kind == "c"
            dtype = complex_dtype(dtype)
            if name in TO_REAL:
                dtype = np.empty(0, dtype).real.dtype
            elif is_complex and shape == before:
                continue  # done in place
            new = prod(shape) * dtype.itemsize
            peak, current = max(peak, current + new), new
        return peak

    def _shape(
        self, shape: tuple[int, ...], name: str, axes: tuple[int, ...], lengths: tuple[int, ...]
    ) -> tuple[int, ...]:
        positions = self._positions(axes, len(shape))
        result_shape = list(shape)
        for position, length in zip(positions, lengths, strict=True):
            result_shape[position] = length // 2 + 1 if name in TO_COMPLEX else length
        return tuple(result_shape)

    def _positions(self, axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
        return tuple((self.order or range(ndim)).index(axis) for axis in axes)

    def __call__(self, block: Array, index: Index = ()) -> Any:
        backend = backend_for(block)
        if not block.size:  # cuFFT rejects empty arrays
            return backend.module.asarray(self.transform(np.zeros(block.shape, block.dtype)))
        if self.order is not None:
            return self.transform(block, is_own=True)
        copy = self._copy_block(block)
        return self.transform(block if copy is None else copy, is_own=copy is not None)

    def _copy_block(self, block: Any) -> Any:
        """Return a copy of another task's block for an in-place transform; None if useless.

        The copy reuses memory of released outputs, so the system need not provide new pages.

        Raises `MemoryLimitError` if the transform can never fit into the worker's memory.
        """
        backend, (worker, context) = backend_for(block), current_worker()
        if worker is None:  # no memory of released outputs
            return None
        is_copied = (
            block.dtype.kind == "c" and self._shape(block.shape, *self.steps[0]) == block.shape
        )
        if backend.on_device:
            order = self.best_order(memory_order(block.strides))
            is_copied |= not block.transpose(order).flags.c_contiguous
        extra_bytes = self.extra_bytes(block.shape, block.dtype) + is_copied * block.nbytes
        purposes = {"for its transform": extra_bytes, "for itself": in_memory_bytes(block)}
        need = MemoryNeed(purposes, kind=backend.name)
        limit_bytes = context.memory_below(need.peak_bytes, need.kind)
        need.check(limit_bytes, "a block", where_is(context), SMALLER_CHUNKS)
        if not is_copied or backend.on_device:
            return None
        queue = backend.queue()
        block_copy = context.empty_output(block.shape, block.dtype, queue)
        queue.permute(block_copy, block, range(block.ndim))
        return block_copy

    def transform(self, block: Any, is_own: bool = False) -> Any:
        """Return the transform of a non-empty block; with `is_own` it may overwrite the block."""
        backend = backend_for(block)
        library = _import_fft_module(backend.fft_modules)
        if block.dtype == np.float16:  # libraries differ in the result's dtype
            block, is_own = block.astype(np.float32), True
        path = _plan_calls(
            self, memory_order(block.strides) if self.order is None else None, backend.on_device
        )
        block = block.transpose(path.before)
        if backend.on_device:
            if path.along_first and block.dtype.kind != "c":
                block, is_own = block.astype(complex_dtype(block.dtype)), True
            if not (path.along_first and is_own and block[0].flags.c_contiguous):
                is_own = is_own or not block.flags.c_contiguous
                block = _make_contiguous(block)
        for name, arguments, norm in path.calls:
            function = getattr(library, name)
            options: dict[str, Any] = {"norm": norm}
            if is_own and library.__name__ != "numpy.fft":
                options["overwrite_x"] = True
                if not backend.on_device and name.endswith("n"):
                    lengths, axes = arguments
                    is_whole = lengths == tuple(block.shape[axis] for axis in axes)
                    if is_whole and (columns := columns_of(block, axes)):
                        transform_columns(function, block, axes[0], columns, norm)
                        continue
            block = function(block, *arguments, **options)
            is_own = True
        if self.scale not in (None, 1.0):
            block *= self.scale
        return block.transpose(path.after)

    def best_order(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """Return the best order of axes in memory for a GPU; a block has the given order."""
        (name, axes, lengths), *later_steps = self.steps
        is_one_complex = not later_steps and name in ("fftn", "ifftn") and len(axes) == 1
        if is_one_complex and axes[0] != order[-1] and is_quick_along_first(*lengths):
            return (*axes, *(axis for axis in order if axis not in axes))
        transformed_axes = {axis for _, axes, _ in self.steps for axis in axes}
        halved = {axes[-1] for name, axes, _ in self.steps if name in (*TO_COMPLEX, *TO_REAL)}
        return tuple(sorted(order, key=lambda axis: (axis in transformed_axes, axis in halved)))


def complex_dtype(dtype: DType) -> DType:
    """Return the dtype of the complex transform of numbers of `dtype`."""
    return np.result_type(np.float64 if dtype.kind in "biu" else dtype, np.complex64)


class _CallPath(NamedTuple):
    before: tuple[int, ...]  # permutation of the block's axes before the calls
    calls: tuple[tuple[str, tuple[Any, ...], str], ...]  # function, lengths and axes, norm
    after: tuple[int, ...]  # permutation of the axes after the calls, to the result's order
    along_first: bool  # whether the only call transforms along the first axis


@lru_cache(maxsize=1024)  # a call takes as long as cuFFT, and most blocks are alike
def _plan_calls(
    transform: LocalTransform, lies: tuple[int, ...] | None, on_device: bool
) -> _CallPath:
    """Return the calls that transform a block, whose axes have the order `lies` in memory."""
    order = transform.order if lies is None else lies
    assert order is not None
    best = transform.best_order(order) if on_device else order
    axes = range(len(order)) if lies is None else order  # axes of the block, in memory order
    steps = transform.steps
    one = _AS_ONE.get(tuple(name for name, _, _ in steps)) if on_device else None
    if one is not None:  # cuFFT has a multi-axis plan for real numbers
        complex_step, special = sorted(steps, key=lambda step: not step[0].endswith("n"))
        steps = ((one, complex_step[1] + special[1], complex_step[2] + special[2]),)
    calls = []
    for name, along, lengths in steps:
        positions = tuple(map(best.index, along))
        arguments = (lengths, positions) if name.endswith("n") else (*lengths, *positions)
        norm = transform.norm
        if transform.scale is not None:  # the call does not scale
            norm = "forward" if name.removesuffix("n") in INVERSE else "backward"
        calls.append((name, arguments, norm))
    before = tuple(axes[order.index(axis)] for axis in best)
    after, first_axes = tuple(map(best.index, range(len(best)))), calls[0][1][1]
    return _CallPath(before, tuple(calls), after, len(best) > 1 and first_axes == (0,))


def _make_contiguous(array: Any) -> Any:
    """Return a GPU array in C order that is not a view, since CuPy copies views; copy if needed.

    On an H200, cuFFT takes 2.1 ms for 4 GiB along the last axis and 16.2 ms along the first; the
    permute kernel takes 2.2 ms. CuPy's copy is slower.
    """
    backend, source = backend_for(array), array
    if not array.flags.c_contiguous:
        array = backend.empty(source.shape, source.dtype)
        backend.permute_into(array, source, range(source.ndim))
    return backend.module.ndarray(array.shape, array.dtype, array.data)


@cache
def _import_fft_module(names: tuple[str, ...]) -> Any:
    *preferred, last = names
    for name in preferred:
        try:
            return import_module(name)
        except ImportError:
            continue
    return import_module(last)


# Transforms in place along an axis whose elements compete for lines of the CPU's caches.
#
# Elements at a distance of a power of two, as in most grids, lie in few sets of a cache. So a
# transform along such an axis fetches each line several times. Here some columns at a time are
# copied to memory with another distance, transformed there and copied back. All results have the
# same bits.

#: Least length times the square of its elements' distance in a way of a cache, by item size. On an
#: EPYC core the transform along 2,048 rows of 64 complex numbers took 5.4 ns an element, and 4.1
#: in columns; along 512 rows of 512 it took 7.3 and 4.1.
_LEAST = {8: 2**33, 16: 2**30}
_MOST_COLUMNS, _LEAST_COLUMNS = 64, 16  # at a time: multiples of the vectors of all CPUs
_MOST_BYTES = 2**22  # of these columns
_GAP_BYTES = 64  # a cache line


def columns_of(block: Array, axes: Sequence[int]) -> int:
    """Return the number of columns to transform at a time; 0: all of them take no longer."""
    least = _LEAST.get(block.itemsize) if block.dtype.kind == "c" else None
    if least is None or len(axes) != 1 or not block.flags.c_contiguous:
        return 0
    (axis,), shape = axes, block.shape
    distance_bytes = competing_bytes(prod(shape[axis + 1 :]) * block.itemsize)
    if axis == block.ndim - 1 or shape[axis] * distance_bytes**2 < least:
        return 0
    columns: int = min(_MOST_COLUMNS, _MOST_BYTES // (shape[axis] * block.itemsize))
    return columns // _LEAST_COLUMNS * _LEAST_COLUMNS


def transform_columns(function: Any, block: Array, axis: int, columns: int, norm: str) -> None:
    """Transform a C-contiguous block in place by SciPy, so many columns at a time."""
    n, gap = block.shape[axis], _GAP_BYTES // block.itemsize
    memory = np.empty((n, columns + gap), block.dtype)
    for matrix in block.reshape(-1, n, prod(block.shape[axis + 1 :])):
        for start in range(0, matrix.shape[1], columns):
            part = matrix[:, start : start + columns]
            copy = memory[:, : part.shape[1]]
            copy[...] = part
            part[...] = function(copy, (n,), (0,), norm=norm, overwrite_x=True)
