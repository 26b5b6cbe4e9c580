"""`estimate`: the memory that each worker needs, computed before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import prod
from typing import Any

from dask.utils import key_split

from dask_p2p.backends import backend_for
from dask_p2p.config import checked_options
from dask_p2p.engine.task import FUSABLE, RankTask
from dask_p2p.errors import InputError
from dask_p2p.geometry import Chunks, block_indices, block_shape
from dask_p2p.graph.arrays import is_expression, layer_of
from dask_p2p.graph.libraries import is_dask_array
from dask_p2p.graph.redistribution import plan_redistribution
from dask_p2p.inputs import checked_count
from dask_p2p.ops.rechunk import checked_transpose
from dask_p2p.plugins.registration import cluster_size
from dask_p2p.transports.buffers import idle_bytes, packed_bytes, staging_bytes
from dask_p2p.types import ChunksLike, DaskArray


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Peak memory of one worker, in a transpose or as one rank of `iterate` or `spmd`.

    It is device memory for CuPy blocks and host memory for NumPy blocks. Memory that the Python
    process, CUDA and other tasks use is not included.

    Attributes
    ----------
    workers : int
        Number of workers that the estimate assumes.
    input_bytes, output_bytes : int
        The worker's blocks of the input and of the result, all held at the same time.
    staging_bytes : int
        Regions in transfer to the worker, and the buffers that `ucx` keeps for later regions.
    packed_bytes : int
        Regions that the worker has packed for readers.
    """

    workers: int
    input_bytes: int
    output_bytes: int
    staging_bytes: int
    packed_bytes: int

    @property
    def total_bytes(self) -> int:
        """The peak: the sum of the four sizes."""
        return self.input_bytes + self.output_bytes + self.staging_bytes + self.packed_bytes


@dataclass(frozen=True, slots=True)
class PartsEstimate(MemoryEstimate):
    """Peak GPU memory of one `map_on_gpu` task; a worker runs one task in each thread.

    Temporary memory of the user's function is not included.

    Attributes
    ----------
    workers : int
        Always 1.
    input_bytes, output_bytes : int
        Parts of the inputs and the function's results for them, halo included, in all slots.
    staging_bytes, packed_bytes : int
        Always 0.
    parts : int
        Largest number of parts of a block.
    """

    parts: int


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
    - `map_on_gpu`: a `PartsEstimate`, the GPU memory of one task.

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
        Bytes by purpose, and ``total_bytes``.

    Raises
    ------
    UnsupportedArrayError, AxesError, ChunksError
        The errors of `dask_p2p.transpose`.
    InputError
        If `workers` is not a positive integer, or is given for `iterate` or `spmd`, whose ranks
        are already chosen.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((4000, 1000), chunks=(1000, 1000))
    >>> found = estimate(x, workers=4)
    >>> found.input_bytes, found.output_bytes
    (8000000, 8000000)
    """
    if axes is None and chunks is None and (mapped := _mapped(x)) is not None:
        of_task: MemoryEstimate = mapped.estimate()
        return of_task
    if axes is None and chunks is None and (section := _section(x)) is not None:
        if workers is not None:
            raise InputError(
                f"expected no workers=, since the ranks of this array are already chosen, got "
                f"{workers!r}. Pass ranks= to iterate or spmd."
            )
        found: MemoryEstimate = section.estimate()
        return found
    order, after = checked_transpose(x, axes, chunks)
    options = checked_options()
    cluster = cluster_size() if workers is None else (workers, 1)
    workers, threads = cluster or (max(map(len, x.chunks), default=1), 1)
    workers = checked_count("workers", workers=workers)
    in_all = workers * threads if cluster else None
    plan = plan_redistribution(x.chunks, order, after, options, lambda: in_all)
    kind = backend_for(x._meta).name
    item_bytes = x.dtype.itemsize
    input_bytes, _ = even_share(x.chunks, workers, item_bytes)
    output_bytes, blocks = even_share(plan.chunks, workers, item_bytes)
    staged_bytes = packed = 0
    if workers > 1:
        largest_block, _ = even_share(plan.chunks, sys.maxsize, item_bytes)
        largest_piece = plan.largest_piece * item_bytes
        task_bytes = staging_bytes(options, kind, largest_piece, largest_block, item_bytes)
        staged_bytes = min(threads, blocks) * task_bytes
        packed = packed_bytes(options, kind, (workers - 1) * threads, input_bytes)
        staged_bytes += min(idle_bytes(options, kind), staged_bytes + packed)
    return MemoryEstimate(workers, input_bytes, output_bytes, staged_bytes, packed)


def even_share(chunks: Chunks, workers: int, item_bytes: int) -> tuple[int, int]:
    """Return the bytes and the number of the largest blocks that one worker may get."""
    sizes = [prod(block_shape(chunks, index)) for index in block_indices(chunks)]
    share = -(-len(sizes) // workers)
    return sum(nlargest(share, sizes)) * item_bytes, share


def _section(x: Any) -> Any:
    """Return the section that computes `x`; None if `x` is not a result of a section."""
    if not is_dask_array(x) or key_split(x.name) not in ("p2p-iterate", "p2p-spmd"):
        return None
    if is_expression(x):
        layer = layer_of(x)  # None if x is already computed
        return None if layer is None else layer.work.body
    graph = x.__dask_graph__()
    made = graph[(x.name, *[0] * x.ndim)]
    ranks = (graph[key] for key in getattr(made, "dependencies", ()))  # none of a future
    return next((each.body for each in ranks if isinstance(each, RankTask)), None)


def _mapped(x: Any) -> Any:
    """Return the `GpuMap` of the tasks of `x`; None if `x` is not a result of `map_on_gpu`."""
    if not is_dask_array(x) or key_split(x.name) != FUSABLE:
        return None
    if is_expression(x):  # its task may be one with that of another array
        return next((op.mapped for op in x.expr.operands if hasattr(op, "mapped")), None)
    task = x.__dask_graph__()[(x.name, *[0] * x.ndim)]
    return getattr(getattr(task, "func", None), "mapped", None)  # None if x is already computed
