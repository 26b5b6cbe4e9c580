"""Steps of an iteration as a graph of a GPU, which is tried before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.sections.devices import Host
from dask_p2p.sections.halo import Padded
from dask_p2p.types import Array

__all__ = ["Captured"]


class Captured:
    """Steps that are done again and again without their function.

    What a function does otherwise than on its stream is in no graph, nor what it takes from
    anywhere but its arguments. So the graph is run once on the fields as they are; these are then
    put back, the same steps done by the function, and what both have made compared.

    Parameters
    ----------
    device : Host
        Where the fields lie.
    fields : sequence of Padded
        The fields now, which the steps are for.
    steps : callable
        Puts steps on the stream that leave each field in the memory where it was.

    Raises
    ------
    InputError
        If a graph cannot have these steps.
    """

    def __init__(self, device: Host, fields: Sequence[Padded], steps: Callable[[], None]) -> None:
        self._device = device
        self._replay = device.captured(steps)
        before = [field.data.copy() for field in fields]
        self._replay()
        self._tried = [field.inner.copy() for field in fields]
        for field, data in zip(fields, before, strict=True):
            field.data[...] = data

    def __call__(self) -> None:
        """Put the steps on the stream once more."""
        self._replay()

    def check(self, fields: Sequence[Padded]) -> None:
        """Compare what the graph has made with what the function made of the same.

        Raises
        ------
        InputError
            If that differs.
        """
        for field, tried in zip(fields, self._tried, strict=True):
            same = self._count(tried.view(np.uint8) == field.inner.copy().view(np.uint8))
            if same < tried.nbytes:
                raise InputError(
                    f"capture: expected a function that does the same in each step, all of it on "
                    f"the current stream, got one whose captured steps gave {tried.nbytes - same} "
                    f"of {tried.nbytes} bytes otherwise than its own. Leave out capture=True, or "
                    f"what counts steps, draws random numbers, or uses other streams."
                )
        self._tried = []

    def _count(self, array: Array) -> int:
        return int(self._device.module.count_nonzero(array))
