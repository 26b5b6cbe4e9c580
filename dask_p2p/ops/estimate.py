"""`estimate`: what each worker's memory has to hold, said before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import prod
from typing import Any

from dask.utils import key_split

from dask_p2p.backends import SLOTS, backend_for
from dask_p2p.config import checked_options
from dask_p2p.engine.parts import OPERATION, Mapped
from dask_p2p.engine.task import MemberTask
from dask_p2p.errors import InputError
from dask_p2p.geometry import Chunks, block_indices, block_shape
from dask_p2p.inputs import checked_count
from dask_p2p.ops.arguments import is_dask_array
from dask_p2p.ops.rechunk import planned
from dask_p2p.ops.transpose import transposed
from dask_p2p.plugins.registration import cluster_size
from dask_p2p.transports.footprint import idle_bytes, packed_bytes, staging_bytes
from dask_p2p.types import ChunksLike, DaskArray


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What one worker holds at most: during a transpose, or as a member of `iterate` or `spmd`.

    Device memory for CuPy blocks, host memory for NumPy blocks; what its Python process, CUDA and
    whatever else it does take comes to that.

    Attributes
    ----------
    workers : int
        Number of workers that it is for.
    input_bytes, output_bytes : int
        The worker's blocks of the input and of the result, all at the same time.
    staging_bytes : int
        Regions on their way to it, and the buffers that `ucx` keeps for the next ones.
    packed_bytes : int
        Regions that it has packed for others.
    """

    workers: int
    input_bytes: int
    output_bytes: int
    staging_bytes: int
    packed_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it: the worker's peak."""
        return self.input_bytes + self.output_bytes + self.staging_bytes + self.packed_bytes


@dataclass(frozen=True, slots=True)
class PartsEstimate(MemoryEstimate):
    """What one task of `map_on_gpu` takes of a GPU at most; a worker has one for each thread.

    What the user's function takes to work in comes to that.

    Attributes
    ----------
    workers : int
        One.
    input_bytes, output_bytes : int
        Of all slots: parts of the inputs, and what the function makes of them, rims included.
    staging_bytes, packed_bytes : int
        None.
    parts : int
        Of the block that is cut into most parts.
    """

    parts: int


def estimate(
    x: DaskArray,
    axes: Sequence[int] | None = None,
    *,
    chunks: ChunksLike = None,
    workers: int | None = None,
) -> MemoryEstimate:
    """Tell what a transpose, `iterate`, `spmd` or `map_on_gpu` takes of memory at most.

    Nothing is computed. Of what `iterate` or `spmd` returned it tells what a member takes, if
    neither `axes` nor `chunks` ask for a transpose: a `sections.estimate.SectionEstimate`, with
    what members send in a step, and for a checkpoint. Of what `map_on_gpu` returned it tells what
    a task takes of a GPU: an `ops.estimate.PartsEstimate`.

    It is arithmetic on chunks and options: blocks are assumed to be spread evenly over the workers,
    in number, and the input to be kept as long as there is something left to do.

    Parameters
    ----------
    x, axes, chunks
        As for `dask_p2p.transpose`; or a result of `dask_p2p.iterate`, `dask_p2p.spmd` or
        `dask_p2p.map_on_gpu` alone.
    workers : int, optional
        Number of workers, of one thread each. By default those of the current client, if there is
        a synchronous one, with their threads: each may work at a block. Else as many as `x` has
        blocks along its most divided axis.

    Returns
    -------
    MemoryEstimate
        Bytes by what they are for, and ``total_bytes``.

    Raises
    ------
    UnsupportedArrayError, AxesError, ChunksError
        As `dask_p2p.transpose` does.
    InputError
        If `workers` is no positive whole number, or given for `iterate` or `spmd`, whose members
        are chosen already.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((4000, 1000), chunks=(1000, 1000))
    >>> found = estimate(x, workers=4)
    >>> found.input_bytes, found.output_bytes
    (8000000, 8000000)
    """
    if axes is None and chunks is None and (mapped := _mapped(x)) is not None:
        return _parts_estimate(mapped)
    if axes is None and chunks is None and (section := _section(x)) is not None:
        if workers is not None:
            raise InputError(
                f"expected no workers=, as the members of this array are chosen, got {workers!r}. "
                f"Give members= to iterate or spmd."
            )
        found: MemoryEstimate = section.estimate()
        return found
    order, after = transposed(x, axes, chunks)
    options = checked_options()
    cluster = cluster_size() if workers is None else (workers, 1)
    workers, threads = cluster or (max(map(len, x.chunks), default=1), 1)
    workers = checked_count("workers", workers=workers)
    in_all = workers * threads if cluster else None
    plans = [plan for plan, _ in planned(x.chunks, order, after, options, lambda: in_all)]
    kind = backend_for(x._meta).name
    item_bytes = x.dtype.itemsize
    input_bytes, _ = even_share(x.chunks, workers, item_bytes)
    shares = [even_share(plan.chunks, workers, item_bytes) for plan in plans]
    output_bytes = sum(share_bytes for share_bytes, _ in shares)  # what is between the two, too
    staged_bytes = packed = 0
    if workers > 1:
        for plan, (_, blocks) in zip(plans, shares, strict=True):
            largest_block, _ = even_share(plan.chunks, sys.maxsize, item_bytes)
            largest_piece = plan.largest_piece * item_bytes
            task_bytes = staging_bytes(options, kind, largest_piece, largest_block, item_bytes)
            staged_bytes = max(staged_bytes, min(threads, blocks) * task_bytes)
        packed = packed_bytes(options, kind, (workers - 1) * threads, input_bytes)
        staged_bytes += min(idle_bytes(options, kind), staged_bytes + packed)
    return MemoryEstimate(workers, input_bytes, output_bytes, staged_bytes, packed)


def even_share(chunks: Chunks, workers: int, item_bytes: int) -> tuple[int, int]:
    """Return the bytes of the largest blocks that one worker may get, and how many they are."""
    sizes = [prod(block_shape(chunks, index)) for index in block_indices(chunks)]
    share = -(-len(sizes) // workers)
    return sum(nlargest(share, sizes)) * item_bytes, share


def _section(x: Any) -> Any:
    """Return what the members call that make an array; None if no members make it."""
    if not is_dask_array(x) or key_split(x.name) not in ("p2p-iterate", "p2p-spmd"):
        return None
    if hasattr(x, "expr"):
        section = getattr(x.expr, "section", None)  # none of what was computed already
        return None if section is None else section.body
    graph = x.__dask_graph__()
    made = graph[(x.name, *[0] * x.ndim)]
    members = (graph[key] for key in getattr(made, "dependencies", ()))  # none of a future
    return next((each.body for each in members if isinstance(each, MemberTask)), None)


def _mapped(x: Any) -> Mapped | None:
    """Return what the tasks of an array call; None if `map_on_gpu` did not make it."""
    if not is_dask_array(x) or key_split(x.name) != OPERATION:
        return None
    task = x.__dask_graph__()[(x.name, *[0] * x.ndim)]
    mapped: Mapped | None = getattr(getattr(task, "func", None), "mapped", None)
    return mapped  # None where it is computed already


def _parts_estimate(mapped: Mapped) -> PartsEstimate:
    plans = list(mapped.largest_plans())
    inputs, results = max((plan.device_bytes(SLOTS) for plan in plans), key=sum)
    return PartsEstimate(1, inputs, results, 0, 0, max(len(plan.parts) for plan in plans))
