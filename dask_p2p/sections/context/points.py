"""Points of a whole array, between its elements: sources and receivers of a simulation.

A point acts on its neighbours, two along each axis, with linear weights; or on the nearest one.
Each rank acts on those neighbours that are in its own local block::

    elements   0     1     2  |  3     4          point at 2.25: 0.75 of element 2, which rank 0
    ranks      rank 0         |  rank 1           has, and 0.25 of element 3, which rank 1 has
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from dask_p2p.backends.plain import check_plain
from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, box_shape
from dask_p2p.inputs import checked_choice
from dask_p2p.sections.exchange.halo import HaloArray
from dask_p2p.types import Array


@dataclass(frozen=True)
class Points:
    """A constant of `iterate`: points, such as sources and receivers.

    The function receives a `dask_p2p.sections.context.points.LocalPoints`, with the methods `add`
    and `sample`.

    Parameters
    ----------
    xy : array of shape (ndim, n)
        Indices of n points along each axis of the whole array; fractions lie between elements.
    weights : {"linear", "nearest"}, optional
        The elements that a point acts on: by default its neighbours, with linear weights. "nearest"
        is the nearest element alone, the upper one of two at the same distance.
    """

    xy: Any
    weights: str = "linear"


class LocalPoints:
    """Points of a whole array, as one rank sees them: from `Context.points` or a `Points`."""

    def __init__(
        self,
        xy: Array,  # as `checked_points` returns it
        box: Box,  # of the rank's block
        module: Any,  # of the arrays: NumPy or CuPy
        others: Iterable[tuple[tuple[int, ...], tuple[int, ...]]] = (),
    ) -> None:
        """`others` has shapes of blocks with halo, and the index in each where the box begins."""
        self._count: int = xy.shape[1]
        self._module = module
        self._starts: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for shape, start in (*others, (box_shape(box), (0,) * len(box))):
            self._starts.setdefault(shape, set()).add(start)
        numbers, weights, index = _neighbours(xy, box)
        self._numbers, self._weights = module.asarray(numbers), module.asarray(weights)
        self._index = [module.asarray(along) for along in index]

    def __len__(self) -> int:
        return self._count

    def add(self, block: Any, values: Any) -> None:
        """Add values to a block at the neighbours of the points, times their weights.

        Parameters
        ----------
        block : array or HaloArray
            This rank's block, which is changed. In `iterate` with or without halo.
        values : number or array
            One value for all points, or one for each.

        Raises
        ------
        InputError
            If the block has another shape, or the number of values differs.
        """
        where = self._where(block)
        own = self._module.asarray(values)
        if own.shape not in ((), (self._count,)):
            raise InputError(
                f"values: expected a number, or one for each of {self._count} points, got an "
                f"array of shape {own.shape}. Give one for each point."
            )
        each = own[self._numbers] if own.ndim else own
        array = block.inner if isinstance(block, HaloArray) else block
        self._module.add.at(array, where, self._weights * each)

    def sample(self, block: Any) -> Array:
        """Return this rank's part of the values at the points: their sum over all ranks is whole.

        Parameters
        ----------
        block : array or HaloArray
            This rank's block. In `iterate` with or without halo.

        Returns
        -------
        array
            One value for each point; 0 where this rank has no neighbour.

        Raises
        ------
        InputError
            If the block has another shape.
        """
        where = self._where(block)
        array = block.inner if isinstance(block, HaloArray) else block
        parts = self._weights * array[where]
        found: Array = self._module.zeros(self._count, parts.dtype)
        self._module.add.at(found, self._numbers, parts)
        return found

    def _where(self, block: Any) -> tuple[Array, ...]:
        """Return the indices of the neighbours in a block."""
        array = block.inner if isinstance(block, HaloArray) else block
        shape = getattr(array, "shape", None)
        starts = self._starts.get(shape, set()) if isinstance(shape, tuple) else set()
        if len(starts) != 1:
            text = " or ".join(map(str, self._starts))
            raise InputError(
                f"block: expected this rank's block, an array of shape {text}, got "
                f"{type(array).__name__} of shape {shape}. Give the local block without halo."
            )
        (start,) = starts
        pairs = zip(self._index, start, strict=True)
        return tuple(along + first if first else along for along, first in pairs)


def checked_points(xy: Any, shape: Sequence[int], weights: str = "linear") -> Array:
    """Return the points of an array of a shape, moved to the elements if weights are "nearest".

    Raises `InputError` if a point lies outside, or the weights are unknown.
    """
    checked_choice("weights", weights, ("linear", "nearest"))
    check_plain("points", xy)
    on_host = xy.get() if hasattr(xy, "get") and hasattr(xy, "dtype") else xy
    try:
        found = np.asarray(on_host, float)
        got = f"one of shape {found.shape}"
    except (TypeError, ValueError):
        found, got = np.empty(0), f"{xy!r:.80}"
    if found.ndim != 2 or len(found) != len(shape):
        raise InputError(
            f"points: expected indices along each axis in an array of shape ({len(shape)}, n), got "
            f"{got}. Give numpy.array([[y0, y1], [x0, x1]])."
        )
    last = np.array(shape)[:, None] - 1
    outside = ~((found >= 0) & (found <= last)).all(axis=0)
    if outside.any():
        raise InputError(
            f"points: expected indices from 0 to {tuple(n - 1 for n in shape)}, got "
            f"{found[:, outside.argmax()].tolist()}. Move the point, or leave it out."
        )
    return np.floor(found + 0.5) if weights == "nearest" else found


def _neighbours(xy: Array, box: Box) -> tuple[Array, Array, Array]:
    """Return the neighbours in a box: points' numbers, weights, and indices in the box."""
    low = np.floor(xy).astype(int)
    beyond = xy - low
    numbers, weights, index = [], [], []
    start, stop = np.array(box, int).reshape(-1, 2).T[:, :, None]
    for corner in product((0, 1), repeat=len(box)):
        side = np.array(corner, int)[:, None]
        weight = np.where(side == 1, beyond, 1 - beyond).prod(axis=0)
        at = low + side
        (own,) = np.nonzero((weight > 0) & ((at >= start) & (at < stop)).all(axis=0))
        numbers.append(own)
        weights.append(weight[own])
        index.append((at - start)[:, own])
    numbers_of, weights_of = np.concatenate(numbers), np.concatenate(weights)
    order = np.argsort(numbers_of, kind="stable")  # so sums do not depend on the ranks
    return numbers_of[order], weights_of[order], np.concatenate(index, axis=1)[:, order]
