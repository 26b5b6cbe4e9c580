"""Estimates, computed before anything runs: the memory of a worker, and the bytes that move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from math import prod
from typing import Any

from dask.utils import format_bytes, key_split

from dask_p2p.backends import backend_for
from dask_p2p.config import checked_options
from dask_p2p.engine.assembly import OutputSpec
from dask_p2p.engine.task import FUSABLE, AssembleTask, RankTask
from dask_p2p.errors import InputError
from dask_p2p.geometry import Chunks, block_indices, block_shape
from dask_p2p.graph import is_dask_array, is_expression, plan_redistribution
from dask_p2p.inputs import checked_count, pluralize
from dask_p2p.ops.arguments import check_array
from dask_p2p.ops.rechunk import checked_transpose
from dask_p2p.plans import Plan
from dask_p2p.plugins.registration import cluster_size
from dask_p2p.transports.buffers import idle_bytes, packed_bytes
from dask_p2p.types import ChunksLike, DaskArray


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Peak memory of one worker in an operation, and the bytes that its exchanges move; also text.

    It is device memory for CuPy blocks and host memory for NumPy blocks. Memory that the Python
    process, CUDA and other tasks use is not included, nor are the work areas of FFT libraries. For
    `map_on_gpu` it is the GPU memory of one task, without the temporary memory of the function; a
    worker runs one task in each thread.

    Attributes
    ----------
    workers : int
        Number of workers that the estimate assumes; 1 for `map_on_gpu`.
    input_bytes, output_bytes : int
        The worker's blocks of the input and of the result, all held at the same time. For
        `map_on_gpu` the parts of the inputs and their results, halo included, that are on the GPU
        at a time.
    staging_bytes : int
        Temporary memory of the worker's concurrent tasks: regions in transfer to it, or the memory
        for the transform of a block. Also the buffers that `ucx` keeps for later regions.
    packed_bytes : int
        Regions that the worker has packed for readers.
    exchanges : int
        Number of exchanges between the workers. The memory is that of the largest one.
    moved_bytes : int
        Bytes that all exchanges move between workers, if blocks are spread evenly.

    See Also
    --------
    estimate : Make one.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((4000, 1000), chunks=(1000, 1000))
    >>> estimate(x, workers=4).moved_bytes / x.nbytes
    0.75
    """

    workers: int
    input_bytes: int
    output_bytes: int
    staging_bytes: int = 0
    packed_bytes: int = 0
    exchanges: int = 0
    moved_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.input_bytes + self.output_bytes + self.staging_bytes + self.packed_bytes

    def __str__(self) -> str:
        return (
            f"{pluralize(self.exchanges, 'exchange')} between "
            f"{pluralize(self.workers, 'worker')}: {format_bytes(self.moved_bytes)} move; a worker "
            f"holds at most {format_bytes(self.total_bytes)} ({format_bytes(self.input_bytes)} "
            f"input blocks, {format_bytes(self.output_bytes)} output blocks, "
            f"{format_bytes(self.staging_bytes)} temporary memory, "
            f"{format_bytes(self.packed_bytes)} packed regions)"
        )


def estimate(
    x: DaskArray,
    axes: Sequence[int] | None = None,
    *,
    chunks: ChunksLike = None,
    workers: int | None = None,
) -> MemoryEstimate:
    """Estimate the peak memory of a transpose, `iterate`, `spmd` or `map_on_gpu`.

    Computes nothing. The estimate is that of a transpose of `x`, except for two kinds of results,
    given without `axes` and `chunks`:

    - `iterate` or `spmd`: a `SectionEstimate` for one rank, including the bytes that ranks send in
      a step and for a checkpoint.
    - `map_on_gpu`: the GPU memory of one task.

    The estimate follows from chunks and options. It assumes that every worker holds the same number
    of blocks, and that the input is kept until the last task ends.

    Parameters
    ----------
    x, axes, chunks
        The arguments of `dask_p2p.transpose`; or only `x`, a result of `dask_p2p.iterate`,
        `dask_p2p.spmd` or `dask_p2p.map_on_gpu`.
    workers : int, optional
        Number of workers, each with one thread. Default: the workers and threads of the current
        synchronous client, each thread with one block. Without a client: the largest number of
        blocks of `x` along an axis.

    Returns
    -------
    MemoryEstimate
        Bytes by purpose, ``total_bytes``, and the bytes that move between workers.

    Raises
    ------
    UnsupportedArrayError, InputError
        The errors of `dask_p2p.transpose`.
    InputError
        If `workers` is not a positive integer, or is given for `iterate` or `spmd`, whose ranks
        are already chosen.

    See Also
    --------
    dask_p2p.fft.estimate : The exchanges of a transform.
    last_runs : The bytes that have moved.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((4000, 1000), chunks=(1000, 1000))
    >>> need = estimate(x, workers=4)
    >>> need.input_bytes, need.output_bytes
    (8000000, 8000000)
    """
    if axes is None and chunks is None and (mapped := _find_gpu_map(x)) is not None:
        input_bytes, output_bytes = mapped.device_bytes()
        return MemoryEstimate(1, input_bytes, output_bytes)
    if axes is None and chunks is None and (section := _find_section(x)) is not None:
        if workers is not None:
            raise InputError(
                f"expected no workers=, since the ranks of this array are already chosen, got "
                f"{workers!r}. Pass ranks= to iterate or spmd."
            )
        of_rank: MemoryEstimate = section.estimate()
        return of_rank
    order, after = checked_transpose(x, axes, chunks)
    options = checked_options()
    cluster = cluster_size() if workers is None else (workers, 1)
    n_workers, threads = cluster or (max(map(len, x.chunks), default=1), 1)
    checked_count("workers", workers=n_workers)
    all_threads = n_workers * threads if cluster else None
    plan = plan_redistribution(x.chunks, order, after, options, lambda: all_threads)
    output = OutputSpec((x.name,), x.dtype, backend_for(x._meta).name, options)
    return _exchange_need(plan, output, n_workers, threads)


