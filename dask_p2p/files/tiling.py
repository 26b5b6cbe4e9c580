"""Which part of the file moves in which pass, and how workers share a pass.

A file may be larger than the memory of all workers, so the output is written *band* by band. A band
is a box of the output. The box of the input with the same elements is read, exchanged, written and
dropped before the next band begins::

    output (8, 4), two passes, two workers        input (4, 8), axes (1, 0)

      band 0  | worker 0 writes   |                 worker 0 reads | band 0 | band 1 |
              | worker 1 writes   |                 (rows 0, 1)    |        |        |
      band 1  | worker 0 writes   |                 worker 1 reads |        |        |
              | worker 1 writes   |                 (rows 2, 3)    |        |        |

Everything here is integers: no files, no arrays, no Dask. A *unit* is a size along an axis that
must not be cut: the extent of a Zarr chunk, which may have only one writer.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from dask_p2p.layout import Box, block_bounds, split_evenly

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["input_box", "slabs", "tile_count", "tile_steps", "tiles", "whole"]


def whole(shape: Sequence[int]) -> Box:
    """Box of all of an array."""
    return tuple((0, extent) for extent in shape)


def tiles(box: Box, steps: Sequence[int]) -> Iterator[Box]:
    """Boxes with the extents ``steps`` that cover a box; the last of an axis may be shorter."""
    return itertools.product(
        *(
            [(lo, min(lo + step, stop)) for lo in range(start, stop, step)]
            for (start, stop), step in zip(box, steps, strict=True)
        )
    )


def tile_count(shape: Sequence[int], steps: Sequence[int]) -> int:
    """Count the tiles of an array without making them: there may be very many."""
    return math.prod(-(-n // step) for n, step in zip(shape, steps, strict=True))


def tile_steps(
    shape: Sequence[int],
    most: int,
    unit: Sequence[int] | None = None,
    prefer: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Extents of tiles of at most ``most`` elements, cut along as few leading axes as will do.

    A tile starts at a multiple of ``unit`` along each axis, and of ``prefer`` too where there is
    room. One unit along every axis is the smallest tile, however many elements that has.
    """
    steps = list(shape)
    unit = unit or [1] * len(steps)
    for axis, extent in enumerate(shape):
        fit = most // math.prod(steps[axis + 1 :]) // math.prod(steps[:axis])
        if fit >= extent:
            break
        for size in (math.lcm(unit[axis], (prefer or unit)[axis]), unit[axis]):
            if fit >= size:
                parts = -(-extent // (fit // size * size))
                steps[axis] = -(-extent // (parts * size)) * size  # no more parts, but equal ones
                return tuple(steps)
        steps[axis] = min(unit[axis], extent)
    return tuple(steps)


def input_box(box: Box, axes: Sequence[int]) -> Box:
    """Box of the input whose transpose is a box of the output."""
    return tuple(box[axes.index(axis)] for axis in range(len(axes)))


def slabs(box: Box, unit: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Chunks that share a box among ``parts`` workers, cut along one axis only.

    The first axis that gives each worker a part is taken: in a C-ordered file a cut along an
    early axis leaves the runs of bytes long.
    """
    units = [-(-stop // u) - start // u for (start, stop), u in zip(box, unit, strict=True)]
    cut_axis = max(range(len(box)), key=lambda axis: min(units[axis], parts), default=0)
    return tuple(
        _cut(*side, unit[axis], min(parts, units[axis]) if axis == cut_axis else 1)
        for axis, side in enumerate(box)
    )


def _cut(start: int, stop: int, unit: int, parts: int) -> tuple[int, ...]:
    """Sizes of about equal parts of a range, cut at multiples of ``unit``."""
    first = start // unit
    bounds = block_bounds(split_evenly(-(-stop // unit) - first, parts))
    edges = [min(max((first + bound) * unit, start), stop) for bound in bounds]
    return tuple(hi - lo for lo, hi in itertools.pairwise(edges))
