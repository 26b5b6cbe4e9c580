"""Steps of a rank's function, and saved state to resume from when a worker is lost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import count as numbers_from
from operator import index
from typing import Any, Protocol

from dask_p2p.errors import InputError
from dask_p2p.geometry import Box
from dask_p2p.inputs import as_integer
from dask_p2p.plans.ranks import RankGrid, divided_alike
from dask_p2p.sections.context.communicator import Communicator
from dask_p2p.sections.context.grids import Grid, LocalPoints
from dask_p2p.sections.context.state import Bindings, State, carried_values
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.redistribution import Partitions, checked_shape
from dask_p2p.sections.gang.checkpoints import Checkpoints, Period, checked_period
from dask_p2p.sections.gang.worker import Progress, is_logged
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array, DepthLike


class Places(Communicator):
    """The part of a context that names the place of its rank."""

    grid: tuple[int, ...]
    box: Box
    _ranks: RankGrid
    _partitions: Partitions
    _grids: dict[RankGrid, Grid]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the section's arrays."""
        return self._partitions.shape

    @property
    def index(self) -> tuple[Array, ...]:
        """Indices of the local block's elements in the whole array, as by `numpy.ogrid`."""
        return self.grid_of().index

    @property
    def hosts(self) -> tuple[int, ...]:
        """Number of the host of each rank, from 0."""
        return self._places[0]

    @property
    def local_rank(self) -> int:
        """Number of this rank among the ranks of its host, from 0."""
        return self._places[1]

    @property
    def shares_process(self) -> bool:
        """True if other ranks run in threads of this rank's process."""
        return self._connections.has_company

    @cached_property
    def _places(self) -> tuple[tuple[int, ...], int]:
        names = self._connections.hosts
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        hosts = tuple(numbers[name] for name in names)
        return hosts, hosts[: self.rank].count(hosts[self.rank])

    def grid_of(
        self, shape: Sequence[int] | None = None, partition: Sequence[int] | None = None
    ) -> Grid:
        """Return the division of an array of another shape between the ranks.

        Parameters
        ----------
        shape : sequence of int, optional
            Shape of the whole array. By default that of the section's arrays.
        partition : sequence of int, optional
            Axes that may be divided, as for `redistribute`. By default the axes that are divided in
            the section's arrays, or axis 0 if the array has none of them.

        Returns
        -------
        Grid
            The position of the local block, halos, coarser grids. Later calls return the same.

        Raises
        ------
        InputError
            If the array has no such axes.
            Also if `shape` is no shape.
        """
        whole = self.shape if shape is None else checked_shape(shape)
        if partition is None and whole:
            ranks = divided_alike(self._ranks, whole)
        else:
            ranks = self._partitions.ranks(partition, whole)
        if ranks not in self._grids:
            self._grids[ranks] = Grid(self, ranks)
        return self._grids[ranks]

    def pad(self, a: Any, depth: DepthLike, boundary: Any = "none") -> Any:
        """Return local blocks with a halo: `numpy.pad` of the whole array.

        This is `Grid.pad` for arrays of the section's shape, with the same parameters and errors.
        `with_halo` and `update_halo` do the same without a copy.
        """
        return self.grid_of().pad(a, depth, boundary)

    def points(self, xy: Any, weights: str = "linear") -> LocalPoints:
        """Return points of the whole array, such as sources and receivers.

        This is `Grid.points` for the section's arrays, with the same parameters and errors.
        """
        return self.grid_of().points(xy, weights)

    def along(self, axis: int) -> Communicator:
        """Return the communicator of the ranks in this rank's line along an axis of the grid.

        Only the ranks of one line have to call it, and only they exchange messages.

        Parameters
        ----------
        axis : int
            Axis of the section's arrays.

        Returns
        -------
        Communicator
            ``rank`` is the position in the line.

        Raises
        ------
        InputError
            If the arrays have no such axis.
        """
        ndim = len(self.grid)
        given = as_integer(axis, ndim)
        if given not in range(-ndim, ndim):
            raise InputError(
                f"axis: expected an axis of {ndim} dimensions, got {axis!r}. Give an integer, such "
                f"as ctx.along(0)."
            )
        axis = given % ndim
        own = self._ranks.indices[self.rank]
        line = [(*own[:axis], at, *own[axis + 1 :]) for at in range(self.grid[axis])]
        number = "-".join(map(str, (*own[:axis], *own[axis + 1 :])))
        return self._group([*map(self._ranks.rank, line)], f"along({axis}), line {number}")

    def box_of(
        self, partition: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Box:
        """Return the `box` of this rank for another partition: see `redistribute`."""
        return self._partitions.ranks(partition, shape).box(self.rank)


# Number of steps at the start that end with a check of the state and of the function's variables.
_CHECKED_STEPS = 3


class StateStore(Protocol):
    """Checkpoints in files of a state, or frames with its values."""

    def resumed(self, first: int, steps: int | None) -> int:
        """Load a checkpoint that is newer than a step, or open frames; return the first step."""

    def is_due(self, step: int) -> bool:
        """Return whether `write` is due after a step: the same on all ranks."""

    def write(self, step: int, flush: Callable[[], None]) -> None:
        """Write the values after a step, or begin to; `flush` completes all earlier frames."""

    def flush(self) -> None:
        """Complete all that was begun. A collective call of all ranks."""

    def close(self) -> None:
        """End the thread that writes."""


class StateFolder(Protocol):
    """The arguments of such a store: a `dask_p2p.Checkpoint` or `dask_p2p.Save`."""

    path: Any

    def of_state(self, ctx: Any, state: State, steps: int | None) -> StateStore:
        """Return the store of a rank's state, in a loop of a number of steps."""


class Stepping(Places):
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
        self._saved_step = -1  # of the last checkpoint
        self._restored: list[tuple[object, ...]] | None = None  # shapes and dtypes of `restore`
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
        save: Any = (),
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
            if a value of it has not changed on any rank since the start. So do ranks whose loop
            carries other numbers or arrays in local variables, ``t += dt``.
        every : int, str or None
            Interval between checkpoints: a number of steps, a time, or None for no checkpoints. A
            checkpoint is kept on the rank's own worker and on another one.
        save : Save, or sequence of Save or array, optional
            Zarr groups for frames of arrays and numbers of the state, by absolute paths. A thread
            writes a frame while the next steps run, one frame at a time. The name of a value in a
            list or dict has dots, ``fields.u``. Or arrays in the place of a state, which each step
            changes in place, ``x[...] = ...``.
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
            `save` is no sequence of writable arrays. Also in a second loop. In a step, if a
            variable was an array of the state before the loop, and is another array now that the
            state does not have. With `checkpoint` also without a state, for a folder of another
            program, and for numbers that differ between ranks.
        FileError
            If the folder of `checkpoint` cannot be written, or some workers do not see it.
        MissingPackageError
            If `checkpoint` is given, and Zarr is not installed.
        SectionError
            If the ranks made different calls.
        """
        last = _checked_count(count)
        given = _listed(save)
        stores = [each for each in given if hasattr(each, "of_state")]
        saved = tuple(each for each in given if not hasattr(each, "of_state"))
        state = self._checked_state(state, saved)
        if self._has_steps:
            raise InputError(
                "expected one loop of ctx.steps, got a second one: a rank that resumes could not "
                "distinguish their states. Count the steps of both in one loop."
            )
        self._has_steps = True
        every = checked_period(every)
        stores = _checked_stores(stores, checkpoint, state)
        if state is None or (every is None and not stores):
            return self._counted(last)
        period, bindings = Period(every), Bindings(state, sys._getframe(1))
        self._stores = [each.of_state(self, state, last) for each in stores]
        return self._counted(last, state, period, bindings)

    def _checked_state(self, state: Any, saved: Sequence[Any]) -> State | None:
        """Return the state of a loop, given as such or as arrays to save."""
        if state is not None and not isinstance(state, State):
            raise InputError(
                f"state: expected values from ctx.state, got {type(state).__name__}. Write s = "
                f"ctx.state(u=u), give s to ctx.steps, and use s.u in the loop."
            )
        if not saved:
            return state
        if state is not None:
            raise InputError("expected a state or save, got both. Give ctx.state all arrays.")
        return State.of_arrays(self.device, saved, "save[{}]")

    def _counted(
        self,
        last: int | None,
        state: State | None = None,
        period: Period | None = None,
        bindings: Bindings | None = None,
    ) -> Iterator[int]:
        self.progress.steps = last or 0
        first = 0 if state is None else self._loaded(state)
        for store in self._stores:  # the checkpoints before the frames
            first = self.progress.step = self.progress.first = store.resumed(first, last)
        for step in numbers_from(first) if last is None else range(first, last):
            yield step
            self.progress.advance(step + 1)
            self.device.keep_up(step + 1)
            if state is None or period is None or bindings is None:
                continue
            if step == first:
                state.outside = carried_values(state, bindings.code, sys._getframe(1))
            is_due = step + 1 != last and self.is_due(period, step + 1)
            due = [store for store in self._stores if store.is_due(step + 1)]
            if is_due or due or step - first < _CHECKED_STEPS:
                state.check()
                bindings.check(sys._getframe(1))
            for store in reversed(due):  # frames before checkpoints
                store.write(step + 1, self.flush_stores)
            if is_due and self._checkpoints is not None:
                self.flush_stores()  # a run that resumes here must find all frames
                self._checkpoints.save(step + 1, state.arrays())
        self.flush_stores()

    def flush_stores(self) -> None:
        """Complete the frames of `steps`. A collective call of all ranks."""
        for store in self._stores:
            store.flush()

    def close_stores(self) -> None:
        """End the threads that write frames."""
        for store in self._stores:
            store.close()

    def _loaded(self, state: State, may_stay: bool = False) -> int:
        """Take over the state of the last checkpoint; return its step, or 0 without one.

        With `may_stay` the values need not have changed.
        """
        checkpoints = self._checkpoints
        step, saved = (0, None) if checkpoints is None else checkpoints.found()
        if saved is not None and checkpoints is not None:
            if may_stay or checkpoints.is_in_use(step, state.changes(saved), state.name):
                state.load(saved)
            else:
                step = 0
        self.progress.step = self.progress.first = step
        return step

    def is_due(self, period: Period, step: int) -> bool:
        """Return whether a checkpoint is due after a step: the same on all ranks."""
        return self._checkpoints is not None and self.has_ended(period, step)

    def has_ended(self, period: Period, step: int) -> bool:
        """Return whether a period has ended after a step: the same on all ranks."""
        return period.is_due(step, lambda values: self.allreduce(values, "max"))

    def checkpoint(self, step: int, *arrays: Array) -> None:
        """Save copies of arrays: the state to resume from after a step.

        Parameters
        ----------
        step : int
            Number of steps done: more than at the last checkpoint.
        *arrays
            The state, as the same number of arrays on all ranks. Copies are kept on this worker
            and on another one.

        Raises
        ------
        InputError
            If `step` is not such a number, an array is read-only, or the arrays have other shapes
            or dtypes than those given to `restore`.
        SectionError
            If the ranks made different calls.
        """
        number = as_integer(step, -1)
        if number <= self._saved_step:
            more = f", more than {self._saved_step} at the last checkpoint"
            raise InputError(
                f"step: expected the number of steps done"
                f"{more if self._saved_step >= 0 else ''}, got {step!r}."
            )
        state = State.of_arrays(self.device, arrays, "array {}")
        given = [(array.shape, array.dtype) for array in arrays]
        if self._restored not in (None, given):
            raise InputError(
                f"expected arrays of the shapes and dtypes that ctx.restore filled, "
                f"{self._restored}, got {given}. Give both the same arrays in the same order."
            )
        if self._checkpoints is not None:
            self._checkpoints.save(number, state.arrays())
        self._saved_step = number

    def restore(self, *arrays: Array) -> int:
        """Fill arrays with the last checkpoint of all ranks, if there is one.

        Returns
        -------
        int
            The number of steps at that checkpoint; 0 without one, and in a second call. Also 0,
            and the arrays stay unchanged, if one of them had not changed since the start on any
            rank: a constant, or an array that the function no longer uses.

        Raises
        ------
        InputError
            If a value is not a writable array.
        SectionError
            If the ranks made different calls.
        """
        return self.restore_state(arrays)

    def restore_state(self, arrays: Sequence[Array], may_stay: bool = False) -> int:
        """Fill arrays as `restore` does. With `may_stay` they need not have changed."""
        state = State.of_arrays(self.device, arrays, "array {}")
        self._restored = [(array.shape, array.dtype) for array in arrays]
        step = self._loaded(state, may_stay)
        self._saved_step = max(self._saved_step, step or -1)
        return step


def _checked_count(count: Any) -> int | None:
    try:
        return None if count is None else index(count)
    except TypeError:
        raise InputError(
            f"expected a number of steps, or None, got {count=}. Give an integer: "
            f"ctx.steps(100, s)."
        ) from None


def _checked_stores(
    stores: Sequence[StateFolder], checkpoint: Any, state: State | None
) -> list[StateFolder]:
    """Return the stores of a state: its checkpoints, and those of frames."""
    if checkpoint is not None and (state is None or not hasattr(checkpoint, "of_state")):
        raise InputError(
            f"checkpoint: expected a dask_p2p.Checkpoint, and a state, got {checkpoint!r:.80} "
            f"and {state}. Give ctx.steps(n, s, checkpoint=Checkpoint('/folder'))."
        )
    if stores and state is None:
        raise InputError("save: expected a state to save, got none. Give ctx.state(u=u).")
    all_stores = [*stores] if checkpoint is None else [checkpoint, *stores]
    if len({str(each.path) for each in all_stores}) < len(all_stores):
        raise InputError("expected another path for each store, got one twice. Rename it.")
    return all_stores


def _listed(save: Any) -> Sequence[Any]:
    return tuple(save) if isinstance(save, Iterable) else (save,)
