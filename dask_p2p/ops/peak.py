"""`estimate`: what a transpose will take of each worker's memory, said before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import prod
from typing import Any

from dask_p2p.backends import backend_for
from dask_p2p.config import checked_options
from dask_p2p.errors import InputError
from dask_p2p.layout import Chunks, block_indices, block_shape
from dask_p2p.ops.rechunk import planned
from dask_p2p.ops.transpose import transposed
from dask_p2p.registration import cluster_size
from dask_p2p.transports.registry import idle_bytes, packed_bytes, staging_bytes
from dask_p2p.types import DaskArray

__all__ = ["MemoryEstimate", "estimate"]


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What one worker holds at most during a transpose.

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


def estimate(
    x: DaskArray,
    axes: Sequence[int] | None = None,
    *,
    chunks: Any = None,
    workers: int | None = None,
) -> MemoryEstimate:
    """Tell what a transpose will take of each worker's memory at most. Nothing is computed.

    It is arithmetic on chunks and options: blocks are assumed to be spread evenly over the workers,
    in number, and the input to be kept as long as there is something left to do.

    Parameters
    ----------
    x, axes, chunks
        As for `dask_p2p.transpose`.
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
        If `workers` is no positive whole number.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((4000, 1000), chunks=(1000, 1000))
    >>> found = estimate(x, workers=4)
    >>> found.input_bytes, found.output_bytes
    (8000000, 8000000)
    """
    order, after = transposed(x, axes, chunks)
    options = checked_options()
    cluster = cluster_size() if workers is None else (workers, 1)
    workers, threads = cluster or (max(map(len, x.chunks), default=1), 1)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise InputError(f"expected a number of workers, at least 1, got workers={workers!r}.")
    in_all = workers * threads if cluster else None
    plans = [plan for plan, _ in planned(x.chunks, order, after, options, lambda: in_all)]
    kind = backend_for(x._meta).name
    item_bytes = x.dtype.itemsize
    input_bytes, _ = _even_share(x.chunks, workers, item_bytes)
    shares = [_even_share(plan.chunks, workers, item_bytes) for plan in plans]
    output_bytes = sum(share_bytes for share_bytes, _ in shares)  # what is between the two, too
    staged_bytes = packed = 0
    if workers > 1:
        for plan, (_, blocks) in zip(plans, shares, strict=True):
            largest_block, _ = _even_share(plan.chunks, sys.maxsize, item_bytes)
            largest_piece = plan.largest_piece * item_bytes
            task_bytes = staging_bytes(options, kind, largest_piece, largest_block, item_bytes)
            staged_bytes = max(staged_bytes, min(threads, blocks) * task_bytes)
        packed = packed_bytes(options, kind, (workers - 1) * threads, input_bytes)
        staged_bytes += min(idle_bytes(options, kind), staged_bytes + packed)
    return MemoryEstimate(workers, input_bytes, output_bytes, staged_bytes, packed)


def _even_share(chunks: Chunks, workers: int, item_bytes: int) -> tuple[int, int]:
    """Return the bytes of the largest blocks that one worker may get, and how many they are."""
    sizes = [prod(block_shape(chunks, index)) for index in block_indices(chunks)]
    share = -(-len(sizes) // workers)
    return sum(nlargest(share, sizes)) * item_bytes, share
