"""Numbers of `iterate` in checkpoints in memory, which have arrays of the fields' kind alone."""

from __future__ import annotations

import numpy as np

from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.iterate.output.series import Series
from dask_p2p.sections.iterate.scalars import Scalars
from dask_p2p.types import Array


class NumberState:
    """The numbers and series of one rank, as arrays of its device."""

    def __init__(self, device: Host, scalars: Scalars, series: Series) -> None:
        self._device, self._scalars, self._series = device, scalars, series
        #: Arrays that `save` fills, and `load` reads.
        scalars_and_series = [*self._scalars_on_host(), *series.unset]
        self.arrays = [device.zeros(each.shape, each.dtype) for each in scalars_and_series]

    def save(self) -> None:
        """Copy all numbers into the arrays."""
        self._series.combine()
        numbers = [*self._scalars_on_host(), *self._series.values.values()]
        for array, number in zip(self.arrays, numbers, strict=True):
            self._device.copy_from_host(array[: len(number)], number)

    def load(self, step: int) -> None:
        """Copy the arrays, after a number of steps, into the numbers; none before the first."""
        if not step:
            return
        found = [self._device.to_host(each) for each in self.arrays]
        scalars = zip(self._scalars.values, found, strict=False)
        self._scalars.update({name: array[0] for name, array in scalars})
        series = zip(self._series.values, found[len(self._scalars.values) :], strict=True)
        self._series.resume(dict(series), step)

    def _scalars_on_host(self) -> list[Array]:
        return [np.array([value]) for value in self._scalars.values.values()]
