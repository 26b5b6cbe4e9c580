"""Functions that compute parts of a local block as they compute the whole block.

With overlap, a function is called for the interior while its halos are in flight, and then for
parts of the boundary. A function that keeps a state, or reads sizes or sums of its block, would
return other values than for the whole block. So before calls overlap, one call compares the results
of both.

The results of such a function also depend on the number of ranks. So without overlap, too, the
second step compares the results for two halves with those for the whole block, and warns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dask.utils import funcname

from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, box_size
from dask_p2p.replayable import is_constant, is_replayable
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.divided import are_close, copies_of, halves, warn_of_division
from dask_p2p.sections.iterate.call import Call
from dask_p2p.sections.iterate.local_fields import LocalField
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.context.context import Context
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
        found = self.results(call)
        apply(call, self.whole)
        return "close" if self.are_close(call, found) else "other"

    def is_plain(self, call: Call) -> bool:
        """Return whether the code of a function shows that it depends on its arguments alone."""
        return self._are_constant and is_replayable(call.phase.function)

    def copies(self, call: Call) -> Callable[[], Callable[..., Any]] | None:
        """Return a function that returns copies of the call's function, for further calls."""
        return copies_of(call.phase.function) if self._are_constant else None

    @property
    def _are_constant(self) -> bool:
        """True if no function can change the constants and keywords."""
        given = [*self._of.kwargs.values(), *(spec.value for spec in self._of.constants)]
        return all(map(is_constant, given))

    def results(self, call: Call) -> list[Array]:
        """Return copies of the results of a call."""
        return [self._fields[name].spare.inner.copy() for name in call.changed]

    def restore(self, call: Call, results: Sequence[Array]) -> None:
        """Put results of a call back into their memory."""
        for name, found in zip(call.changed, results, strict=True):
            self._fields[name].spare.inner[...] = found

    def _sums(self, call: Call) -> list[int]:
        data = (self._fields[name].spare.data for name in call.changed)
        return [self._device.checksum(each) for each in data]

    def are_close(self, call: Call, others: Sequence[Array]) -> bool:
        """Return whether the results of a call differ from others by rounding errors only."""
        module = self._device.module
        own = (self._fields[name].spare.inner for name in call.changed)
        return all(are_close(module, *pair) for pair in zip(others, own, strict=True))


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

    def is_checked(self, call: Call) -> bool:
        """Return whether a function is known to compute parts alike."""
        return self._found.get(id(call.phase), False)

    def check(self, call: Call, apply: Apply) -> None:
        """Compare the results for the whole block, which are there, with those for its parts.

        Raises `InputError` if they differ, with ``overlap=True``.
        """
        assert call.exchange is not None, "calls without halos do not overlap"
        found = self._parts.compare(call, apply, [*filter(box_size, call.exchange.boxes)])
        if self._is_promised and found == "other":
            raise InputError(
                "overlap=True: expected a function that computes parts of a block as it computes "
                "the whole block, got one with other values for parts. Leave out overlap=True, or "
                "remove counters, random numbers and sums over the block."
            )
        if found == "other":
            _warn(call)
        self._found[id(call.phase)] = found == "same" or self._is_promised


class Divisions:
    """The calls of one rank whose results must not depend on the division into local blocks.

    Functions are compared once, if their code shows that calls of a copy change nothing else.
    """

    def __init__(self, of: Iteration, ctx: Context, parts: Parts, whole: Box) -> None:
        is_divided = [count > 1 and of.compares_parts(ctx) for count in ctx.grid]
        self._halves = halves(whole, is_divided)
        self._parts = parts
        self._seen: set[int] = set()  # ids of phases

    def is_due(self, call: Call) -> bool:
        """Return whether a call is compared, once its results for the whole block are there."""
        if not self._halves or id(call.phase) in self._seen:
            return False
        self._seen.add(id(call.phase))
        return True

    def check(self, call: Call, apply: Apply) -> None:
        """Warn if the results for halves of the local block are others than for the whole."""
        if (copies := self._parts.copies(call)) is None:
            return
        of_steps, are_same = self._parts.results(call), True
        with suppress(Exception):  # of a function for blocks of this size alone
            of_whole = of_steps
            if (copy := copies()) is not call.phase.function:  # it may draw other random numbers
                apply(call.by(copy), self._parts.whole)
                of_whole = self._parts.results(call)
            for parts in self._halves:
                for box in parts:
                    apply(call.by(copies()), box)
                are_same = are_same and self._parts.are_close(call, of_whole)
        self._parts.restore(call, of_steps)
        if not are_same:
            _warn(call)


def _warn(call: Call) -> None:
    warn_of_division(
        f"iterate: {funcname(call.phase.function)}",
        "a local block",
        "Means, norms and sums over its argument are those of one local block: compute them of the "
        "whole array, by record= and at.last, or by spmd and ctx.allreduce. A function that reads "
        "more neighbours than depth= gives it returns such values, too.",
    )


def _has_parts(call: Call) -> bool:
    """Return whether a part of the boundary needs halos of other ranks."""
    return call.exchange is not None and any(map(box_size, call.exchange.boxes[1:]))
