"""The loop of a rank: it counts steps, and runs callbacks after some of them.

Records, frames, checkpoints and ends by a condition or a time are callbacks, each with a schedule.
A step without any of these costs one comparison.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from operator import index
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np
from distributed import warn

from dask_p2p.errors import InputError, P2PWarning
from dask_p2p.sections.context.state import State, carried_names, local_contents
from dask_p2p.sections.gang.checkpoints import Period, checked_period
from dask_p2p.sections.wire.connection import AttemptEndedError

logger = logging.getLogger(__name__)

_CHECKED_STEPS = 3  # at the start, that end with a check of the state's values
_CONSTANT = (
    "ctx.steps writes a state that had not changed after {} steps: {}. Change the state itself, "
    "s.u = ..., so that frames and checkpoints have its values."
)
_CARRIED = (
    "The loop of ctx.steps carries %s from step to step, outside of its state. After the loss of a "
    "worker its ranks begin at the start. A run that resumes from files has the first values. Give "
    "all values that a step needs to ctx.state."
)
_UNCHANGED = (
    "No state was saved after step %d: %s had not changed since the start. After the loss of a "
    "worker ranks begin at the start. Change the state itself, s.u = ...; put no constants in it."
)


class Callback(NamedTuple):
    """Work after some steps."""

    run: Callable[[int], bool | None]  # called with the number of steps done; True ends the loop
    schedule: Period
    reads_halos: bool = False  # whether it may exchange halos of the fields
    runs_at_end: bool = True  # whether it runs after the last step, too


class Loop:
    """The steps of one rank.

    A callback may end the loop: those behind it still run. Callbacks do not know the loop, as a
    cycle of references would keep the fields in memory.
    """

    def __init__(
        self,
        ctx: Any,
        steps: int | None,  # None: the caller ends the loop
        first: int,  # steps that were done before, such as those of a checkpoint
        callbacks: Sequence[Callback] = (),  # run after a step in their order, if they are due
    ) -> None:
        self._ctx, self._steps, self._callbacks = ctx, steps, callbacks
        self._greatest = partial(ctx.allreduce, op="max")
        progress = ctx.progress
        progress.steps = steps or 0
        progress.step = progress.first = first
        self.is_over = steps is not None and first >= steps
        self._next_step = self._next_step_after(first)

    def advance(self, step: int) -> None:
        """Count a step, and run the callbacks that are due after it."""
        ctx = self._ctx
        ctx.progress.advance(step)
        if ctx._connections.has_ended:  # which a step without exchanges does not notice
            raise AttemptEndedError("the attempt has ended")
        ctx.device.keep_up(step)
        self.is_over = step == self._steps
        if step >= self._next_step:
            for callback in self._callbacks:
                if not callback.schedule.is_due(step, self._greatest):
                    continue
                if (callback.runs_at_end or not self.is_over) and callback.run(step):
                    self.is_over = True
            self._next_step = self._next_step_after(step)

    def is_free(self, step: int, count: int) -> bool:
        """Return whether no callback is due among the next steps."""
        last = step + count
        if self._steps is not None and last >= self._steps:
            return False
        return all(
            callback.schedule.next_known_step(step) >= last + callback.reads_halos
            for callback in self._callbacks
        )

    def free_steps(self, step: int) -> int:
        """Return the number of steps until a callback is known to be due, or the loop ends."""
        assert self._steps is not None, "the caller does not end the loop"
        due_steps = (callback.schedule.next_known_step(step) for callback in self._callbacks)
        return int(min(self._steps, *due_steps, inf)) - step

    def _next_step_after(self, step: int) -> float:
        return min((callback.schedule.next_step(step) for callback in self._callbacks), default=inf)


# The loop of `Context.steps`, and its state.


def begin_steps(
    ctx: Any,
    count: int | None,
    state: State | None,
    every: int | str | None,
    save: Any,
    checkpoint: Any,
    code: CodeType,  # of the function with the loop
) -> Iterator[int]:
    """Return the numbers of the steps: see `Context.steps`."""
    last = _checked_count(count)
    if state is not None and not isinstance(state, State):
        raise InputError(
            f"state: expected values from ctx.state, got {type(state).__name__}. Write s = "
            f"ctx.state(u=u), give s to ctx.steps, and use s.u in the loop."
        )
    if ctx._has_steps:
        raise InputError(
            "expected one loop of ctx.steps, got a second one: a rank that resumes could not "
            "distinguish their states. Count the steps of both in one loop."
        )
    ctx._has_steps = True
    every = checked_period(every)
    stores = _checked_stores(save, checkpoint, state)
    if state is None or (every is None and not stores):
        return _count_steps(ctx, last)
    ctx.stores = [store.of_state(ctx, state, last) for store in stores]
    return _count_steps_of_state(ctx, last, state, Period(every), code)


def _count_steps(ctx: Any, last: int | None) -> Iterator[int]:
    step = ctx.progress.first
    loop = Loop(ctx, last, step)
    while not loop.is_over:
        yield step
        step += 1
        loop.advance(step)


def _count_steps_of_state(
    ctx: Any,
    last: int | None,
    state: State,
    period: Period,
    code: CodeType,  # of the function with the loop
) -> Iterator[int]:
    saving = SavedLoop(ctx, state)
    step = ctx.restore_state(state.load)
    for store in ctx.stores:  # the checkpoints before the frames
        step = store.resume(step, last)
    callbacks = saving.callbacks(period)
    loop = Loop(ctx, last, step, callbacks)
    first = step
    saving.watch_variables(code)
    while not loop.is_over:
        yield step
        if step == first:
            saving.find_carried()
        step += 1
        loop.advance(step)
        if step <= first + _CHECKED_STEPS:
            state.check()
    ctx.flush_stores()


def _checked_count(count: Any) -> int | None:
    try:
        return None if count is None else index(count)
    except TypeError:
        raise InputError(
            f"expected a number of steps, or None, got {count=}. Give an integer: "
            f"ctx.steps(100, s)."
        ) from None


def _checked_stores(save: Any, checkpoint: Any, state: State | None) -> list[StateFolder]:
    stores = [*save] if isinstance(save, Sequence) else [save]
    for store in stores:
        if not hasattr(store, "of_state"):
            raise InputError(
                f"save: expected a dask_p2p.Save, or a sequence of these, got "
                f"{type(store).__name__}. Give arrays to ctx.state, and the state to ctx.steps."
            )
    if checkpoint is not None and (state is None or not hasattr(checkpoint, "of_state")):
        raise InputError(
            f"checkpoint: expected a dask_p2p.Checkpoint, and a state, got {checkpoint!r:.80} "
            f"and {state}. Give ctx.steps(n, s, checkpoint=Checkpoint('/folder'))."
        )
    if stores and state is None:
        raise InputError("save: expected a state to save, got none. Give ctx.state(u=u).")
    all_stores = [*stores] if checkpoint is None else [checkpoint, *stores]
    if len({str(store.path) for store in all_stores}) < len(all_stores):
        raise InputError("expected another path for each store, got one twice. Rename it.")
    return all_stores


class StateFolder(Protocol):
    """The arguments of such a store: a `dask_p2p.Checkpoint` or `dask_p2p.Save`."""

    path: Any

    def of_state(self, ctx: Any, state: State, steps: int | None) -> StateStore:
        """Return the store of a rank's state, in a loop of a number of steps."""


