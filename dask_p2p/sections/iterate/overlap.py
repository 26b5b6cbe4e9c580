"""The decision whether a function computes the interior while its halos are in flight.

Such a function is called for the interior, and then for parts of the boundary. A function that
keeps a state, or reads sizes or sums of its block, would return other values than for the whole
block. So before calls overlap, one call compares the results of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, box_size
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.iterate.call import Call
from dask_p2p.sections.iterate.functions.replayable import is_constant, is_replayable
from dask_p2p.sections.iterate.local_fields import LocalField
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.iteration import Iteration

_ROUNDING = 2**10  # largest difference of rounding errors, in units of the last place


class Overlap:
    """The calls of one rank that overlap.

    With ``overlap=True`` the user promises that the function computes parts of a block alike. With
    "auto" its code has to show that another call changes nothing, and results have the same bits.
    """

    def __init__(
        self,
        of: Iteration,
        device: Host,
        fields: Mapping[str, LocalField],
        whole: Box,  # the whole local block
    ) -> None:
        self._of, self._device, self._fields, self._whole = of, device, fields, whole
        self._is_promised = of.overlap is True
        self._found: dict[int, bool] = {}  # by id of the phase: whether parts are computed alike

    def is_wanted(self, call: Call) -> bool:
        """Return whether a call overlaps, as far as its function is known."""
        if not self._of.overlap or not _has_parts(call):
            return False
        if self._is_promised:
            return True
        if self._of.capture is True or not call.is_worth_hiding:
            return False
        found = self._found.get(id(call.phase))
        return self._is_plain(call) if found is None else found

    def is_checked(self, call: Call) -> bool:
        """Return whether a function is known to compute parts alike."""
        return self._found.get(id(call.phase), False)

    def check(self, call: Call, apply: Callable[[Call, Box], Any]) -> None:
        """Compare the results for the whole block, which are there, with those for its parts.

        `apply` computes a box of the next local blocks.

        Raises `InputError` if they differ, with ``overlap=True``.
        """
        assert call.exchange is not None, "calls without halos do not overlap"
        whole = self._sums(call)
        for box in call.exchange.boxes:
            if box_size(box):
                apply(call, box)
        is_alike = self._sums(call) == whole
        if not is_alike:
            parts = [self._results(call, name).copy() for name in call.changed]
            apply(call, self._whole)
            is_alike = self._is_promised and self._are_close(call, parts)
            if self._is_promised and not is_alike:
                raise InputError(
                    "overlap=True: expected a function that computes parts of a block as it "
                    "computes the whole block, got one with other values for parts. Leave out "
                    "overlap=True, or remove counters, random numbers and sums over the block."
                )
        self._found[id(call.phase)] = is_alike

    def _is_plain(self, call: Call) -> bool:
        """Return whether the code of a function shows that it depends on its arguments alone."""
        given = [*self._of.kwargs.values(), *(spec.value for spec in self._of.constants)]
        return all(map(is_constant, given)) and is_replayable(call.phase.function)

    def _results(self, call: Call, name: str) -> Array:
        found: Array = self._fields[name].spare.inner
        return found

    def _sums(self, call: Call) -> list[int]:
        data = (self._fields[name].spare.data for name in call.changed)
        return [self._device.checksum(each) for each in data]

    def _are_close(self, call: Call, parts: list[Array]) -> bool:
        """Return whether results for parts and the whole block differ by rounding errors only."""
        module = self._device.module
        for name, part in zip(call.changed, parts, strict=True):
            whole = self._results(call, name)
            if whole.dtype.kind not in "fc":
                is_close = bool((whole == part).all())
            else:
                tolerance = _ROUNDING * float(np.finfo(whole.dtype).eps)
                is_close = bool(module.allclose(part, whole, tolerance, tolerance, equal_nan=True))
            if not is_close:
                return False
        return True


def _has_parts(call: Call) -> bool:
    """Return whether a part of the boundary needs halos of other ranks."""
    return call.exchange is not None and any(map(box_size, call.exchange.boxes[1:]))