def estimate_exchanges(y: DaskArray, workers: int | None) -> MemoryEstimate:
    """Return the estimate of all exchanges of a lazy array; see `dask_p2p.fft.estimate`."""
    check_array(y)
    tasks: dict[str, AssembleTask] = {}  # one of each exchange
    for key, task in dict(y.__dask_graph__()).items():
        if isinstance(task, AssembleTask):
            tasks.setdefault(key[0], task)
    cluster = cluster_size() if workers is None else (workers, 1)
    blocks = (prod(map(len, task.plan.src_chunks)) for task in tasks.values())
    n_workers, threads = cluster or (max(blocks, default=1), 1)
    checked_count("workers", workers=n_workers)
    estimates = [_exchange_need(t.plan, t.output, n_workers, threads) for t in tasks.values()]
    largest = max(
        estimates, key=lambda of_one: of_one.total_bytes, default=MemoryEstimate(n_workers, 0, 0)
    )
    moved_bytes = sum(of_one.moved_bytes for of_one in estimates)
    return replace(largest, exchanges=len(estimates), moved_bytes=moved_bytes)


def _exchange_need(plan: Plan, output: OutputSpec, workers: int, threads: int) -> MemoryEstimate:
    before, options, kind = plan.src_chunks, output.options, output.kind
    item_bytes = output.dtype.itemsize
    input_bytes, _ = even_share(before, workers, item_bytes)
    output_bytes, blocks = even_share(plan.chunks, workers, item_bytes)
    shape = max((block_shape(plan.chunks, i) for i in block_indices(plan.chunks)), key=prod)
    block_bytes = prod(shape) * item_bytes
    read_bytes = (plan.largest_piece * item_bytes, block_bytes) if workers > 1 else (0, 0)
    task_bytes = output.need(kind, shape, *read_bytes).peak_bytes - block_bytes
    staged_bytes, packed = min(threads, blocks) * task_bytes, 0
    if workers > 1:
        packed = packed_bytes(options, kind, (workers - 1) * threads, input_bytes)
        staged_bytes += min(idle_bytes(options, kind), staged_bytes + packed)
    moved_bytes = _count_moved_elements(plan, before, workers) * item_bytes
    return MemoryEstimate(workers, input_bytes, output_bytes, staged_bytes, packed, 1, moved_bytes)


def _count_moved_elements(plan: Plan, before: Chunks, workers: int) -> int:
    """Return the number of elements that tasks read from other workers.

    Workers hold equal numbers of neighbouring blocks. Each task is assumed to run on the worker
    that holds most elements of its block.
    """
    blocks = prod(map(len, before))
    holders = {index: n * workers // blocks for n, index in enumerate(block_indices(before))}
    moved = 0
    for index in block_indices(plan.chunks):
        elements_by_holder = Counter[int]()
        for source, n in zip(plan.sources(index), plan.source_elements(index), strict=True):
            elements_by_holder[holders[source]] += n
        moved += elements_by_holder.total() - max(elements_by_holder.values(), default=0)
    return moved


def even_share(chunks: Chunks, workers: int, item_bytes: int) -> tuple[int, int]:
    """Return the bytes and the number of the largest blocks that one worker may get."""
    sizes = [prod(block_shape(chunks, index)) for index in block_indices(chunks)]
    share = -(-len(sizes) // workers)
    return sum(nlargest(share, sizes)) * item_bytes, share


def _find_section(x: Any) -> Any:
    if not is_dask_array(x) or key_split(x.name) not in ("p2p-iterate", "p2p-spmd"):
        return None
    if is_expression(x):
        layer = getattr(x.expr, "lazy_layer", None)  # None if x is already computed
        return None if layer is None else layer.work.body
    graph = x.__dask_graph__()
    output = graph[(x.name, *[0] * x.ndim)]
    ranks = (graph[key] for key in getattr(output, "dependencies", ()))  # none of a future
    return next((task.body for task in ranks if isinstance(task, RankTask)), None)


def _find_gpu_map(x: Any) -> Any:
    if not is_dask_array(x) or key_split(x.name) != FUSABLE:
        return None
    if is_expression(x):  # its task may be one with that of another array
        return next((op.mapped for op in x.expr.operands if hasattr(op, "mapped")), None)
    task = x.__dask_graph__()[(x.name, *[0] * x.ndim)]
    return getattr(getattr(task, "func", None), "mapped", None)  # None if x is already computed