class StateStore(Protocol):
    """Checkpoints in files of a state, or frames with its values."""

    schedule: Period
    reads_halos: bool  # whether it may exchange halos of the fields
    is_resumed: bool  # whether later attempts begin with its values

    def resume(self, first: int, steps: int | None) -> int:
        """Load a checkpoint that is newer than a step, or open frames; return the first step."""

    def write(self, step: int, flush: Callable[[], None]) -> None:
        """Write the values after a step, or begin to; `flush` completes all earlier frames."""

    def flush(self) -> None:
        """Complete all that was begun. A collective call of all ranks."""

    def close(self) -> None:
        """End the thread that writes."""


class SavedLoop:
    """The state of a loop of steps, which is saved after some of them.

    A checkpoint with a value that has not changed might be wrong: ``u = u + 1`` binds the name `u`
    to another array than the state has. Without one, ranks resume at the start, which always is
    right.
    """

    def __init__(self, ctx: Any, state: State) -> None:
        self._ctx, self._state = ctx, state
        # Before a checkpoint replaces the values; a pass over memory, in vain if none is saved.
        self._sums = state.checksums() if ctx.stores or ctx.checkpoints else {}
        self._count = len(state.leaves())
        self._checked_step = -1  # the step whose values `_unchanged` has compared
        self._carried: list[str] = []  # variables of the loop that the state does not have
        self._has_warned = False
        self._before: dict[str, tuple[int, bytes]] = {}  # variables at the start

    def callbacks(self, period: Period) -> list[Callback]:
        """Return the callbacks in their order: frames before checkpoints."""
        stores = reversed(self._ctx.stores)
        callbacks = [Callback(partial(self._write, store), store.schedule) for store in stores]
        if self._ctx.checkpoints is not None:
            callbacks.append(Callback(self._save, period, runs_at_end=False))
        return callbacks

    def watch_variables(self, code: CodeType) -> None:
        """Keep the contents of local variables at the start, if ranks may resume."""
        self._code, stores = code, self._ctx.stores
        if self._ctx.checkpoints is not None or any(store.is_resumed for store in stores):
            self._before = local_contents(self._state, self._frame())

    def find_carried(self) -> bool:
        """Return whether the loop of this rank carries values outside of its state, so far."""
        if self._before and not self._carried:
            self._carried = carried_names(self._state, self._frame(), self._before)
            if self._carried and self._ctx.rank == 0:
                logger.warning(_CARRIED, ", ".join(self._carried))
        return bool(self._carried)

    def _frame(self) -> FrameType | None:
        """Return the frame of the loop, which may be that of a progress bar's caller."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        return frame

    def _unchanged(self, step: int) -> list[str]:
        """Return the names of values that have not changed on any rank. A collective call."""
        if step > self._checked_step:
            self._checked_step = step
            self._state.check()
            if self._sums:
                sums = self._state.checksums()
                pairs = [(sums[name], first) for name, first in self._sums.items()]
                # 0: no elements, which is no change; 1: unchanged; 2: changed.
                changes = [
                    0 if pair == (None, None) else 1 + (pair[0] != pair[1]) for pair in pairs
                ]
                most = self._ctx.allreduce(np.array(changes), "max")
                items = zip(self._sums.items(), most, strict=True)
                self._sums = {name: first for (name, first), change in items if change == 1}
        return [*self._sums]

    def _write(self, store: StateStore, step: int) -> None:
        unchanged = self._unchanged(step)
        if len(unchanged) == self._count and self._ctx.rank == 0 and not self._has_warned:
            warn(_CONSTANT.format(step, ", ".join(unchanged)), P2PWarning)
            self._has_warned = True
        if store.is_resumed:
            self.find_carried()
        store.write(step, self._ctx.flush_stores)

    def _save(self, step: int) -> None:
        unchanged = self._unchanged(step)
        if unchanged and self._ctx.rank == 0:
            logger.warning(_UNCHANGED, step, ", ".join(unchanged))
        if not unchanged and not self._ctx.allreduce(self.find_carried(), "any"):
            self._ctx.flush_stores()  # a run that resumes here must find all frames
            self._ctx.checkpoints.save(step, self._state.arrays())
