"""Steps of an iteration as a CUDA graph, which is verified before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dask_p2p.sections.exchange.halo import HaloArray
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.gpu.graphs import captured
from dask_p2p.types import Array


class Captured:
    """Steps that are replayed as a CUDA graph, without calls of their function.

    A graph misses all work that the function does outside its stream, and every change of a value
    other than its arguments. So `rehearse` runs the graph once on the current fields, and restores
    them. The function then does the same steps, and `difference` compares both results.

    Parameters
    ----------
    device : Gpu
        The GPU of the fields.
    fields : sequence of HaloArray
        The current fields, on which the steps operate.
    steps : callable
        Enqueues the steps. After them each field is in the memory where it was.

    Raises
    ------
    InputError
        If the steps cannot be captured.
    """

    def __init__(self, device: Gpu, fields: Sequence[HaloArray], steps: Callable[[], None]) -> None:
        self._device, self._fields = device, fields
        self._replay = captured(device, steps)
        # Before other ranks wait for this one: there may be no memory.
        self._before = [field.data.copy() for field in fields]
        self._tried = [field.inner.copy() for field in fields]

    def rehearse(self) -> None:
        """Run the graph once, keep its results, and restore the fields: a call of all ranks."""
        for field, before in zip(self._fields, self._before, strict=True):
            before[...] = field.data
        self._replay()
        for field, tried in zip(self._fields, self._tried, strict=True):
            tried[...] = field.inner
        for field, before in zip(self._fields, self._before, strict=True):
            field.data[...] = before
        self._before = []

    def __call__(self) -> None:
        """Enqueue the steps once more."""
        self._replay()

    def difference(self) -> str:
        """Return a text if the function's results of the same steps differ; "" if they do not."""
        fields, tried = self._fields, self._tried
        self._fields = self._tried = []
        for field, found in zip(fields, tried, strict=True):
            same = self._count(found.view(np.uint8) == field.inner.copy().view(np.uint8))
            if same < found.nbytes:
                return f"{found.nbytes - same} of {found.nbytes} bytes"
        return ""

    def _count(self, array: Array) -> int:
        return int(self._device.module.count_nonzero(array))
