"""The loop of one rank of `iterate`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import lcm
from typing import Any

from dask_p2p.errors import BlockMismatchError
from dask_p2p.geometry import Box
from dask_p2p.sections.api.rank_body import LocalBlocks
from dask_p2p.sections.checks import StepChecks, ValueKeeping
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.context.loop import Callback, Loop
from dask_p2p.sections.exchange.halo import HaloArray
from dask_p2p.sections.gang.checkpoints import Period
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.gpu.windows import SLOTS
from dask_p2p.sections.iterate.capture import Captured, Overlap, Replays
from dask_p2p.sections.iterate.fields import Scalars
from dask_p2p.sections.iterate.functions import Binding
from dask_p2p.sections.iterate.iteration import Iteration, VisitPlan
from dask_p2p.sections.iterate.local_fields import LocalFields
from dask_p2p.sections.iterate.output.checkpoints import CheckpointFiles
from dask_p2p.sections.iterate.output.files import FieldValues
from dask_p2p.sections.iterate.output.frames import Frames
from dask_p2p.sections.iterate.output.series import Series
from dask_p2p.sections.iterate.step import NOTHING, Call, Returned
from dask_p2p.sections.iterate.streaming import StreamedSteps

_CYCLES = 64  # later cycles, one or more to be replayed; otherwise nothing is captured


class RunIteration(Iteration):
    """The function of the section: all steps of each rank."""

    def __call__(self, ctx: Context, local_blocks: LocalBlocks) -> dict[str, Any]:
        work = RankWork(self, ctx, local_blocks)
        try:
            step, steps = work.resume(), work.steps
            loop = Loop(ctx, self.steps, step, work.callbacks())
            while not loop.is_over:
                step += steps.make(step, loop)
                loop.advance(step)
            returned = work.results(step)
        finally:
            ctx.close_stores()
        return {str(number): value for number, value in enumerate(returned)}


class RankWork:
    """The fields of one rank, and the callbacks of its loop."""

    def __init__(self, iteration: Iteration, ctx: Context, local_blocks: LocalBlocks) -> None:
        self._iteration, self._ctx = iteration, ctx
        self._series = series = Series(iteration.series, iteration.steps, ctx)
        self._scalars = scalars = Scalars(iteration.scalars, ctx)
        plan = VisitPlan(iteration, ctx) if iteration.is_streamed else None
        self._local = local = LocalFields(
            ctx,
            local_blocks,
            iteration.fields if plan is None else plan.specs,
            iteration.constants,
            iteration.exchange,
            series.last,
            iteration.kwargs,
        )
        self._keeping = ValueKeeping(iteration, ctx, local.keywords)
        self.steps: FieldSteps | StreamedSteps
        if plan is None:
            self.steps = FieldSteps(iteration, ctx, local, scalars)
        else:
            self.steps = StreamedSteps(iteration, ctx, local, plan)
        self._values = values = FieldValues(ctx, local, scalars, series)
        self._frames = [
            Frames(spec, ctx, values.newest, iteration.steps, local, self.steps.current)
            for spec in iteration.frames
        ]
        self._files: list[CheckpointFiles] = []
        if iteration.checkpoint is not None:
            options = local.constant_arrays(), iteration.settings, series.kinds
            self._files.append(CheckpointFiles(iteration.checkpoint, ctx, values, *options))
        ctx.stores = [*self._frames, *self._files]  # frames before checkpoints

    def resume(self) -> int:
        """Load the newest checkpoint, and open the stores; return the first step."""
        ctx, steps = self._ctx, self._iteration.steps
        first = self._values.restore()
        for files in self._files:
            first = files.resume(first, steps)
        # Halos that no step updates: those of constants, and then of each older level.
        with_halo = [field for field in self._local.fields.values() if field.has_halo]
        for number in range(max((len(field.levels) for field in with_halo), default=0)):
            changing = [field for field in with_halo if number or field.spec.is_constant]
            halo_arrays = [field.levels[number] for field in changing if number < len(field.levels)]
            if halo_arrays:
                ctx.update_halo(*halo_arrays, copy=False)
        for frames in self._frames:
            frames.resume(first, steps)
        self.steps.first = first
        return first

    def callbacks(self) -> list[Callback]:
        """Return the callbacks in their order: frames before checkpoints."""
        iteration, until = self._iteration, self._iteration.until
        flush, callbacks = self._ctx.flush_stores, list[Callback]()
        if iteration.series:
            every = Period(*(spec.record.every for spec in iteration.series))
            callbacks.append(Callback(self._record, every, reads_halos=True))
        elif until is not None:
            every = Period(iteration.check_every)
            callbacks.append(Callback(self._ask_until, every, reads_halos=True))
        callbacks += (
            Callback(partial(store.write, flush=flush), store.schedule, store.reads_halos)
            for store in self._ctx.stores
        )
        if iteration.max_time is not None:
            callbacks.append(Callback(self._end, Period(iteration.max_time), runs_at_end=False))
        if self._ctx.checkpoints is not None:
            callbacks.append(Callback(self._save, Period(iteration.period), runs_at_end=False))
        return callbacks

    def results(self, step: int) -> tuple[Any, ...]:
        """Return the local blocks of all fields, and the numbers."""
        self._ctx.flush_stores()
        self._scalars.check()
        series = self._series.results().values()
        numbers = (*series, step) if self._iteration.returns_steps else ()
        return (*self._local.state, *self._scalars.values.values(), *numbers)

    # --- after some steps

    def _record(self, step: int) -> bool:
        iteration, steps = self._iteration, self.steps
        current = steps.current(self._series.names)
        self._series.record(step, lambda binding: current(binding, steps.block_box))
        if iteration.until is not None or iteration.reads_at:  # perhaps at.last
            self._series.combine()
        return self._ends(dict(self._series.last))

    def _ask_until(self, step: int) -> bool:
        """Return whether `until` ends the loop, for the numbers of the function."""
        numbers = self.steps.numbers
        if not numbers or any(number is None for number in numbers):
            raise BlockMismatchError(
                "expected numbers for until= from the function, got none. Return them, after the "
                "array if it returns one."
            )
        return self._ends(*map(self._ctx.allreduce, numbers))

    def _ends(self, *numbers: Any) -> bool:
        """Return whether `until` ends the loop on any rank: it may read a clock."""
        until = self._iteration.until
        return until is not None and bool(self._ctx.allreduce(bool(until(*numbers)), "any"))

    def _end(self, step: int) -> bool:
        for files in self._files:
            if files.step != step:
                files.write(step, self._ctx.flush_stores)
        return True

    def _save(self, step: int) -> None:
        if not self._keeping.check():
            self._ctx.flush_stores()  # a run that resumes here must find all frames
            self._values.save(step)


class FieldSteps:
    """Steps of the fields of one rank.

    After some steps, a *cycle*, each time level is in the same memory again. So the arrays of a
    call are found once for each position in the cycle.
    """

    def __init__(
        self, iteration: Iteration, ctx: Context, local: LocalFields, scalars: Scalars
    ) -> None:
        self._iteration, self._ctx, self._local, self._scalars = iteration, ctx, local, scalars
        self._fields = local.fields
        self.block_box = next(iter(self._fields.values())).layout.local_box
        self.cycle = lcm(SLOTS, *(len(field.levels) + 1 for field in self._fields.values()))
        self._checks = StepChecks(iteration, ctx, local)
        self._overlap = Overlap(iteration, ctx.device, self.block_box)
        ctx.replays_steps = iteration.capture is True
        self._replays = Replays(iteration, ctx)
        self._may_replay = iteration.capture is not False and isinstance(ctx.device, Gpu)
        self._graph: Captured | None = None
        is_asked = iteration.until is not None and not iteration.series
        #: Steps between those whose numbers `until` reads; 0: it reads none.
        self._numbers_every = iteration.check_every if is_asked else 0
        self.numbers: Sequence[Any] = ()  # of the last function of the newest step
        self.first = 0  # the first step of this attempt
        self._stale = {
            name
            for name, field in self._fields.items()
            if field.has_halo and not field.spec.is_constant
        }
        self._changed: list[list[str]] = []  # by phase: names of the fields that it changes
        self._calls: dict[tuple[int, int], Call] = {}  # by position in the cycle, and phase
        # Calls have it. As a method it would make a cycle, which keeps the fields in memory.
        self._arguments = local.arguments(ctx.step_for, scalars.values)

    def make(self, step: int, loop: Loop) -> int:
        """Make a step, or replay a cycle of them; return their number."""
        if self._may_replay and self._replay(step, loop):
            return self.cycle
        if not self._changed:
            self._make_first()
            return 1
        position, returned = (step - self.first) % self.cycle, NOTHING
        is_asked = self._numbers_every and not (step + 1) % self._numbers_every
        for number in range(len(self._changed)):
            call = self._calls.get((position, number)) or self._add_call(position, number)
            exchange, halo_arrays = call.exchange, call.halo_arrays
            if not call.reads <= self._stale:  # a record has read some of them since
                halo_arrays = self._take_stale(call.phase.binding.names)
                exchange = self._ctx.halo_exchange(halo_arrays) if halo_arrays else None
            self._stale -= call.reads
            # Numbers for `until` are those of a whole local block.
            is_overlapped = call.is_overlapped and not is_asked
            if exchange is not None:
                pending = exchange.begin(halo_arrays, is_overlapped)
                if not is_overlapped:
                    pending.wait()
            if exchange is not None and is_overlapped:
                returned = call.apply_parts(exchange.boxes, pending)
            elif call.is_settled:
                returned = call.apply(self.block_box)
            else:
                returned = self._apply_checked(call, step, bool(is_asked))
            for field in call.changed_fields:
                field.rotate()
            self._stale |= call.outdated
            if returned.scalars:
                self._scalars.update(returned.scalars)
        self.numbers = returned.numbers
        return 1

    def _add_call(self, position: int, number: int) -> Call:
        phase, fields = self._iteration.phases[number], self._fields
        reads = frozenset(self._stale_before(number) & phase.binding.names)
        halo_arrays = [field.newest for name, field in fields.items() if name in reads]
        exchange = self._ctx.halo_exchange(halo_arrays) if halo_arrays else None
        call = self._calls[position, number] = Call(
            phase,
            self._changed[number],
            reads,
            halo_arrays,
            exchange,
            self._ctx.device,
            self._arguments,
            fields,
            self._scalars.values,
        )
        if self._overlap.is_checked(call):
            self._settle(call)
        return call

    def _apply_checked(self, call: Call, step: int, is_asked: bool) -> Returned:
        """Compute by a call that has yet to be checked, or whose overlap is not known."""
        overlap, checks = self._overlap, self._checks

        def apply() -> Returned:
            return call.apply(self.block_box)

        is_due = checks.are_due
        returned: Returned = checks.compare(call, self._arguments, apply) if is_due else apply()
        if not is_asked:
            is_due = overlap.is_due(call) and self._replays.is_worthwhile(step)
            if is_due or (overlap.is_wanted(call) and not overlap.is_checked(call)):
                overlap.check(call)
            self._settle(call)
        return returned

    def _settle(self, call: Call) -> None:
        call.is_overlapped = self._overlap.is_wanted(call) and self._overlap.is_checked(call)
        call.is_settled = call.is_overlapped or not self._checks.are_due  # for later steps

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

    def _take_stale(self, names: Collection[str]) -> list[HaloArray]:
        """Return the newest levels of these names whose halos are out of date; they are updated."""
        stale = [name for name in self._fields if name in self._stale and name in names]
        self._stale.difference_update(stale)
        return [self._fields[name].newest for name in stale]

    def _update_halos(self, names: Collection[str]) -> None:
        if halo_arrays := self._take_stale(names):
            self._ctx.update_halo(*halo_arrays, copy=False)

    def _rotate(self, changed: Sequence[str]) -> None:
        for name in changed:
            field = self._fields[name]
            field.rotate()
            if field.has_halo:
                self._stale.add(name)

    def current(self, names: Collection[str]) -> Callable[[Binding, Box], dict[str, Any]]:
        """Update the halos of some fields after a step; return a function of all their values."""
        # One message updates halos for the next step, too.
        self._update_halos(self._iteration.phases[0].binding.names.union(names))
        return self._local.arguments(self._local.newest_step, self._scalars.values)

    # --- the first step

    def _make_first(self) -> None:
        for phase in self._iteration.phases:
            self._update_halos(phase.binding.names)
            values = self._arguments(phase.binding, self.block_box)
            names, returned = self._checks.first_call(phase, values)
            self._changed.append(names)
            self._rotate(names)
            self._scalars.update(returned.scalars)
            self.numbers = returned.numbers
        self._scalars.check()

    # --- captured steps

    def _replay(self, step: int, loop: Loop) -> bool:
        """Replay a cycle of steps, if it is captured and nothing else is due in it."""
        second = self.first + self.cycle
        if step == second and step + 2 * self.cycle < self._iteration.steps:
            self._graph = self._capture(step, loop)
        if self._graph is not None and step == second + self.cycle:
            self._graph = self._graph if self._replays.is_right(self._graph) else None
        self._may_replay = step < second or self._graph is not None
        if self._graph is None or step < second + self.cycle or not self._is_free(step, loop):
            return False
        self._graph()
        self._stale = self._stale_before(0)
        return True

    def _is_free(self, step: int, loop: Loop) -> bool:
        return not (step - self.first) % self.cycle and loop.is_free(step, self.cycle)

    def _capture(self, step: int, loop: Loop) -> Captured | None:
        """Return a graph that replays a cycle of steps; None if the steps go on one by one."""
        later = range(step + self.cycle, self._iteration.steps, self.cycle)[:_CYCLES]
        if not self._replays.is_worthwhile(step):
            return None
        if not any(self._is_free(start, loop) for start in later):
            return None

        def steps() -> None:
            for position in range(self.cycle):
                for number in range(len(self._changed)):
                    call = self._calls.get((position, number)) or self._add_call(position, number)
                    self._overlap.enqueue(call)
                    self._rotate(call.changed)

        def restore() -> None:
            restore_order()
            self._stale = stale

        stale, restore_order = {*self._stale}, self._local.restoring()
        return self._replays.capture(self._calls.values(), self._local.levels, steps, restore)
