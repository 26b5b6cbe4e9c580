r"""``dask p2p plan``: what a transpose would move, stage by stage, without moving anything.

The figure in chapter 4 of *CUDA Fortran for Scientists and Engineers* (Ruetsch and Fatica), of
1024 x 768 elements with x fastest, is ``dask p2p plan --shape 768x1024 --workers 4``::

    input, 4 slabs of 192 x 1024        reader  stage 0   1   2   3
      +----+----+----+----+             0             0   1   2   3
      |    |tile|    |    |             1             1   2   3   0
      +----+----+----+----+  ...        2             2   3   0   1
                                        3             3   0   1   2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import click
from dask.utils import format_bytes

from dask_p2p.cli._options import DTYPE, SHAPE, axes_option, order_of_axes
from dask_p2p.cli._tables import array_text, output, shape_text, shapes_text, summary, table
from dask_p2p.layout import Chunks, box_shape, box_size, split_evenly
from dask_p2p.plans import GridPlan, block_plans, redistribution, slab_chunks, stage_order
from dask_p2p.types import DType

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Reader", "plan", "readers", "slab_plan"]

_SHOWN = 8  # workers, and stages; of more the first and the last ones
_FIRST, _LAST = 3, 1
_MOST_WORKERS = 512  # tiles are counted one by one, and there are workers**2: seconds


@dataclass(frozen=True, slots=True)
class Reader:
    """One worker's part in the plan."""

    holders: tuple[int | None, ...]  # by stage; None for a stage 0 without anything of its own
    tiles: Counter[tuple[int, ...]]  # shapes in the input's order of axes, and how many
    received_elements: int
    kept_elements: int


def slab_plan(shape: tuple[int, ...], axes: tuple[int, ...], workers: int) -> GridPlan:
    """Plan the transpose of an array with one slab, along its first axis, for each worker."""
    chunks: Chunks = (
        split_evenly(shape[0], workers),
        *((length,) for length in shape[1:]),
    )
    return redistribution(chunks, axes, slab_chunks(chunks, axes))


def readers(plan: GridPlan) -> Iterator[Reader]:
    """Yield each worker's part, if worker r holds input slab r and makes output block r."""
    width = len(str(len(plan.src_chunks[0])))
    for worker, (_, block) in enumerate(block_plans(plan)):
        holder_of = [source.block[0] for source in block.sources]
        tiles: Counter[tuple[int, ...]] = Counter()
        elements: Counter[bool] = Counter()  # by whether they are already here
        for piece in block.pieces:
            tiles[box_shape(piece.src)] += 1
            elements[holder_of[piece.source] == worker] += box_size(piece.src)
        # Ranks are places among sorted names: written with leading zeros they sort as numbers do.
        names = [f"{holder:0{width}}" for holder in holder_of]
        order: list[int | None] = [*map(int, stage_order(names, f"{worker:0{width}}"))]
        if worker not in holder_of:
            order.insert(0, None)
        yield Reader(tuple(order), tiles, elements[False], elements[True])


@click.command()
@click.option(
    "--shape", type=SHAPE, required=True, metavar="AxB[xC...]", help="Of the array, e.g. 768x1024."
)
@click.option(
    "--workers", type=click.IntRange(1, _MOST_WORKERS), required=True, metavar="N", help="Workers."
)
@axes_option
@click.option("--dtype", type=DTYPE, default="float32", show_default=True, metavar="NAME")
def plan(shape: tuple[int, ...], workers: int, axes: tuple[int, ...] | None, dtype: DType) -> None:
    """Show the slabs, tiles and stages of a transpose, and the bytes that each worker moves.

    Worker r holds slab r of the array, cut along its first axis, and makes slab r of the result. A
    result with fewer rows than workers is cut along its other axes too.
    No cluster and no GPU are needed.
    """
    order = order_of_axes(axes, shape)
    transposed = slab_plan(shape, order, workers)
    parts = list(readers(transposed))
    console = output()
    console.print(summary(_summary_rows(transposed, parts, shape, dtype)))
    console.print()
    console.print(_stages(parts, dtype.itemsize))


def _summary_rows(
    plan: GridPlan, parts: Sequence[Reader], shape: tuple[int, ...], dtype: DType
) -> list[tuple[str, str]]:
    out_shape = tuple(shape[axis] for axis in plan.axes)
    tiles = sum((part.tiles for part in parts), Counter[tuple[int, ...]]())
    stages = max(len(part.holders) for part in parts)
    size_bytes = prod(shape) * dtype.itemsize
    moved_bytes = sum(part.received_elements for part in parts) * dtype.itemsize
    return [
        ("array", array_text(shape, dtype)),
        ("result", f"{shape_text(out_shape)}, axes {', '.join(map(str, plan.axes))}"),
        ("workers", str(len(plan.src_chunks[0]))),
        ("input slabs", shapes_text(product(*plan.src_chunks))),
        ("output slabs", shapes_text(product(*plan.chunks))),
        ("tiles", shapes_text(tiles.elements())),
        ("stages", f"{stages}; nothing moves in stage 0"),
        ("moved", f"{format_bytes(moved_bytes)} of {format_bytes(size_bytes)}"),
    ]


def _stages(parts: Sequence[Reader], itemsize: int) -> Table:
    """Return the table of readers and stages; of many, the first and the last ones."""
    stages = _abbreviated(max(len(part.holders) for part in parts))
    heads = ["..." if stage is None else str(stage) for stage in stages]
    result = table(
        "reader",
        *[f"stage {heads[0]}", *heads[1:]],
        *("receives", "keeps", "in all"),
        title="Holder of the tile that each reader takes",
    )
    for reader in _abbreviated(len(parts)):
        if reader is None:
            result.add_row(*["..."] * len(result.columns))
            continue
        part = parts[reader]
        sizes = (
            part.received_elements,
            part.kept_elements,
            part.received_elements + part.kept_elements,
        )
        cells = [_holder(part.holders, stage) for stage in stages]
        result.add_row(str(reader), *cells, *(format_bytes(n * itemsize) for n in sizes))
    return result


def _holder(holders: Sequence[int | None], stage: int | None) -> str:
    if stage is None:
        return "..."
    holder = holders[stage] if stage < len(holders) else None
    return "-" if holder is None else str(holder)


def _abbreviated(count: int) -> list[int | None]:
    """Return the numbers below `count`, with None in the place of those in the middle.

    >>> _abbreviated(3), _abbreviated(100)
    ([0, 1, 2], [0, 1, 2, None, 99])
    """
    if count <= _SHOWN:
        return [*range(count)]
    return [*range(_FIRST), None, *range(count - _LAST, count)]
