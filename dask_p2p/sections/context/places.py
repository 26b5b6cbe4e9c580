"""The place of a rank: its part of the arrays, its neighbours, and its host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from dask_p2p.errors import AxesError
from dask_p2p.geometry import Box
from dask_p2p.inputs import as_integer
from dask_p2p.plans.partitions import divided_alike
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.context.communicator import Communicator
from dask_p2p.sections.context.grids import Grid
from dask_p2p.sections.context.points import LocalPoints
from dask_p2p.sections.exchange.redistribution import Partitions, checked_shape
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
        AxesError
            If the array has no such axes.
        InputError
            If `shape` is no shape.
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
        AxesError
            If the arrays have no such axis.
        """
        ndim = len(self.grid)
        given = as_integer(axis, ndim)
        if given not in range(-ndim, ndim):
            raise AxesError(
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
