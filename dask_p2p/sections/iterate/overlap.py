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
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from dask.utils import funcname

from dask_p2p.errors import InputError, P2PWarning
from dask_p2p.geometry import Box, box_shape, box_size, cut_box
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.iterate.call import Call
from dask_p2p.sections.iterate.functions.replayable import is_constant, is_replayable
from dask_p2p.sections.iterate.local_fields import LocalField
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.context.context import Context
    from dask_p2p.sections.iterate.iteration import Iteration

_ROUNDING = 2**10  # largest difference of rounding errors, in units of the last place

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
        found = [self._results(call, name).copy() for name in call.changed]
        apply(call, self.whole)
        return "close" if self._are_close(call, found) else "other"

    def is_plain(self, call: Call) -> bool:
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
                largest = float(module.nan_to_num(abs(whole)).max())
                limits = tolerance, tolerance * largest  # relative, absolute
                is_close = bool(module.allclose(part, whole, *limits, equal_nan=True))
            if not is_close:
                return False
        return True


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

    Functions are compared once, if their code shows that another call changes nothing.
    """

    def __init__(self, of: Iteration, ctx: Context, parts: Parts, whole: Box) -> None:
        self._halves = [
            cut_box(whole, axis, length // 2)
            for axis, (length, count) in enumerate(zip(box_shape(whole), ctx.grid, strict=True))
            if count > 1 and length > 1 and of.compares_parts(ctx)
        ]
        self._parts = parts
        self._seen: set[int] = set()  # ids of phases

    def is_due(self, call: Call) -> bool:
        """Return whether a call is compared, once its results for the whole block are there."""
        if not self._halves or id(call.phase) in self._seen:
            return False
        self._seen.add(id(call.phase))
        return self._parts.is_plain(call)

    def check(self, call: Call, apply: Apply) -> None:
        """Warn if the results for halves of the local block are others than for the whole."""
        for halves in self._halves:
            try:
                found = self._parts.compare(call, apply, halves)
            except Exception:  # of a function for blocks of this size alone
                apply(call, self._parts.whole)
                return
            if found == "other":
                _warn(call)
                return


def _warn(call: Call) -> None:
    """Warn of a function of local blocks, in the client and in this worker."""
    from distributed import warn

    name = funcname(call.phase.function)
    warn(
        f"iterate: {name} returns other values for halves of a local block than for the whole "
        f"block, so its result depends on the number of ranks. Means, norms and sums over its "
        f"argument are those of one local block: compute them of the whole array, by record= and "
        f"at.last, or by spmd and ctx.allreduce. A function that reads more neighbours than depth= "
        f"gives it returns such values, too.",
        P2PWarning,
    )


def _has_parts(call: Call) -> bool:
    """Return whether a part of the boundary needs halos of other ranks."""
    return call.exchange is not None and any(map(box_size, call.exchange.boxes[1:]))
