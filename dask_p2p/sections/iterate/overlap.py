"""Functions that compute parts of a local block as they compute the whole block.

With overlap, a function is called for the interior while its halos are in flight, and then for
parts of the boundary. A function that keeps a state, or reads sizes or sums of its block, would
return other values than for the whole block. So before calls overlap, one call compares the results
of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, box_size
from dask_p2p.replayable import is_replayable
from dask_p2p.sections.checks import is_close
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.iterate.call import Call
from dask_p2p.sections.iterate.local_fields import LocalField
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.iteration import Iteration

#: Computes a box of the next local blocks by a call.
Apply: TypeAlias = Callable[[Call, Box], Any]


class Parts:
    """Comparisons of one rank's results for parts of a local block with those for the whole."""

    def __init__(
        self,
        of: Iteration,
        device: Host,
        fields: Mapping[str, LocalField],
        whole: Box,  # the whole local block
    ) -> None:
        self._of, self._device, self._fields, self.whole = of, device, fields, whole
        self._plain: dict[int, bool] = {}  # by id of the phase

    def compare(
        self, call: Call, apply: Apply, parts: Sequence[Box]
    ) -> Literal["same", "close", "other"]:
        """Compute parts of the block, whose whole results are there, and compare both.

        "same": all bits are equal; "close": values differ by rounding errors. The results for the
        whole block are there afterwards.
        """
        before = self._sums(call)
        for box in parts:
            apply(call, box)
        if self._sums(call) == before:
            return "same"
        found = self._results(call)
        apply(call, self.whole)
        return "close" if self._are_close(call, found) else "other"

    def is_plain(self, call: Call) -> bool:
        """Return whether the code of a function shows that it depends on its arguments alone."""
        phase = call.phase
        if id(phase) not in self._plain:  # to find out takes as long as a step
            is_plain = self._of.has_constant_arguments and is_replayable(phase.function)
            self._plain[id(phase)] = is_plain
        return self._plain[id(phase)]

    def _results(self, call: Call) -> list[Array]:
        """Return copies of the results of a call."""
        return [self._fields[name].spare.inner.copy() for name in call.changed]

    def _sums(self, call: Call) -> list[int]:
        data = (self._fields[name].spare.data for name in call.changed)
        return [self._device.checksum(each) for each in data]

    def _are_close(self, call: Call, others: Sequence[Array]) -> bool:
        """Return whether the results of a call differ from others by rounding errors only."""
        module = self._device.module
        own = (self._fields[name].spare.inner for name in call.changed)
        return all(is_close(module, *pair) for pair in zip(others, own, strict=True))


class Overlap:
    """The calls of one rank that overlap.

    With ``overlap=True`` the user promises that the function computes parts of a block alike. With
    "auto" its code has to show that another call changes nothing, and results have the same bits.
    """

    def __init__(self, of: Iteration, parts: Parts) -> None:
        self._of, self._parts = of, parts
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
        return self._parts.is_plain(call) if found is None else found

    def is_due(self, call: Call) -> bool:
        """Return whether a call may overlap in a graph, and has yet to be compared."""
        if not self._of.overlap or id(call.phase) in self._found or not _has_parts(call):
            return False
        return call.is_worth_hiding_in_graph and self._parts.is_plain(call)

    def is_checked(self, call: Call) -> bool:
        """Return whether a function is known to compute parts alike."""
        return self._found.get(id(call.phase), False)

    def put(self, call: Call, apply: Apply) -> None:
        """Enqueue a call and its exchange in a graph, concurrently if they may overlap."""
        exchange, whole = call.exchange, self._parts.whole
        if exchange is None:
            apply(call, whole)
        elif not (call.is_worth_hiding_in_graph and self.is_checked(call)):
            exchange.put(call.halo_arrays)
            apply(call, whole)
        else:
            interior, *boundary_parts = exchange.boxes
            exchange.put(call.halo_arrays, partial(apply, call, interior))
            for box in boundary_parts:
                apply(call, box)

    def check(self, call: Call, apply: Apply) -> None:
        """Compare the results for the whole block, which are there, with those for its parts.

        Raises `InputError` if they differ, with ``overlap=True``.
        """
        assert call.exchange is not None, "calls without halos do not overlap"
        parts = [*filter(box_size, call.exchange.boxes)]
        found = self._parts.compare(call, apply, parts)
        if self._is_promised and found == "other":
            raise InputError(
                "overlap=True: expected a function that computes parts of a block as it computes "
                "the whole block, got one with other values for parts. Leave out overlap=True, or "
                "remove counters, random numbers and sums over the block."
            )
        self._found[id(call.phase)] = found == "same" or self._is_promised


def _has_parts(call: Call) -> bool:
    """Return whether a part of the boundary needs halos of other ranks."""
    return call.exchange is not None and any(map(box_size, call.exchange.boxes[1:]))
