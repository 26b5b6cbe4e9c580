"""The steps of a transform on a local block: exchanges, and transforms along whole axes.

A step gets a local block, and whether it is a temporary, which the step may overwrite. It
returns both for the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends import order_of
from dask_p2p.geometry import block_bounds, split_evenly
from dask_p2p.ops.fft.local import LocalTransform
from dask_p2p.ops.fft.stages import complex_dtype
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.pieces import MOST_PIECES, Pieces
from dask_p2p.sections.exchange.redistribution import Redistribution
from dask_p2p.types import Array, DType

Step: TypeAlias = Callable[[Any, bool], tuple[Any, bool]]


def exchanged(
    redistribution: Redistribution, is_there: bool, local_block: Any, is_own: bool
) -> tuple[Array, bool]:
    """Return a local block of the next partition; with `is_there` it already has this one."""
    if is_there:
        redistribution.check(local_block)
        return local_block, is_own
    return redistribution.begin(local_block), True


@dataclass(frozen=True)
class AxesTransform:
    """Transforms a local block along axes that are not divided.

    Parameters
    ----------
    transform
        Transform of a local block, or a piece of it.
    shape
        Shape of the result.
    to_real
        Whether the result is real.
    device
        Device of the local blocks.
    """

    transform: LocalTransform
    shape: tuple[int, ...]
    to_real: bool
    device: Host

    def __call__(self, local_block: Array, is_own: bool) -> tuple[Array, bool]:
        if local_block.size:
            return self.transform.transformed(local_block, is_own), True
        return self.device.module.zeros(self.shape, self._dtype(local_block)), True

    def in_pieces(self, local_block: Array, is_own: bool) -> tuple[Any, bool]:
        """Return the result as `Pieces`, which peers read while the next is made, if it is large.

        Otherwise return it as `__call__` does.
        """
        order = self.transform.order or order_of(local_block.strides)
        done = {axis for _, axes, _ in self.transform.steps for axis in axes}
        axis = next((axis for axis in order if axis not in done), None)
        if self.device.kind != "cupy" or axis is None:
            return self(local_block, is_own)
        dtype = self._dtype(local_block)
        made_bytes = prod(self.shape) * dtype.itemsize
        most = made_bytes // tuning.current.transform_piece_bytes
        count = min(MOST_PIECES, most, self.shape[axis])
        if count < 2:
            return self(local_block, is_own)
        bounds = block_bounds(split_evenly(self.shape[axis], count))
        position = axis if self.transform.order is None else order.index(axis)

        def piece(number: int) -> Array:
            along = slice(bounds[number], bounds[number + 1])
            part = local_block[(slice(None),) * position + (along,)]
            return self.transform.transformed(part, is_own)

        return Pieces(dtype, axis, bounds, piece), True

    def _dtype(self, local_block: Array) -> DType:
        dtype = complex_dtype(local_block.dtype)
        return np.empty(0, dtype).real.dtype if self.to_real else dtype
