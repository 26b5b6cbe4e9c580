"""Arrays whose chunk sizes are unknown along some axes: nothing can be planned along those."""

from __future__ import annotations

from functools import partial

# Bound here: others may put this package's functions in the place of Dask's.
from dask.array import rechunk, transpose

from dask_p2p.errors import ChunksError
from dask_p2p.types import ChunksLike, DaskArray

__all__ = ["rechunk_by_tasks", "rechunk_unknown"]

rechunk_by_tasks = partial(rechunk, method="tasks")


def rechunk_unknown(
    x: DaskArray,
    axes: tuple[int, ...],
    chunks: ChunksLike,
    balance: bool,
    block_size_limit: int | None,
) -> DaskArray:
    """Cut an array anew by Dask's tasks, which is possible along its other axes.

    `ChunksError` if an axis of unknown chunk sizes is to be cut anew, or the chunks do not fit.
    """
    if axes != tuple(range(x.ndim)):
        x = transpose(x, axes)
    try:
        return rechunk_by_tasks(x, chunks, balance=balance, block_size_limit=block_size_limit)
    except (TypeError, ValueError) as exc:
        raise ChunksError(
            f"expected known chunk sizes along the axes that are cut anew, got {x.chunks} and "
            f"chunks={chunks!r}: {exc}. Call x.compute_chunk_sizes() first, or leave these axes."
        ) from exc
