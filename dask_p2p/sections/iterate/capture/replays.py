"""The decision whether a GPU replays the steps of `iterate`. All ranks decide alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from dask_p2p import tuning
from dask_p2p.errors import InputError
from dask_p2p.replayable import is_replayable
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.exchange.halo import HaloArray
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.gpu.graphs import can_wait_for_peers, own_gpu, share_gpus
from dask_p2p.sections.iterate.call import Call
from dask_p2p.sections.iterate.capture.captured import Captured
from dask_p2p.sections.wire.connection import AttemptEndedError

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.iteration import Iteration

AUTO = "auto"  # value of `capture`


class Replays:
    """The captured steps of one rank.

    With ``capture=True`` the user promises that the function does the same in each step. With
    "auto" the code of the function has to show it, and steps that cannot be captured go on one by
    one.
    """

    def __init__(self, of: Iteration, ctx: Context) -> None:
        self._of, self._ctx = of, ctx
        self._is_promised = of.capture is True

    def is_worthwhile(self, step: int) -> bool:
        """Return whether the steps after this one may be captured. The same on all ranks."""
        if self._of.capture != AUTO:
            return self._is_promised
        is_long = self._of.steps - step >= tuning.current.capture_steps
        return is_long and isinstance(self._ctx.device, Gpu) and self._is_replayable

    def captured(
        self,
        calls: Collection[Call],
        levels: Sequence[HaloArray],  # of all fields
        steps: Callable[[], None],  # enqueues a cycle of steps
        restore: Callable[[], None],  # restores the fields after an incomplete cycle
    ) -> Captured | None:
        """Return a graph that replays a cycle of steps; None if a rank cannot capture it.

        Raises `InputError` if ``capture=True``, and the steps cannot be captured.
        """
        device = self._ctx.device
        if not self._all(self._can_begin(calls, levels)) or not isinstance(device, Gpu):
            return None
        if not self._is_promised and self._share_gpus():
            return None
        made: Captured | None = None
        exchanges = [each.exchange for each in calls if each.exchange is not None]
        counts = [each.count for each in exchanges]
        try:
            made = Captured(device, levels, steps)
        except AttemptEndedError:
            raise
        except Exception:
            if self._is_promised:
                raise
            restore()
            for exchange, count in zip(exchanges, counts, strict=True):
                exchange.count = count
        if not self._is_promised and not self._all(made is not None):
            return None
        assert made is not None
        made.rehearse()
        return made

    def is_right(self, graph: Captured) -> bool:
        """Return whether the graph and the functions have made the same values on all ranks.

        Raises `InputError` if ``capture=True``, and they differ.
        """
        difference = graph.difference()
        if difference and self._is_promised:
            raise InputError(
                f"capture: expected a function that does the same in each step, all of it on "
                f"the current stream, got one whose captured steps differ from its own in "
                f"{difference}. Leave out capture=True, or remove step counters, random numbers "
                f"and other streams from the function."
            )
        return self._is_promised or self._all(not difference)

    def _can_begin(self, calls: Collection[Call], levels: Sequence[HaloArray]) -> bool:
        """Return whether this rank can capture steps; with "auto" also whether they are short."""
        can = [call.exchange.can_put() for call in calls if call.exchange is not None]
        is_possible = isinstance(self._ctx.device, Gpu) and can_wait_for_peers()
        if not is_possible or not all(can):
            return False
        if self._is_promised:
            return True
        has_functions = any(level.layout.ends is not None for level in levels)
        size_bytes = sum(int(level.data.nbytes) for level in levels)
        return not has_functions and size_bytes < tuning.current.captured_bytes

    @cached_property
    def _is_replayable(self) -> bool:
        """True if the code of the iteration shows that all steps do the same."""
        of = self._of
        if of.overlap is True or of.scalars or not of.has_constant_arguments:
            return False
        return all(not each.binding.reads_at and is_replayable(each.function) for each in of.phases)

    def _share_gpus(self) -> bool:
        found = self._ctx.allgather(np.frombuffer(own_gpu(), np.uint8))
        return share_gpus([each.tobytes() for each in found])

    def _all(self, own: bool) -> bool:
        return bool(self._ctx.allreduce(np.array(own), "min"))
