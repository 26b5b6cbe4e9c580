"""Arrays whose chunk sizes are unknown along some axes: nothing can be planned along those."""

from __future__ import annotations

from typing import Any

import dask.array as da

from dask_p2p.errors import ChunksError
from dask_p2p.types import DaskArray

__all__ = ["rechunk_unknown"]


def rechunk_unknown(
    x: DaskArray, axes: tuple[int, ...], chunks: Any, balance: bool, block_size_limit: int | None
) -> DaskArray:
    """Cut an array anew by Dask's tasks, which is possible along its other axes.

    Raises
    ------
    ChunksError
        If an axis of unknown chunk sizes is to be cut anew, or the chunks do not fit.
    """
    if axes != tuple(range(x.ndim)):
        x = da.transpose(x, axes)
    try:
        return da.rechunk(
            x,
            chunks,
            balance=balance,
            block_size_limit=block_size_limit,
            method="tasks",
        )
    except (TypeError, ValueError) as exc:
        raise ChunksError(
            f"expected known chunk sizes along the axes that are cut anew, got {x.chunks} and "
            f"chunks={chunks!r}: {exc}. Call x.compute_chunk_sizes() first, or leave these axes."
        ) from exc
