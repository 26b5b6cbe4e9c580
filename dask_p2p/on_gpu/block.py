"""One block's work of `map_on_gpu`: calls of the user's function, part by part."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

from dask.utils import funcname

from dask_p2p import tuning
from dask_p2p.backends import (
    SLOTS,
    Queue,
    as_array,
    backend_for,
    backend_named,
    checked_block,
    device_of,
)
from dask_p2p.backends.base import check_plain
from dask_p2p.backends.cupy import CUPY
from dask_p2p.backends.device import device_work, gpu_obstacle, wait_until_written
from dask_p2p.backends.dlpack import LibraryFunction, copy_for_thread, is_block
from dask_p2p.backends.host import HostQueue, register_from_bytes
from dask_p2p.backends.host_memory import warn_once
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.backends.pipelines import GpuTraffic, OnIssued, PartStreams
from dask_p2p.config import Options, options
from dask_p2p.engine.context import (
    MemoryNeed,
    TaskContext,
    is_out_of_memory,
    record_attempt,
    where_is,
)
from dask_p2p.engine.task import (
    FUSABLE,
    current_worker,
    drops_frames,
    is_fusable,
    reschedule_elsewhere,
    run_name,
)
from dask_p2p.errors import BlockMismatchError, ConfigError, DeviceLostError
from dask_p2p.geometry import Chunks, Index, block_shape
from dask_p2p.monitoring.records import TaskRecord
from dask_p2p.plans.base import Input, Part, PartPlan, Range, plan_parts
from dask_p2p.shared import shared
from dask_p2p.types import Array, DType, Key, Kind


@dataclass(frozen=True)
class GpuMapFunction:
    """The function of a task: it calls the user's function on parts and combines the results."""

    mapped: GpuMap  # the user's function, and the properties that all blocks share

    @drops_frames
    def __call__(self, block_id: Index, *blocks: Any, keywords: Mapping[str, Any]) -> Any:
        arrays, kind = self._check_blocks(block_id, blocks)
        if self.mapped.has_block_id:
            keywords = {**keywords, "block_id": block_id}
        worker, context = current_worker()
        block_of = partial(GpuMapBlock, self.mapped, arrays, block_id, keywords)
        if backend_named(kind).on_device:  # no copies to and from the GPU
            block = block_of(kind, sys.maxsize)
            run: Callable[[], Any] = partial(block.run, context)
        elif (obstacle := gpu_obstacle()) is None:
            block = block_of(CUPY.name)
            on_issued = _waiting_context(worker, context, block)
            run = partial(block.run_through_gpu, context, where_is(context), on_issued)
        elif self.mapped.fallback is not None:
            block = block_of(kind)
            run = partial(block.run, context)
        else:
            raise ConfigError(
                f"expected a GPU for map_on_gpu({funcname(self.mapped.function)}, ...), got none: "
                f"on {where_is(context)} {obstacle}. Compute on workers with GPUs, such as those "
                f"of dask_p2p.local_cluster(gpus=True), or give fallback='numpy' to call the "
                f"function on NumPy arrays."
            )
        try:
            with _record_work(worker, context, block), device_work(), device_of(*arrays):
                return run()
        except DeviceLostError as exc:
            reschedule_elsewhere(context, exc)

    def _check_blocks(self, block_id: Index, blocks: Sequence[Any]) -> tuple[list[Array], Kind]:
        arrays = [
            checked_block(as_array(block), x.own_index(block_id), x.shape(block_id), x.dtype)
            for block, x in zip(blocks, self.mapped.arguments, strict=True)
        ]
        kinds = {backend_for(array).name for array in arrays}
        if len(kinds) > 1:
            raise BlockMismatchError(
                f"expected blocks of one array library, got {' and '.join(sorted(kinds))} ones "
                f"for block {block_id}. Convert them where they are made, such as by "
                f"map_blocks(cupy.asarray)."
            )
        return arrays, kinds.pop()


def _waiting_context(worker: Any, context: TaskContext, block: GpuMapBlock) -> OnIssued | None:
    """Return a context for the task's last copies: the worker may start its next task during it.

    Returns None for small blocks, where this costs more than it saves. Returns None also for fused
    tasks, which continue after the call: too many tasks would run concurrently.
    """
    size_bytes = sum(array.nbytes for array in block.arrays)
    if worker is None or size_bytes < tuning.current.task_ahead_bytes:
        return None
    spec = getattr(worker.state.tasks.get(worker.get_current_task()), "run_spec", None)
    return context.only_waiting if isinstance(getattr(spec, "func", None), GpuMapFunction) else None


