"""The loop of one rank of `iterate`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from functools import partial
from math import lcm
from typing import Any

from dask_p2p.errors import BlockMismatchError
from dask_p2p.geometry import Box, box_size
from dask_p2p.sections.api.rank_body import LocalBlocks
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.exchange.halo import HaloArray
from dask_p2p.sections.gang.checkpoints import Period, copy_from_state
from dask_p2p.sections.gpu.windows import SLOTS
from dask_p2p.sections.iterate.capture import Captured, Overlap, Parts, Replays
from dask_p2p.sections.iterate.fields import Scalars
from dask_p2p.sections.iterate.first_step import FirstStep, StepComparisons
from dask_p2p.sections.iterate.functions import Binding
from dask_p2p.sections.iterate.iteration import Iteration
from dask_p2p.sections.iterate.local_fields import LocalFields, StepAt
from dask_p2p.sections.iterate.output.series import NumberState, Series
from dask_p2p.sections.iterate.output.stores import Stores
from dask_p2p.sections.iterate.step import NOTHING, Call, Phase, Returned
from dask_p2p.types import Array

_CYCLES = 64  # later cycles, one or more to be replayed; otherwise nothing is captured


class RunIteration(Iteration):
    """The function of the section: all steps of each rank."""

    def __call__(self, ctx: Context, local_blocks: LocalBlocks) -> dict[str, Any]:
        with closing(RankLoop(self, ctx, local_blocks)) as loop:
            returned = loop()
        return {str(number): value for number, value in enumerate(returned)}


class RankLoop:
    """All steps of one rank.

    After some steps, a *cycle*, each time level is in the same memory again. So the arrays of a
    call are found once for each position in the cycle.
    """

    def __init__(self, iteration: Iteration, ctx: Context, local_blocks: LocalBlocks) -> None:
        self._iteration, self._ctx = iteration, ctx
        ctx.replays_steps = iteration.capture is True
        self._replays = Replays(iteration, ctx)
        specs = (
            iteration.shape,
            local_blocks,
            iteration.fields,
            iteration.constants,
            iteration.exchange,
        )
        self._series = Series(iteration.series, iteration.steps, ctx)
        self._scalars = Scalars(iteration.scalars, ctx)
        self._numbers = NumberState(ctx.device, self._scalars, self._series)
        self._local = LocalFields(ctx, *specs, self._series.last, iteration.kwargs)
        self._fields = self._local.fields
        self._block_box = next(iter(self._fields.values())).layout.whole
        self._cycle = lcm(SLOTS, *(len(field.levels) + 1 for field in self._fields.values()))
        parts = Parts(iteration, ctx.device, self._fields, self._block_box)
        self._overlap = Overlap(iteration, parts)
        self._comparisons = StepComparisons(iteration, ctx, self._local)
        self._first = 0  # the first step of this attempt
        self._stale = {name for name, field in self._fields.items() if field.is_updated}
        self._changed: list[list[str]] = []  # by phase: names of the fields that it changes
        self._calls: dict[tuple[int, int], Call] = {}  # by position in the cycle, and phase
        recorded = self._scalars, self._series
        self._stores = Stores(
            iteration.stores, ctx, self._local, *recorded, iteration.steps, iteration.settings
        )
        self._limit = Period(iteration.max_time)

    def __call__(self) -> tuple[Any, ...]:
        """Make all steps; return the local blocks of all fields, and the series."""
        iteration, ctx, cycle, period = (
            self._iteration,
            self._ctx,
            self._cycle,
            Period(self._iteration.period),
        )
        step = first = self._first = self._resumed()
        graph: Captured | None = None
        while step < iteration.steps:
            if step == first + cycle and step + 2 * cycle < iteration.steps:
                graph = self._captured(step)
            if graph is not None and step == first + 2 * cycle:
                graph = graph if self._replays.is_right(graph) else None
            is_ready = graph is not None and step >= first + 2 * cycle
            if graph is not None and is_ready and self._is_free(step):
                graph()
                step += cycle
                ctx.progress.advance(step)
                self._stale = self._stale_before(0)
            else:
                numbers = self._first_step() if step == first else self._step(step)
                step += 1
                ctx.progress.advance(step)
                if self._is_done(step, numbers):
                    self._stores.write(step, self._current)
                    break
            ctx.device.keep_up(step)
            is_over = iteration.max_time is not None and ctx.has_ended(self._limit, step)
            self._stores.write(step, self._current, is_last=is_over)
            if is_over:
                break
            is_due = step < iteration.steps and ctx.is_due(period, step)
            if is_due and not self._comparisons.keep_values():
                self._stores.flush()  # a run that resumes here must find all frames
                self._numbers.save()
                ctx.save_state(step, self._state)
        return self._results(step)

    def _resumed(self) -> int:
        """Load the newest checkpoint, and open the stores; return the first step."""
        ctx = self._ctx
        first = ctx.restore_state(lambda saved: copy_from_state(saved, self._state, ctx.device))
        self._numbers.load(first)
        first = self._stores.resumed(first)
        ctx.progress.step = ctx.progress.first = first
        ctx.progress.steps = self._iteration.steps
        for halo_arrays in self._local.unchanging_halos():
            self._updated(halo_arrays)
        self._stores.open(first, self._current)
        return first

    def _results(self, step: int) -> tuple[Any, ...]:
        """Return the local blocks of all fields, and the numbers."""
        self._stores.flush()
        self._scalars.check()
        series = self._series.results()
        numbers = (*series, step) if self._iteration.returns_steps else ()
        return (*self._local.state, *self._scalars.values.values(), *numbers)

    def close(self) -> None:
        """End the thread of the stores, and release their folders."""
        self._stores.close()

    @property
    def _state(self) -> tuple[Array, ...]:
        """The arrays of a checkpoint."""
        return (*self._local.state, *self._numbers.arrays)

    # --- the first step

    def _updated(self, halo_arrays: Sequence[HaloArray]) -> None:
        if halo_arrays:
            self._ctx.update_halo(*halo_arrays, copy=False)

    def _first_step(self) -> Sequence[Any]:
        """Make the first step, and check the functions; return the numbers of the last one."""
        numbers: Sequence[Any] = ()
        for phase in self._iteration.phases:
            self._updated(self._stale_of(phase.binding.names))
            names, returned = self._checked(phase)
            self._changed.append(names)
            self._rotate(names)
            self._scalars.update(returned.scalars)
            numbers = returned.numbers
        self._scalars.check()
        return numbers

    def _checked(self, phase: Phase) -> tuple[list[str], Returned]:
        """Fill the whole next local blocks and check the function; return names and values."""
        at = self._local.at(self._block_box, self._ctx.step_for)
        values = self._values(phase.binding, self._block_box, at)
        read = [
            level
            for name, field in self._fields.items()
            for level in field.levels
            if name in phase.binding.names
        ]
        parts = {name: self._fields[name].parts(self._block_box)[0] for name in phase.fields}

        def next_level(name: str) -> HaloArray:
            return self._fields[name].next_level

        step = FirstStep(phase, self._ctx.device, read, values, parts, next_level)
        return step()

    # --- later steps

    def _step(self, step: int) -> Sequence[Any]:
        """Make a step; return the numbers of its last function."""
        returned = NOTHING
        # Numbers for `until` are those of a whole local block.
        may_overlap = not self._iteration.is_staggered and not self._is_asked(step + 1)
        for call in self._calls_of(step):
            is_wanted = may_overlap and self._overlap.is_wanted(call)
            is_overlapped = is_wanted and self._overlap.is_checked(call)
            for box in self._boxes(call, is_overlapped):
                if self._comparisons.are_due and box == self._block_box:
                    returned = self._comparisons.step(
                        call, self._at_step, partial(self._apply, call, box)
                    )
                else:
                    returned = self._apply(call, box)
            is_due = (
                may_overlap and self._overlap.is_due(call) and self._replays.is_worthwhile(step)
            )
            if is_due or (is_wanted and not is_overlapped):
                self._overlap.check(call, self._apply)
            self._rotate(call.changed)
            if returned.scalars:
                self._scalars.update(returned.scalars)
        return returned.numbers

    def _boxes(self, call: Call, is_overlapped: bool) -> Iterator[Box]:
        """Update halos; yield boxes of the local block when they can be computed."""
        exchange, halo_arrays = call.exchange, call.halo_arrays
        if not call.reads <= self._stale:  # a record has read some of them since
            halo_arrays = self._stale_of(call.phase.binding.names)
            exchange = self._ctx.halo_exchange(halo_arrays) if halo_arrays else None
        self._stale -= call.reads
        if exchange is None:
            yield self._block_box
            return
        pending = exchange.begin(halo_arrays, is_overlapped)
        if not is_overlapped:
            pending.wait()
            yield self._block_box
            return
        interior, *boundary_parts = exchange.boxes
        if box_size(interior):
            yield interior
        pending.wait()
        yield from boundary_parts

    def _calls_of(self, step: int) -> Iterator[Call]:
        """Yield the calls of a step; each turns its fields before the next one."""
        position = (step - self._first) % self._cycle
        for number, phase in enumerate(self._iteration.phases):
            key = position, number
            if key not in self._calls:
                reads = frozenset(self._stale_before(number) & phase.binding.names)
                halo_arrays = [self._fields[name].newest for name in self._fields if name in reads]
                exchange = self._ctx.halo_exchange(halo_arrays) if halo_arrays else None
                changed = self._changed[number]
                of_halos = halo_arrays, exchange, self._ctx.device
                self._calls[key] = Call(phase, changed, reads, *of_halos)
            yield self._calls[key]

    def _stale_before(self, number: int) -> set[str]:
        """Return the names of fields whose halos are out of date before a phase of a later step."""
        phases, stale = self._iteration.phases, set()
        for name in (name for name, field in self._fields.items() if field.has_halo):
            for distance in range(1, len(phases) + 1):
                earlier = (number - distance) % len(phases)
                if name in self._changed[earlier]:
                    stale.add(name)
                    break
                if name in phases[earlier].binding.names:
                    break
        return stale

    def _apply(self, call: Call, box: Box) -> Returned:
        """Fill a box of the next local blocks; return the values of the function."""
        if box not in call.arrays:
            values = self._at_step(call.phase.binding, box)
            scalars = self._scalars.values.keys()
            call.arrays[box] = call.arrays_for(box, values, self._fields, scalars)
        return call.apply(box, self._scalars.values)

    def _at_step(self, binding: Binding, box: Box) -> dict[str, Any]:
        return self._values(binding, box, self._local.at(box, self._ctx.step_for))

    def _values(self, binding: Binding, box: Box, at: StepAt) -> dict[str, Any]:
        return {**self._local.values(binding.names, box, at), **self._scalars.values}

    def _stale_of(self, names: Collection[str]) -> list[HaloArray]:
        """Return the newest levels of these names whose halos are out of date; they are updated."""
        stale = [name for name in self._fields if name in self._stale and name in names]
        self._stale.difference_update(stale)
        return [self._fields[name].newest for name in stale]

    def _rotate(self, changed: Sequence[str]) -> None:
        for name in changed:
            field = self._fields[name]
            field.rotate()
            if field.has_halo:
                self._stale.add(name)

    # --- records and until

    def _is_asked(self, step: int) -> bool:
        """Return whether `until` is called after a step, with numbers of the function."""
        iteration = self._iteration
        return (
            iteration.until is not None
            and not iteration.series
            and step % iteration.check_every == 0
        )

    def _is_done(self, step: int, numbers: Sequence[Any]) -> bool:
        """Record numbers after a step; return whether `until` ends the loop."""
        until = self._iteration.until
        if self._series.is_due(step):
            current = self._current(self._series.names)
            self._series.record(step, lambda binding: current(binding, self._block_box))
            if until is not None or self._iteration.reads_at:  # perhaps at.last
                self._series.combine()
            if until is not None:
                return bool(until(dict(self._series.last)))
        if until is None or not self._is_asked(step):
            return False
        if not numbers or any(number is None for number in numbers):
            raise BlockMismatchError(
                "expected numbers for until= from the function, got none. Return them, after the "
                "array if it returns one."
            )
        return bool(until(*map(self._ctx.allreduce, numbers)))

    def _current(self, names: Collection[str]) -> Callable[[Binding, Box], dict[str, Any]]:
        """Update the halos of some fields after a step; return a function of all their values."""
        # One message updates halos for the next step, too.
        self._updated(self._stale_of(self._iteration.phases[0].binding.names.union(names)))

        def step(name: str) -> int:
            return max(0, self._ctx.step_for(name) - 1)

        return lambda binding, box: self._values(binding, box, self._local.at(box, step))

    # --- captured steps

    def _captured(self, step: int) -> Captured | None:
        """Return a graph that replays a cycle of steps; None if the steps go on one by one."""
        later = range(step + self._cycle, self._iteration.steps, self._cycle)
        if not self._replays.is_worthwhile(step) or not any(map(self._is_free, later[:_CYCLES])):
            return None

        def steps() -> None:
            for number in range(step, step + self._cycle):
                for call in self._calls_of(number):
                    self._overlap.enqueue(call, self._apply)
                    self._rotate(call.changed)

        def restore() -> None:
            restore_order()
            self._stale = stale

        stale, restore_order = {*self._stale}, self._local.restoring()
        return self._replays.captured(self._calls.values(), self._local.levels, steps, restore)

    def _is_free(self, step: int) -> bool:
        """Return whether a cycle without work for the host can begin after a step."""
        iteration, last = self._iteration, step + self._cycle
        if (step - self._first) % self._cycle or last >= iteration.steps:
            return False
        if (
            isinstance(iteration.period, int)
            and (last - 1) // iteration.period > step // iteration.period
        ):
            return False  # a checkpoint is due before its last step
        if any(map(self._stores.is_due, range(step + 1, last))) or self._stores.computes(last):
            return False
        later = range(step + 1, last + 1)
        return not any(map(self._is_asked, later)) and not any(map(self._series.is_due, later))
