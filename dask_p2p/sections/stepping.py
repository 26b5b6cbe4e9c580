"""Steps of a member's function, and the state that it goes on with when a worker was lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from operator import index

from dask_p2p.errors import InputError
from dask_p2p.sections.bindings import Bindings
from dask_p2p.sections.collectives import Collectives
from dask_p2p.sections.devices import Host
from dask_p2p.sections.links import Links
from dask_p2p.sections.progress import Progress
from dask_p2p.sections.saved import Checkpoints, Period, checked_period
from dask_p2p.sections.state_memory import check_state
from dask_p2p.types import Array

# The first steps of a loop: after each, the places of its arrays are checked. Two levels of time
# that take turns are both lost after the second step.
_CHECKED_STEPS = 3


class Stepping(Collectives):
    """One member, whose function counts steps and keeps its state."""

    def __init__(
        self,
        rank: int,  # which member this is
        size: int,  # of how many
        links: Links | None,  # by which it exchanges; None if it is the only one
        device: Host,  # where arrays lie
        checkpoints: Checkpoints | None,  # keeps its states; None if there are none
    ) -> None:
        super().__init__(rank, size, links, device)
        self._checkpoints = checkpoints
        self.progress = Progress()
        self._saved_step = -1  # of the last checkpoint
        self._restored: list[tuple[object, ...]] | None = None  # shapes and dtypes
        self._has_steps = False  # whether there was a loop of `steps`

    def steps(
        self, count: int, save: Sequence[Array] = (), every: int | str | None = "30 s"
    ) -> Iterator[int]:
        """Count steps, and keep the state of the function now and then.

        When the members run again, since a worker was lost, the steps go on where all states were
        kept last. A function may have one such loop.

        Parameters
        ----------
        count : int
            How many steps there are.
        save : sequence of array
            All that a step needs of the steps before it. The arrays are filled with the state that
            was kept before the first step, and must be the same ones in all steps: write
            ``x[...] = x + 1``, since ``x = x + 1`` makes another array. Without arrays, or where
            one has not changed since the start, members go on from the start.
        every : int, str or None
            After how many steps, or how much time, a state is kept: on the member's own worker,
            and on another one. None for never.

        Yields
        ------
        int
            The number of the step, from 0; or from where the members go on.

        Raises
        ------
        InputError
            If `count` is no number of steps, `every` nothing of the kind, or `save` no sequence
            of arrays that can be written; or if it is the second loop. In a step, if a name of a
            saved array is bound to another array.
        SectionError
            If the members made different calls.
        """
        try:
            count, save = index(count), tuple(save)
        except TypeError:
            raise InputError(
                f"expected a number of steps, and a list of arrays, got {count=}, {save=}. Give an "
                f"integer and a list: ctx.steps(100, save=[u])."
            ) from None
        if self._has_steps:
            raise InputError(
                "expected one loop of ctx.steps, got a second one: members that go on would take "
                "the state of one for that of the other. Count steps of both in one loop."
            )
        self._has_steps = True
        every = checked_period(every)
        bindings = Bindings(save, sys._getframe(1)) if every is not None else None
        return self._counted(count, save, Period(every if save else None), bindings)

    def _counted(
        self, count: int, save: Sequence[Array], period: Period, bindings: Bindings | None
    ) -> Iterator[int]:
        self.progress.steps = count
        first = self.restore(*save)
        for step in range(first, count):
            yield step
            self.progress.step = step + 1
            self.device.keep_up(step + 1)
            is_due = step + 1 < count and self.is_due(period, step + 1)
            if bindings is not None and (is_due or step - first < _CHECKED_STEPS):
                bindings.check(sys._getframe(1))
            if is_due:
                self.checkpoint(step + 1, *save)

    def is_due(self, period: Period, step: int) -> bool:
        """Return whether a checkpoint is due after so many steps: the same on all members."""
        if self._checkpoints is None:
            return False
        return period.is_due(step, lambda values: self.allreduce(values, "max"))

    def checkpoint(self, step: int, *arrays: Array) -> None:
        """Keep copies of arrays: what is needed to go on after so many steps.

        Parameters
        ----------
        step : int
            How many steps there have been: more than at the last checkpoint.
        *arrays
            As many on all members. Copies are kept on this worker and on another one.

        Raises
        ------
        InputError
            If `step` is no such number, an array cannot be written, or the arrays have other
            shapes or dtypes than those given to `restore`.
        SectionError
            If the members made different calls.
        """
        try:
            number = index(step)
        except TypeError:
            number = -1
        if number <= self._saved_step:
            more = f", more than {self._saved_step} at the last checkpoint"
            raise InputError(
                f"step: expected how many steps there have been"
                f"{more if self._saved_step >= 0 else ''}, got {step!r}."
            )
        check_state(arrays, self.device)
        given = [(array.shape, array.dtype) for array in arrays]
        if self._restored not in (None, given):
            raise InputError(
                f"expected arrays of the shapes and dtypes that ctx.restore filled, "
                f"{self._restored}, got {given}. Give both the same arrays in the same order."
            )
        if self._checkpoints is not None:
            self._checkpoints.save(number, arrays)
        self._saved_step = number

    def restore(self, *arrays: Array) -> int:
        """Fill arrays with what was kept by the last checkpoint of all members, if there is one.

        Returns
        -------
        int
            After how many steps that was; 0 if there is none, and for a second call. Also 0, and
            the arrays stay as they are, if one of them had not changed since the start on any
            member: a constant, or one that the function no longer uses.

        Raises
        ------
        InputError
            If one is no array that can be written.
        SectionError
            If the members made different calls.
        """
        check_state(arrays, self.device)
        self._restored = [(array.shape, array.dtype) for array in arrays]
        step = 0 if self._checkpoints is None else self._checkpoints.restore(arrays)
        self.progress.step = self.progress.first = step
        self._saved_step = max(self._saved_step, step or -1)
        return step
