"""The context that the function of a gang receives in addition to its arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from types import NoneType
from typing import Any

from dask_p2p.errors import InputError
from dask_p2p.geometry import Box
from dask_p2p.inputs import as_integer, checked_flag
from dask_p2p.plans.ranks import RankGrid, distribute_alike
from dask_p2p.sections.context.communicator import Communicator
from dask_p2p.sections.context.grids import Grid, LocalPoints
from dask_p2p.sections.context.loop import StateFolder, StateStore, begin_steps
from dask_p2p.sections.context.state import State
from dask_p2p.sections.context.transforms import Transforms
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.exchange.halo import HaloArray, HaloCopies, HaloExchange, Pending
from dask_p2p.sections.exchange.redistribution import Partitions
from dask_p2p.sections.gang.checkpoints import Checkpoints
from dask_p2p.sections.gang.worker import Progress
from dask_p2p.sections.wire.connections import ONE_RANK, Connections
from dask_p2p.types import Array, BoundaryLike, DepthLike, DTypeLike


class Context(Communicator, Transforms):
    """One rank among the ranks that run a function at the same time.

    With CuPy blocks, the rank's own stream is the current one while the function runs. Methods
    enqueue their work on that stream, too, so the function need not wait for the GPU.

    All ranks must call the same methods in the same order. Otherwise all raise a `SectionError`
    that names both calls. Only ranks that all wait for a message go on waiting: after
    `p2p.timeouts.request` the log names them and their calls. One thread at a time calls methods.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    grid : tuple of int
        Number of ranks along each axis.
    box : tuple of tuple of int
        Position of the local block in the whole array: (start, stop) of each axis.

    See Also
    --------
    dask_p2p.spmd : Run a function with a context.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_p2p import spmd
    >>> def centred(ctx, x):
    ...     return x - ctx.allreduce(x.sum()) / ctx.shape[0]
    >>> y = spmd(centred, da.arange(4.0, chunks=2))
    >>> y.compute(scheduler="sync")
    array([-1.5, -0.5,  0.5,  1.5])
    """

    def __init__(
        self,
        ranks: RankGrid,  # decomposition of the array
        rank: int = 0,  # this rank
        connections: Connections = ONE_RANK,  # connections to the other ranks
        checkpoints: Checkpoints | None = None,  # copies of its states on workers
        reads_memory: bool = True,  # whether ranks of one host may read each other's memory
        device: Host = HOST,  # of its local blocks
    ) -> None:
        self._partitions = Partitions(ranks, rank, connections, reads_memory, device)
        super().__init__(rank, ranks.size, connections, device, self._partitions, reads_memory)
        self.grid = ranks.grid
        self.box: Box = ranks.box(rank)
        self._ranks = ranks
        self.replays_steps = False  # whether steps are captured, and all have the same number
        self._grids: dict[RankGrid, Grid] = {}
        self._halo_arrays = 0  # calls of `with_halo` so far
        self.halo_copies = HaloCopies()  # returned by `update_halo`
        self.checkpoints = checkpoints
        self.progress = Progress(logs=rank == 0)
        self._has_steps = False  # whether `steps` was called
        self.stores: Sequence[StateStore] = ()  # of the values of its loop

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
        global_shape = self._partitions.shape_of(shape)
        if partition is None and global_shape:
            ranks = distribute_alike(self._ranks, global_shape)
        else:
            ranks = self._partitions.ranks(partition, global_shape)
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
        position = as_integer(axis, ndim)
        if position not in range(-ndim, ndim):
            raise InputError(
                f"axis: expected an axis of {ndim} dimensions, got {axis!r}. Give an integer, such "
                f"as ctx.along(0)."
            )
        axis = position % ndim
        indices = self._ranks.indices[self.rank]
        line = [(*indices[:axis], at, *indices[axis + 1 :]) for at in range(self.grid[axis])]
        number = "-".join(map(str, (*indices[:axis], *indices[axis + 1 :])))
        return self._group([*map(self._ranks.rank, line)], f"along({axis}), line {number}")

    def with_halo(
        self,
        local: Array | None = None,
        depth: DepthLike = 1,
        boundary: BoundaryLike = "none",
        corners: bool = True,
        dtype: DTypeLike | None = None,
        exchange: str = "auto",
        grid: Grid | None = None,
    ) -> HaloArray:
        """Return a halo array: memory for this rank's local block with a halo around it.

        Parameters
        ----------
        local : array, optional
            The local block to copy into it: a NumPy or CuPy array, like the section's arrays. By
            default all elements are zero.
        depth : int, tuple or dict, optional
            Width of the halo, as for `dask_p2p.map_overlap`. By default 1.
        boundary : str, scalar, tuple or dict, optional
            Values beyond the ends of the array, as for `dask_p2p.map_overlap`. By default "none".
            A pair for an axis, ``{0: ("nearest", 0.0)}``, has the values before and after it.
            "odd" is the mirror image with the opposite sign. A function ``f(rim, inside, at)``
            fills `rim` in place, from its mirror image `inside` and the position `at`, as in
            `dask_p2p.iterate`.
        corners : bool, optional
            If True, the default, the halo includes corners. A stencil that reads neighbours along
            one axis at a time does not need corners. With False they are not exchanged, and are NaN
            if the dtype has NaN.
        dtype : dtype, optional
            By default that of `local`, or float64.
        exchange : {"auto", "diagonal", "left-right", "pairwise"}, optional
            Order of messages in `update_halo`: see `redistribute`.
        grid : Grid, optional
            Division of the array, from `grid_of`. By default that of the section's arrays.

        Returns
        -------
        HaloArray
            ``data`` is the local block with its halo, and ``inner`` the local block in it. Call
            `update_halo` to fill the halo.

        Raises
        ------
        InputError
            If `depth`, `boundary` or `exchange` is invalid, `local` has another shape or a dtype
            that cannot become `dtype`, or the dtype holds Python objects.
        """
        if not isinstance(grid, (Grid, NoneType)):
            raise InputError(
                f"grid: expected a grid of ctx.grid_of(shape), got {type(grid).__name__}. Leave it "
                f"out for the section's arrays."
            )
        at = Grid(self, self._ranks) if grid is None else grid
        call = f"update_halo() of halo array {self._halo_arrays}"
        self._halo_arrays += 1
        return at.halo_array(call, local, depth, boundary, corners, dtype, exchange)

    def step_for(self, name: str) -> int:
        """Return the number of the step, from 0; `name` is that of the value in errors."""
        if self.replays_steps:
            raise InputError(
                f"{name}: expected a function that does the same in each step, because of "
                f"capture=True. Leave out capture=True."
            )
        return self.progress.step

    def update_halo(self, *halo_arrays: HaloArray, copy: bool = True) -> Any:
        """Fill halos from the local blocks of all ranks; return the local blocks with their halos.

        On a GPU the exchange is enqueued on the rank's stream. The call waits for the GPU only if
        parts of a halo are sent as messages.

        Parameters
        ----------
        *halo_arrays : HaloArray
            Halo arrays from `with_halo`. Arrays of one call share one message to each neighbour.
        copy : bool, optional
            If True, return copies, which do not change when the halo is filled again. False
            returns `halo_array.data` itself, and saves the time of the copy.

        Returns
        -------
        numpy.ndarray or cupy.ndarray, or tuple of them
            The local block with its halo; for several arrays a tuple.

        Raises
        ------
        InputError
            If an argument is not from `with_halo`, or is given twice. Also if the function wrote
            its results into the copy and left the local block unchanged.
        SectionError
            If the ranks made different calls, or their halos differ.
        """
        return self._begin(halo_arrays, copy, in_background=False).wait()

    def update_halo_begin(self, *halo_arrays: HaloArray, copy: bool = True) -> Pending:
        """Begin to fill halos, and return the exchange in flight.

        The function may compute ``halo_array.interior`` immediately, and the parts in
        ``halo_array.boundary_parts`` after ``wait()``. The next call that exchanges data first
        completes the exchanges in flight. Other ranks receive the local block as it is at this
        call, even if the function writes into it later.

        Parameters
        ----------
        *halo_arrays : HaloArray
            Halo arrays from `with_halo`. Arrays of one call share one message to each neighbour.
        copy : bool, optional
            If True, ``wait()`` returns copies, as `update_halo` does; if False, `halo_array.data`.

        Returns
        -------
        Pending
            The exchange. Its ``wait()`` completes it, and returns the local block with its halo;
            for several arrays a tuple.

        Raises
        ------
        InputError
            If one of these halos is in flight already; otherwise as `update_halo`.
        SectionError
            If the ranks made different calls, or their halos differ.
        """
        return self._begin(halo_arrays, copy, in_background=True)

    def _begin(self, halo_arrays: Sequence[HaloArray], copy: bool, in_background: bool) -> Pending:
        copy = checked_flag("copy", copy)
        exchange = self.halo_exchange(halo_arrays)
        for halo_array in halo_arrays:
            if halo_array.first_copy is not None:
                halo_array.first_copy.check()
        return exchange.begin(halo_arrays, in_background, self.halo_copies.copy if copy else None)

    def halo_exchange(
        self, halo_arrays: Sequence[HaloArray], is_wide: bool = False
    ) -> HaloExchange:
        """Return the exchange that fills the halos of some arrays; later calls return the same."""
        reads_memory = self._reads_memory if is_wide else None
        return HaloExchange.for_arrays(halo_arrays, self._connections, reads_memory)

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
            values in local variables, ``t += dt`` or ``series.append(t)``, and the log names them.
            A large array that is changed in place, and read only inside the loop, is taken for
            scratch memory. Give it to the state if its values are those of an earlier step.
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
        code = sys._getframe(1).f_code  # of the function with the loop
        return begin_steps(self, count, state, every, save, checkpoint, code)

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

    def flush_stores(self) -> None:
        """Complete all frames. A collective call of all ranks."""
        for store in self.stores:
            store.flush()

    def close_stores(self) -> None:
        """End the threads that write frames, and release folders."""
        stores, self.stores = self.stores, ()  # a cycle would keep the values in memory
        for store in stores:
            store.close()

    def restore_state(self, load: Callable[[memoryview], None]) -> int:
        """Call `load` with the newest checkpoint; return its step, or 0 without one."""
        step, saved = (0, None) if self.checkpoints is None else self.checkpoints.read_state()
        if saved is not None:
            load(saved)
        self.progress.step = step
        return step
