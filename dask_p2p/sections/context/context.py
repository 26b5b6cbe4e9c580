"""The context that the function of a gang receives in addition to its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from types import NoneType
from typing import Any
from weakref import finalize

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.geometry import Box
from dask_p2p.inputs import as_integer, checked_dtype, checked_flag
from dask_p2p.ops.arguments import checked_boundaries, checked_depths
from dask_p2p.plans.halo import plan_halo_exchange
from dask_p2p.plans.ranks import RankGrid, distribute_alike
from dask_p2p.sections.context.communicator import Communicator
from dask_p2p.sections.context.grids import Grid, LocalPoints
from dask_p2p.sections.context.stepping import Stepping
from dask_p2p.sections.context.transforms import Transforms
from dask_p2p.sections.exchange.boundaries import At, Ends, described, planned
from dask_p2p.sections.exchange.device import HOST, Host, check_kind
from dask_p2p.sections.exchange.halo import FirstCopy, HaloArray, HaloExchange, HaloLayout, Pending
from dask_p2p.sections.exchange.redistribution import Partitions, checked_shape
from dask_p2p.sections.exchange.regions import checked_order
from dask_p2p.sections.gang.checkpoints import Checkpoints
from dask_p2p.sections.wire.connections import ONE_RANK, Connections
from dask_p2p.types import Array, BoundaryLike, DepthLike, DTypeLike


class Context(Stepping, Transforms):
    """One rank among the ranks that run a function at the same time.

    With CuPy blocks, the rank's own stream is the current one while the function runs. Methods
    enqueue their work on that stream, too, so the function need not wait for the GPU.

    All ranks must call the same methods in the same order. Otherwise all raise a `SectionError`
    that names both calls. Only ranks that all wait for a message go on waiting: after
    `p2p.timeouts.request` the log names them and their calls.

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
        checkpoints: Checkpoints | None = None,  # stores its states
        reads_memory: bool = True,  # whether ranks of one host may read each other's memory
        device: Host = HOST,  # of its local blocks
    ) -> None:
        super().__init__(rank, ranks.size, connections, device, checkpoints)
        self.reads_memory = reads_memory
        self.grid = ranks.grid
        self.box: Box = ranks.box(rank)
        self._ranks = ranks
        self.replays_steps = False  # whether steps are captured, and all have the same number
        self._grids: dict[RankGrid, Grid] = {}
        self._halo_arrays = 0  # calls of `with_halo` so far
        self._first_copies: dict[int, FirstCopy] = {}  # of local blocks that are alive
        self._partitions = Partitions(ranks, rank, connections, reads_memory, device)

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
        global_shape = self.shape if shape is None else checked_shape(shape)
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

    def box_of(
        self, partition: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Box:
        """Return the `box` of this rank for another partition: see `redistribute`."""
        return self._partitions.ranks(partition, shape).box(self.rank)

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
        ranks = self._ranks if grid is None else grid.ranks
        corners = checked_flag("corners", corners)
        shapes = [tuple(map(sum, ranks.chunks))]
        local = None if local is None else self.device.as_array(local)
        local_dtype = np.dtype(getattr(local, "dtype", np.float64))
        kind = local_dtype if dtype is None else checked_dtype("dtype", dtype)
        if kind.hasobject:
            raise InputError(f"dtype: expected one without Python objects, got {kind}.")
        (widths,) = checked_depths(depth, shapes)
        (beyond,) = checked_boundaries(boundary, shapes, kind, in_section=True)
        halo = plan_halo_exchange(ranks, self.rank, widths, planned(beyond), corners)
        call = (
            f"update_halo() of halo array {self._halo_arrays}, {kind}, depth {widths}, "
            f"boundary {described(beyond)}, corners {corners}"
        )
        self._halo_arrays += 1
        order = checked_order(exchange)
        box = ranks.box(self.rank)
        at = At(self.rank, shapes[0], box, self.device.module, self.step_for)
        ends = Ends(halo, beyond, at, self.device, kind)
        halo_array = HaloArray(HaloLayout(halo, kind, call, order, self.device, ends))
        if local is not None:
            if not np.can_cast(local_dtype, kind, "same_kind"):
                raise InputError(
                    f"local: expected an array that becomes {kind}, got {local_dtype}. Convert it "
                    f"first, local.astype(...), or leave out dtype=."
                )
            if np.shape(local) != halo_array.inner.shape:
                raise InputError(
                    f"local: expected an array of shape {halo_array.inner.shape}, got one of shape "
                    f"{np.shape(local)}."
                )
            check_kind(self.device, "local", local)
            halo_array.inner[...] = local
        return halo_array

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
        return exchange.begin(halo_arrays, in_background, self._copied if copy else None)

    def halo_exchange(
        self, halo_arrays: Sequence[HaloArray], is_wide: bool = False
    ) -> HaloExchange:
        """Return the exchange that fills the halos of some arrays; later calls return the same."""
        _check_halo_arrays(halo_arrays)
        first, *companions = halo_arrays
        names = (
            tuple([halo_array.layout.call.text for halo_array in companions]) if companions else ()
        )
        exchange = first.layout.exchanges.get((is_wide, names))
        if exchange is None:
            layouts = [halo_array.layout for halo_array in halo_arrays]
            reads_memory = self.reads_memory if is_wide else None
            exchange = HaloExchange(layouts, self._connections, reads_memory)
            first.layout.exchanges[is_wide, names] = exchange
        return exchange

    def _copied(self, halo_array: HaloArray) -> Array:
        copied = halo_array.data.copy()
        if halo_array.first_copy is None:
            halo_array.first_copy = first = FirstCopy(halo_array, copied)
            self._first_copies[id(first)] = first
            finalize(halo_array.data, self._first_copies.pop, id(first), None)
        return copied

    def check_returned(self, arrays: Sequence[Any]) -> None:
        """Check the copies of local blocks after the function has returned: see `FirstCopy`."""
        for first in [*self._first_copies.values()]:
            first.check_returned(arrays)

    def redistribute(
        self,
        a: Array,
        partition: Sequence[int] | None = None,
        from_partition: Sequence[int] | None = None,
        *,
        axes: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        out: Array | None = None,
        exchange: str = "auto",
    ) -> Array:
        """Divide an array between the ranks along other axes; return this rank's new local block.

        This is an all-to-all exchange: a transpose of slabs, if `partition` is another axis. Later
        calls reuse the memory of messages. On a GPU the exchange is enqueued on the rank's stream,
        and regions are read from other GPUs of the host. The call waits for regions that come as
        messages.

        Parameters
        ----------
        a : array
            This rank's local block of the array, of any dtype without Python objects. It is not
            changed.
        partition : sequence of int, optional
            Axes that may be divided in the result, as for `dask_p2p.spmd`. By default those of the
            section's arrays. If an array has the section's shape, and an axis the same number of
            ranks, that axis is divided at the same positions; otherwise evenly. A local block may
            be empty.
        from_partition : sequence of int, optional
            Axes that may be divided in `a`, with the same default.
        axes : sequence of int, optional
            A permutation: axis ``i`` of the result is axis ``axes[i]`` of `a`, and `partition`
            names axes of the result. By default the axes keep their order.
        shape : sequence of int, optional
            Shape of the whole array before the permutation. By default that of the section's
            arrays. With `from_partition` and without `partition`, the result has that shape by
            default.
        out : array, optional
            Memory for the result, which must not be that of `a`. A loop that passes `out` allocates
            nothing.
        exchange : {"auto", "diagonal", "left-right", "pairwise"}, optional
            Order of the messages. "auto" exchanges with all ranks at the same time. In the other
            orders each rank has one partner at a time. "diagonal" sends to the ranks after it, in
            turn. "left-right" sends to the right and the left neighbour, then to those behind them.
            "pairwise" sends to and receives from the same rank.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            The new local block, owned by the caller: `out` if that is given.

        Raises
        ------
        InputError
            If the array has no such axes.
            Also if `a` or `out` has another shape or cannot be exchanged, or `exchange` is unknown.
        SectionError
            If the ranks made different calls.
        """
        redistribution = self._partitions.redistribution(partition, from_partition, axes, shape)
        return redistribution(a, out, checked_order(exchange))


def _check_halo_arrays(halo_arrays: Sequence[Any]) -> None:
    if not halo_arrays:
        raise InputError("expected at least one halo array, from ctx.with_halo(), got none.")
    for halo_array in halo_arrays:
        if not isinstance(halo_array, HaloArray):
            raise InputError(
                f"expected memory from ctx.with_halo(), got {type(halo_array).__name__}. Make it "
                f"once, p = ctx.with_halo(local, depth), and change the local block in p.inner."
            )
    if len(halo_arrays) > 1 and len({halo_array.layout for halo_array in halo_arrays}) < len(
        halo_arrays
    ):
        raise InputError(
            "expected different halo arrays in one call, got one twice. Give each of them once."
        )