@contextmanager
def _record_work(worker: Any, context: TaskContext, block: GpuMapBlock) -> Iterator[None]:
    if worker is None:
        yield
        return
    task = worker.get_current_task()
    name = run_name(task)
    if not is_fusable(task):  # fused with a task that reads it
        name = f"{FUSABLE}-{str(name).rpartition('-')[2]}"
    key = (name, *block.index)
    run = getattr(worker.state.tasks.get(task), "run_id", 0)
    record = partial(block.record, key, time.time(), context.address, run=run)
    with record_attempt(context, key, record):
        yield


class GpuMapBlock:
    """One block, whose function is called on copies of its parts."""

    def __init__(
        self,
        gpu_map: GpuMap,
        arrays: Sequence[Array],
        index: Index,
        keywords: Mapping[str, Any],
        kind: Kind,
        part_bytes: int | None = None,
    ) -> None:
        self.gpu_map, self.arrays, self.index, self.keywords = gpu_map, arrays, index, keywords
        self.function = copy_for_thread(gpu_map.function)
        self.reduce = copy_for_thread(gpu_map.reduce)
        self.kind = kind  # kind of the function's arguments and result
        self.is_reduced = gpu_map.reduce is not None
        self.plan = gpu_map.plan(index, part_bytes)
        self.copied = GpuTraffic()

    def run(self, context: TaskContext) -> Any:
        if backend_named(self.kind).on_device:
            wait_until_written(self.arrays, any_stream=self.gpu_map.options.any_producer_stream)
        is_empty = not prod(block_shape(self.gpu_map.chunks, self.index))
        if not self.is_reduced and (is_empty or len(self.plan.parts) > 1):
            out = self._empty_output(context, backend_named(self.kind).queue())
            for part in () if is_empty else self.plan.parts:
                out[self.output_slices(part)] = self._call_on_copies(part)
            return out
        result: Any = None
        for part in self.plan.parts:
            result = self.combine(part, result, self._call_on_copies(part))
        return result

    def _call_on_copies(self, part: Part) -> Any:
        inputs = [view.copy() for view in self.views(part)]
        with self.copied.run:
            return self.call(part, inputs)

    def run_through_gpu(
        self, context: TaskContext, where: str, on_issued: OnIssued | None = None
    ) -> Any:
        """Return the output block, computed on a GPU by `PartStreams` and copied back.

        Raises `MemoryLimitError` if the GPU has too little memory even for the smallest parts.
        """
        out = self._empty_output(context, HostQueue(NUMPY, pinned_output=True))
        if not out.size and not self.is_reduced:
            return out
        warn = partial(warn_once, context.warn, where)
        while True:
            streams = PartStreams(register_from_bytes(), warn, on_issued)
            self.copied = streams.copied
            try:
                streams.run(self, out)
                return out
            except Exception as exc:
                if not is_out_of_memory(exc):
                    raise
                cause = f"{type(exc).__name__}: {exc}"
                traceback.clear_frames(exc.__traceback__)  # drop the function's arrays
                PartStreams.drop_slots()
            self._shrink_parts(cause, where)
            warn("out of memory of its GPU", cause, "Parts are made smaller. Give part_bytes=.")

    def _shrink_parts(self, cause: str, where: str) -> None:
        smaller = self.gpu_map.plan(self.index, self.plan.slot_bytes // 2)
        if len(smaller.parts) == len(self.plan.parts):
            parts_bytes, results_bytes = self.plan.device_bytes(SLOTS)
            slots = {"for parts": parts_bytes, "for their results": results_bytes}
            raise MemoryNeed(slots, kind=self.kind).error(
                cause,
                f"a block in parts of one element along axis {self.gpu_map.axis}",
                where,
                "The function's own memory is not included. Choose another axis=, or use smaller "
                "chunks along the other axes.",
            )
        self.plan = smaller

    def _empty_output(self, context: TaskContext, queue: Queue) -> Any:
        shape = block_shape(self.gpu_map.chunks, self.index)
        return context.empty_output(shape, self.gpu_map.dtype, queue)

    def record(
        self, key: Key, start_s: float, worker: str, is_running: bool = False, **fields: Any
    ) -> TaskRecord:
        """Return a record of the work so far, with these additional fields. Thread-safe."""
        chunks, copied = self.gpu_map.chunks, self.copied
        shape = block_shape(chunks, self.index)
        return TaskRecord(
            key=key,
            start_s=start_s,
            stop_s=time.time(),
            worker=worker,
            shape=shape,
            dtype=str(self.gpu_map.dtype),
            nbytes=prod(shape) * self.gpu_map.dtype.itemsize,
            array_shape=tuple(map(sum, chunks)),
            blocks=tuple(map(len, chunks)),
            wanted_bytes=0 if is_running else None,
            parts=len(self.plan.parts),
            up_bytes=copied.up_bytes,
            down_bytes=copied.down_bytes,
            up_s=copied.up.seconds,
            function_s=copied.run.seconds,
            down_s=copied.down.seconds,
            **fields,
        )

    def views(self, part: Part) -> Iterator[Array]:
        for array, source, read in zip(self.arrays, self.plan.inputs, part.reads, strict=True):
            if read is None or source.axis is None:
                yield array
            else:
                yield array[(slice(None),) * source.axis + (slice(*read),)]

    def output_slices(self, part: Part) -> Any:
        if self.is_reduced:
            return ()
        return (slice(None),) * self.gpu_map.axis + (slice(*part.output_range),)

    def call(self, part: Part, inputs: Sequence[Array]) -> Any:
        """Return the function's result for a part, without its halo.

        Raises `BlockMismatchError` if the result has an unexpected type, shape or dtype.
        """
        with self._note_part(part):
            result = self._copy_foreign(self.function(*inputs, **self.keywords))
            self._check(result, self.gpu_map.result_shape(self.index, part.result_length))
        if self.gpu_map.reduce is not None:
            return result
        halo = [self.gpu_map.halo(axis, self.index) for axis in range(result.ndim)]
        halo[self.gpu_map.axis] = part.result_halo
        sides = zip(halo, result.shape, strict=True)
        return result[tuple(slice(before, n - after) for (before, after), n in sides)]

    def _copy_foreign(self, result: Any) -> Any:
        """Return a result in memory of NumPy or CuPy.

        Another library may reuse the memory of its arrays while other streams still read it.
        """
        array = as_array(result)
        is_other = isinstance(self.function, LibraryFunction) and is_block(array)
        return array.copy() if is_other else array

    def combine(self, part: Part, combined: Array | None, result: Array) -> Any:
        if combined is None or self.reduce is None:
            return result
        with self._note_part(part):
            reduced = self._copy_foreign(self.reduce(combined, result))
            self._check(reduced, self.gpu_map.result_shape(self.index, 0))
        return reduced

    def _check(self, result: Any, shape: tuple[int, ...]) -> None:
        check_plain(f"the result of {funcname(self.gpu_map.function)}", result)
        module = backend_named(self.kind).module
        if (
            isinstance(result, module.ndarray)
            and result.shape == shape
            and result.dtype == self.gpu_map.dtype
        ):
            return
        actual = f"{type(result).__module__}.{type(result).__qualname__}"
        if hasattr(result, "shape") and hasattr(result, "dtype"):
            actual += f" of {result.dtype} {tuple(result.shape)}"
        raise BlockMismatchError(
            f"expected a {module.__name__}.ndarray of {self.gpu_map.dtype} {shape} from "
            f"{funcname(self.gpu_map.function)}{' and reduce' if self.gpu_map.reduce else ''}, "
            f"got {actual}. Give dtype= and chunks= of the result, with the array's number of axes."
        )

    @contextmanager
    def _note_part(self, part: Part) -> Iterator[None]:
        """Return a context that adds the block and the part to errors as a note."""
        try:
            yield
        except Exception as exc:
            number, (start, stop) = self.plan.parts.index(part) + 1, part.output_range
            exc.add_note(
                f"In map_on_gpu({funcname(self.gpu_map.function)}, ...): block {self.index}, part "
                f"{number} of {len(self.plan.parts)}, which is {start} to {stop} of the block "
                f"along axis {self.gpu_map.axis}."
            )
            raise


# More parts overlap copies and function better, as long as a part takes much longer than the
# host needs to issue a step.
_PARTS = 8  # parts of a block, at least
_LEAST_PART_BYTES = 2**24  # copied in 0.33 ms, as long as the host needs for all steps


@dataclass(frozen=True)
class Argument:
    """An input array. Its axes are the last ones of the output."""

    chunks: Chunks  # without halo
    dtype: DType
    depth: tuple[Range, ...]  # by axis: halo widths before and after that the function requests
    halo: tuple[tuple[Range, ...], ...]  # by axis and by block along it: halo widths of the block

    def own_index(self, index: Index) -> Index:
        along = zip(index[len(index) - len(self.chunks) :], self.chunks, strict=True)
        return tuple(i if len(sizes) > 1 else 0 for i, sizes in along)

    def shape(self, index: Index) -> tuple[int, ...]:
        own_index = self.own_index(index)
        sizes = block_shape(self.chunks, own_index)
        halo = (along[i] for along, i in zip(self.halo, own_index, strict=True))
        return tuple(n + before + after for n, (before, after) in zip(sizes, halo, strict=True))

    def own_axis(self, axis: int, sizes: Chunks) -> int | None:
        array_axis = axis - len(sizes) + len(self.chunks)
        is_whole = array_axis < 0 or sum(self.chunks[array_axis]) != sum(sizes[axis])
        return None if is_whole else array_axis


@shared  # one for all tasks of an array
@dataclass(frozen=True)
class GpuMap:
    """A function of parts of blocks, with the properties that all blocks of its output share."""

    function: Callable[..., Any]  # function of a part of each array; may overwrite its arguments
    arguments: tuple[Argument, ...]  # the input arrays
    axis: int  # axis of the output along which blocks are divided into parts

    sizes: Chunks  # common chunks of the broadcast arrays, without halo
    chunks: Chunks  # chunks of the output
    dtype: DType  # dtype of the output
    part_bytes: int  # upper bound of the input bytes of a part
    #: Function of the results of two parts. None: results are concatenated.
    reduce: Callable[[Any, Any], Any] | None = None
    fallback: Kind | None = None  # "numpy": NumPy arrays for the function if there is no GPU
    has_block_id: bool = False  # True if the function has a keyword ``block_id``
    options: Options = field(default_factory=options)

    def halo(self, axis: int, index: Index) -> Range:
        for argument in self.arguments:
            if (array_axis := argument.own_axis(axis, self.sizes)) is not None:
                return argument.halo[array_axis][argument.own_index(index)[array_axis]]
        return 0, 0

    def result_shape(self, index: Index, length: int) -> tuple[int, ...]:
        shape = list(block_shape(self.chunks, index))
        if self.reduce is None:
            shape = [n + sum(self.halo(axis, index)) for axis, n in enumerate(shape)]
            shape[self.axis] = length
        return tuple(shape)

    def plan(self, index: Index, part_bytes: int | None = None) -> PartPlan:
        inputs = []
        for x in self.arguments:
            axis = x.own_axis(self.axis, self.sizes)
            halo = () if axis is None else (x.halo[axis][x.own_index(index)[axis]], x.depth[axis])
            inputs.append(Input(x.shape(index), x.dtype.itemsize, axis, *halo))
        if part_bytes is None:
            block_bytes = sum(prod(block.shape) * block.item_bytes for block in inputs)
            part_bytes = min(self.part_bytes, max(_LEAST_PART_BYTES, block_bytes // _PARTS))
        plan = plan_parts(
            inputs,
            self.sizes[self.axis][index[self.axis]],
            part_bytes,
            prod(self.result_shape(index, 1)) * self.dtype.itemsize,
            is_reduced=self.reduce is not None,
        )
        has_halo = any(map(any, (width for argument in self.arguments for width in argument.depth)))
        return replace(plan, has_halo=has_halo and self.reduce is None)

    def device_bytes(self) -> tuple[int, int]:
        """Return the GPU memory of one task at its peak: of parts of inputs, and of results."""
        return max((plan.device_bytes(SLOTS) for plan in self.largest_plans()), key=sum)

    def largest_plans(self) -> Iterator[PartPlan]:
        """Yield plans whose largest memory bounds that of every block."""
        # As if every block had a halo of full width. The division into parts is the same.
        full_halos = tuple(
            replace(argument, halo=tuple((width,) * len(sizes) for width, sizes in pairs))
            for argument in self.arguments
            for pairs in [zip(argument.depth, argument.chunks, strict=True)]
        )
        along = (
            {sizes: i for i, sizes in enumerate(zip(*pair_of_chunks, strict=True))}.values()
            for pair_of_chunks in zip(self.sizes, self.chunks, strict=True)
        )
        return map(replace(self, arguments=full_halos).plan, product(*along))
