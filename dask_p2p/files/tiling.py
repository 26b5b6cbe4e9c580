"""Which part of the file moves in which pass, and how a pass is shared among workers.

A file may be larger than the memory of all workers, so the output is made *band* by band. A band
is a box of the output; the box of the input that holds the same elements is read, exchanged, and
written, and forgotten before the next band begins::

    output (8, 4), two passes, two workers        input (4, 8), axes (1, 0)

      band 0  | worker 0 writes   |                 worker 0 reads | band 0 | band 1 |
              | worker 1 writes   |                 (rows 0, 1)    |        |        |
      band 1  | worker 0 writes   |                 worker 1 reads |        |        |
              | worker 1 writes   |                 (rows 2, 3)    |        |        |

Everything here is integers: no files, no arrays, no Dask. A *unit* is the size along an axis that
is not to be cut: the extent of a Zarr chunk, which must have one writer only.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Bands", "Box", "band_of_input", "cut", "extents", "plan_bands", "slabs"]

Box = tuple[tuple[int, int], ...]
"""Half-open ``(start, stop)`` along each axis."""


@dataclass(frozen=True)
class Bands:
    """A grid of boxes that covers an array.

    Parameters
    ----------
    shape : tuple of int
        Shape of the output.
    steps : tuple of int
        Extent of a band along each axis; the last band of an axis may be shorter.
    """

    shape: tuple[int, ...]
    steps: tuple[int, ...]

    def __len__(self) -> int:
        return math.prod(-(-n // step) for n, step in zip(self.shape, self.steps, strict=True))

    def __iter__(self) -> Iterator[Box]:
        axes = zip(self.shape, self.steps, strict=True)
        return itertools.product(
            *([(lo, min(lo + step, n)) for lo in range(0, n, step)] for n, step in axes)
        )


def plan_bands(
    shape: Sequence[int],
    *,
    unit: Sequence[int],
    prefer: Sequence[int],
    itemsize_bytes: int,
    budget_bytes: int,
) -> Bands:
    """Cut an output into bands that fit into memory, along as few leading axes as will do.

    Parameters
    ----------
    shape : sequence of int
        Shape of the output, no axis empty.
    unit : sequence of int
        A band starts at a multiple of this along each axis.
    prefer : sequence of int
        A band starts at a multiple of this too, where the budget allows it.
    itemsize_bytes : int
        Size of an element.
    budget_bytes : int
        Most that the input part and the output part of one band may take together. A band of one
        unit along every axis is the smallest there is, even if it takes more.

    Returns
    -------
    Bands
    """
    most = budget_bytes // (2 * itemsize_bytes)  # elements: a band is there as input and as output
    steps = list(shape)
    for axis, extent in enumerate(shape):
        row = math.prod(steps) // steps[axis]
        fit = most // row
        if fit >= extent:
            break
        for size in (math.lcm(unit[axis], prefer[axis]), unit[axis]):
            if fit >= size:
                steps[axis] = _even(extent, fit // size * size, size)
                return Bands(tuple(shape), tuple(steps))
        steps[axis] = min(unit[axis], extent)
    return Bands(tuple(shape), tuple(steps))


def _even(extent: int, most: int, unit: int) -> int:
    """Size, a multiple of ``unit``, that makes no more parts than ``most``, but equal ones."""
    parts = -(-extent // most)
    return -(-extent // (parts * unit)) * unit


def band_of_input(band: Box, axes: Sequence[int]) -> Box:
    """Box of the input whose transpose is the box ``band`` of the output."""
    box: list[tuple[int, int]] = [(0, 0)] * len(band)
    for side, axis in zip(band, axes, strict=True):
        box[axis] = side
    return tuple(box)


def extents(box: Box) -> tuple[int, ...]:
    """Shape of a box."""
    return tuple(stop - start for start, stop in box)


def cut(start: int, stop: int, unit: int, parts: int) -> tuple[int, ...]:
    """Sizes of about equal parts of a range, at most ``parts``, cut at multiples of ``unit``."""
    first = start // unit
    units = max(1, -(-stop // unit) - first)
    parts = min(parts, units)
    edges = [start, *((first + units * k // parts) * unit for k in range(1, parts)), stop]
    return tuple(hi - lo for lo, hi in itertools.pairwise(edges))


def slabs(box: Box, unit: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Chunks that share a box among ``parts`` workers, cut along one axis only.

    The first axis that gives each worker a part is taken: in a C-ordered file a cut along an
    early axis leaves the runs of bytes long.
    """
    if not box:
        return ()
    units = [-(-stop // u) - start // u for (start, stop), u in zip(box, unit, strict=True)]
    chosen = max(range(len(box)), key=lambda axis: min(units[axis], parts))
    return tuple(
        cut(*side, unit[axis], parts if axis == chosen else 1) for axis, side in enumerate(box)
    )
