"""Reductions of large arrays: each rank combines one part of them, and sends it to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dask_p2p.geometry import split_evenly
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.exchange.repartition import Redistribution
from dask_p2p.types import Array


def reduced_in_parts(
    own: Array,  # this rank's array, of the same shape and dtype on all ranks
    op: str,
    combined: Callable[[Sequence[Array], str], Any],  # combines arrays in their order
    size: int,  # number of ranks
    redistribution: Redistribution,
) -> Array:
    """Combine the arrays of all ranks, element by element, in rank order.

    The arrays are the rows of a matrix. The ranks exchange its rows for columns, a reduce-scatter.
    A second exchange sends each column's sum back to all rows, an allgather. So a rank sends and
    receives twice the size of an array, for any number of ranks.
    """
    length, name = own.size, f"allreduce({op!r})"
    rows = RankGrid(((1,) * size, (length,)), (size, 1))
    columns = RankGrid(((size,), split_evenly(length, size)), (1, size))
    there, back = redistribution.once(
        f"{name} {length}",
        lambda: (
            redistribution.between(rows, columns, (0, 1), name),
            redistribution.between(columns, rows, (0, 1), f"{name}, result"),
        ),
    )
    given = there(own.reshape(1, -1))
    total = combined(given, op)
    module = redistribution.module
    return back(module.broadcast_to(total, given.shape)).reshape(own.shape)
