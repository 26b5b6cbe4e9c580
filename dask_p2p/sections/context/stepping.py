"""Steps of a rank's function, and saved state to resume from when a worker is lost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from operator import index
from types import CodeType
from typing import Any, Protocol

from dask_p2p.errors import InputError
from dask_p2p.sections.context.communicator import Communicator
from dask_p2p.sections.context.loop import Loop, SavedLoop, StateStore
from dask_p2p.sections.context.state import State, identities
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.gang.checkpoints import Checkpoints, Period, checked_period
from dask_p2p.sections.gang.worker import Progress, is_logged
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array


class StateFolder(Protocol):
    """The arguments of such a store: a `dask_p2p.Checkpoint` or `dask_p2p.Save`."""

    path: Any

    def of_state(self, ctx: Any, state: State, steps: int | None) -> StateStore:
        """Return the store of a rank's state, in a loop of a number of steps."""


class Stepping(Communicator):
    """The part of a context that counts steps and saves state."""

    def __init__(
        self,
        rank: int,
        size: int,  # number of ranks
        connections: Connections,  # connections to other ranks
        device: Host,  # device of the arrays
        checkpoints: Checkpoints | None,  # saved states; None: nothing is saved
    ) -> None:
        super().__init__(rank, size, connections, device)
        self._checkpoints = checkpoints
        self.progress = Progress(logs=rank == 0 and is_logged())
        self._has_steps = False  # whether `steps` was called
        self._stores: list[StateStore] = []  # of its state

    def state(self, **values: Any) -> State:
        """Return the state of a loop of steps: values that change from step to step.

        Parameters
        ----------
        **values
            Values by name, which become attributes: arrays, numbers, halo arrays of `with_halo`,
            `numpy.random.Generator` objects, and tuples, lists and dicts of these. The state has
            copies of the arrays, which may change their shapes. Leave out constants.

        Returns
        -------
        State
            Give it to `steps`. Read and change its attributes in the loop: ``s.u = s.u + 1`` and
            ``s.u += 1`` are the same.

        Raises
        ------
        InputError
            If a value is no such value, or has Python objects.
        UnsupportedArrayError
            If an array is masked.
        """
        return State(self.device, values)

    def steps(
        self,
        count: int | None,
        state: State | None = None,
        every: int | str | None = "30 s",
        save: StateFolder | Sequence[StateFolder] = (),
        checkpoint: StateFolder | None = None,
    ) -> Iterator[int]:
        """Count steps, and save the function's state from time to time.

        If a worker is lost, all ranks run again, and resume at the newest complete checkpoint. A
        function may have one such loop.

        Parameters
        ----------
        count : int or None
            Total number of steps; None if the function ends the loop.
        state : State, optional
            All values that a step needs from earlier steps, from `Context.state`. Before the first
            step they become those of the checkpoint. Ranks resume at the start without a state, or
            while a value of it has not changed on any rank. So do ranks whose loop carries other
            numbers or arrays in local variables, ``t += dt``.
        every : int, str or None
            Interval between checkpoints: a number of steps, a time, or None for no checkpoints. A
            checkpoint is kept on the rank's own worker and on another one.
        save : Save or sequence of Save, optional
            Zarr groups for frames of arrays and numbers of the state, by absolute paths. A thread
            writes a frame while the next steps run, one frame at a time. The name of a value in a
            list or dict has dots, ``fields.u``.
        checkpoint : Checkpoint, optional
            Folder of checkpoints in files, by an absolute path: a `dask_p2p.Checkpoint`. A later
            run resumes from the newest one. Arrays of the local block's shape are parts of one
            array, so that run may have another number of ranks. Numbers must be the same on all
            ranks. If other values differ between ranks, such as generators, as many must resume.

        Yields
        ------
        int
            The number of the step, from 0 or from the last checkpoint.

        Raises
        ------
        InputError
            If `count` is not a number of steps, `every` is not an interval, `state` is no state, or
            `save` has no frames. Also in a second loop. With `checkpoint` also without a state, for
            a folder of another program, and for numbers that differ between ranks.
        FileError
            If the folder of `checkpoint` cannot be written, or some workers do not see it.
        ConfigError
            If `checkpoint` is given, and Zarr is not installed.
        SectionError
            If the ranks made different calls.
        """
        last = _checked_count(count)
        if state is not None and not isinstance(state, State):
            raise InputError(
                f"state: expected values from ctx.state, got {type(state).__name__}. Write s = "
                f"ctx.state(u=u), give s to ctx.steps, and use s.u in the loop."
            )
        if self._has_steps:
            raise InputError(
                "expected one loop of ctx.steps, got a second one: a rank that resumes could not "
                "distinguish their states. Count the steps of both in one loop."
            )
        self._has_steps = True
        every = checked_period(every)
        stores = _checked_stores(save, checkpoint, state)
        if state is None or (every is None and not stores):
            return self._count(last)
        self._stores = [store.of_state(self, state, last) for store in stores]
        code = sys._getframe(1).f_code
        return self._count_with_state(last, state, Period(every), code)

    def loop(
        self,
        step: Callable[[State], Any],
        count: int,
        *,
        every: int | str | None = "30 s",
        save: StateFolder | Sequence[StateFolder] = (),
        checkpoint: StateFolder | None = None,
        **values: Any,
    ) -> State:
        """Call a function of a state many times, and save the state from time to time.

        The local variables of `step` end with it. So no value outlives a step but those of the
        state, which are saved: ``ctx.loop(step, 100, u=u, t=0.0)``.

        Parameters
        ----------
        step : callable
            Changes its argument, the state: ``s.u = s.u + 1; s.t += dt``. Returns nothing.
        count : int
            Total number of steps.
        every, save, checkpoint
            As for `steps`.
        **values
            As for `state`.

        Returns
        -------
        State
            The state after the last step.

        Raises
        ------
        InputError
            If `step` returns a value. Also as for `state` and `steps`.
        FileError, ConfigError, SectionError
            As for `steps`.
        """
        state = self.state(**values)
        for _ in self.steps(count, state, every, save, checkpoint):
            value = step(state)
            if value is not None:
                raise InputError(
                    f"step: expected a function that changes the state and returns nothing, got "
                    f"one that returns {type(value).__name__}. Write s.u = ... in it."
                )
        return state

    def _count(self, last: int | None) -> Iterator[int]:
        """Yield the numbers of steps, from the first one of this attempt."""
        step = self.progress.first
        loop = Loop(self, last, step)
        while not loop.is_over:
            yield step
            step += 1
            loop.advance(step)

    def _count_with_state(
        self,
        last: int | None,
        state: State,
        period: Period,
        code: CodeType,  # of the function with the loop
    ) -> Iterator[int]:
        saving = SavedLoop(self, state, self._stores)
        step = self.restore_state(state.load)
        for store in self._stores:  # the checkpoints before the frames
            step = store.resume(step, last)
        callbacks = saving.callbacks(step, period)
        loop = Loop(self, last, step, callbacks)
        first, frame = step, sys._getframe(1)  # that of a progress bar, perhaps
        before = identities(frame) if frame.f_code is code else {}
        del frame
        while not loop.is_over:
            yield step
            if step == first and before:
                saving.find_carried(sys._getframe(1), before)
            step += 1
            loop.advance(step)
        self.flush_stores()

    def flush_stores(self) -> None:
        """Complete the frames of `steps`. A collective call of all ranks."""
        for store in self._stores:
            store.flush()

    def close_stores(self) -> None:
        """End the threads that write frames."""
        for store in self._stores:
            store.close()

    def save_state(self, step: int, arrays: Sequence[Array]) -> None:
        """Save copies of arrays on this worker and on another one. A collective call."""
        if self._checkpoints is not None:
            self._checkpoints.save(step, arrays)

    def restore_state(self, load: Callable[[memoryview], None]) -> int:
        """Call `load` with the newest checkpoint; return its step, or 0 without one."""
        step, saved = (0, None) if self._checkpoints is None else self._checkpoints.read_state()
        if saved is not None:
            load(saved)
        self.progress.step = self.progress.first = step
        return step

    @property
    def has_checkpoints(self) -> bool:
        """True if states are saved in memory."""
        return self._checkpoints is not None


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
