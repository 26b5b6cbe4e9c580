"""Arrays of other shapes than the section's: their division between ranks, halos, coarser grids."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from weakref import ProxyTypes, proxy

import numpy as np

from dask_p2p.errors import ChunksError, InputError
from dask_p2p.geometry import Box, block_bounds, box_slices
from dask_p2p.inputs import as_integer, checked_dtype
from dask_p2p.ops.halo import checked_boundaries, checked_depths
from dask_p2p.plans.rank_halo import halo_exchange
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.context.points import LocalPoints, checked_points
from dask_p2p.sections.exchange.device import check_kind
from dask_p2p.sections.exchange.ends import At, Ends, described, open_grid, planned
from dask_p2p.sections.exchange.halo import HaloExchange, HaloLayout
from dask_p2p.types import Array, BoundaryLike, DepthLike, DTypeLike

OTHERS = "*"  # in a mapping by names of arrays: all that it does not name
_MOST_PADS = 100  # kept exchanges of one grid


class Grid:
    """The division of an array between the ranks of a section.

    Attributes
    ----------
    shape : tuple of int
        Shape of the whole array.
    box : tuple of tuple of int
        Position of this rank's local block in the whole array: (start, stop) of each axis. It may
        be empty.
    """

    def __init__(self, ctx: Any, ranks: RankGrid) -> None:
        # A cycle of references would delay the end of the exchanges and their memory.
        self._ctx: Any = ctx if isinstance(ctx, ProxyTypes) else proxy(ctx)
        self.ranks = ranks
        self.shape = tuple(map(sum, ranks.chunks))
        self.box: Box = ranks.box(ctx.rank)
        self._pads: dict[str, tuple[list[HaloLayout], HaloExchange]] = {}
        self._coarser: dict[int, Grid] = {}

    @property
    def index(self) -> tuple[Array, ...]:
        """Indices of the local block's elements in the whole array, as by `numpy.ogrid`."""
        arange = self._ctx.device.module.arange
        return open_grid((arange(*own) for own in self.box), len(self.box))

    def zeros(self, dtype: DTypeLike = float) -> Array:
        """Return a local block of zeros."""
        own = checked_dtype("dtype", dtype)
        return self._ctx.device.zeros(self.ranks.shape(self._ctx.rank), own)

    def pad(self, a: Any, depth: DepthLike, boundary: Any = "none") -> Any:
        """Return local blocks with a halo: `numpy.pad` of the whole array.

        The halo has elements of the neighbours, corners included, and beyond the ends of the array
        the values of the boundary. All ranks must call this.

        Parameters
        ----------
        a : array, or dict of arrays
            This rank's local block; a dict has several by name. They share one message to each
            neighbour. They are not changed.
        depth : int, tuple or dict
            Width of the halo, as for `dask_p2p.map_overlap`.
        boundary : str, scalar, tuple or dict, optional
            Values beyond the ends of the array, as for `dask_p2p.map_overlap`, or a pair for both
            ends of an axis, ``{0: ("nearest", 0.0)}``, "odd" or a function, as for
            `Context.with_halo`. For a dict of arrays also a dict by name,
            ``{"u": 0.0, "*": "nearest"}``. By default "none": there is no halo at the ends.

        Returns
        -------
        array, or dict of arrays
            New arrays.

        Raises
        ------
        InputError
            If an array has another shape than the local block, or `depth` or `boundary` is invalid.
        SectionError
            If the ranks made different calls.
        """
        blocks = dict(a) if isinstance(a, Mapping) else {"a": a}
        if not blocks:
            return {}
        of_each = (
            by_name("boundary", boundary, blocks) if isinstance(a, Mapping) else {"a": boundary}
        )
        if is_by_name(boundary) and (missing := [n for n, own in of_each.items() if own is None]):
            raise InputError(
                f"boundary: expected one for each of {', '.join(blocks)}, got none for {missing}. "
                f'Give the others by "*".'
            )
        own = {name: self._checked(name, block) for name, block in blocks.items()}
        kinds = {name: block.dtype.str for name, block in own.items()}
        asked = f"{kinds} {depth!r} {of_each!r}"
        if asked not in self._pads:
            layouts = [
                self._layout(name, own[name].dtype, depth, of_each[name], is_named=len(own) > 1)
                for name in own
            ]
            if len(self._pads) >= _MOST_PADS:  # such as a new function in each step
                del self._pads[next(iter(self._pads))]
            self._pads[asked] = layouts, HaloExchange(layouts, self._ctx._connections)
        layouts, exchange = self._pads[asked]
        made = {}
        for layout, (name, block) in zip(layouts, own.items(), strict=True):
            made[name] = self._ctx.device.empty(layout.halo.shape, layout.dtype)
            made[name][box_slices(layout.halo.inner)] = block
        exchange.fill(layouts, [*made.values()])
        return made if isinstance(a, Mapping) else made["a"]

    def _layout(
        self, name: str, dtype: Any, depth: DepthLike, boundary: BoundaryLike, is_named: bool
    ) -> HaloLayout:
        (widths,) = checked_depths(depth, [self.shape])
        (beyond,) = checked_boundaries(boundary, [self.shape], dtype, in_section=True)
        rank, device = self._ctx.rank, self._ctx.device
        halo = halo_exchange(self.ranks, rank, widths, planned(beyond), has_corners=True)
        of, text = f" of {name}" if is_named else "", described(beyond)
        call = f"pad(){of}, {dtype} {self.shape}, depth {widths}, boundary {text}"
        at = At(rank, self.shape, self.box, device.module, self._ctx.step_for)
        ends = Ends(halo, beyond, at, device, dtype)
        return HaloLayout(halo, dtype, call, device=device, ends=ends)

    def _checked(self, name: str, a: Any) -> Array:
        block = self._ctx.device.as_array(a)
        check_kind(self._ctx.device, name, block)
        shape = self.ranks.shape(self._ctx.rank)
        if block.shape != shape or block.dtype.hasobject:
            raise InputError(
                f"{name}: expected an array of shape {shape}, as this rank's local block of an "
                f"array of shape {self.shape}, got {block.dtype} {block.shape}. Use the grid of "
                f"that array, ctx.grid_of(shape)."
            )
        return block

    def gather(self, a: Array) -> Array:
        """Return the whole array on all ranks.

        Parameters
        ----------
        a : array
            This rank's local block.

        Returns
        -------
        array
            A new array, of the same kind and dtype.

        Raises
        ------
        InputError
            If `a` has another shape than the local block.
        SectionError
            If the ranks made different calls.
        """
        own = self._checked("a", a)
        parts = self._ctx.allgather(own, ragged=True)
        whole = self._ctx.device.empty(self.shape, own.dtype)
        for rank, part in enumerate(parts):
            whole[box_slices(self.ranks.box(rank))] = part
        return whole

    def points(self, xy: Any, weights: str = "linear") -> LocalPoints:
        """Return points of the whole array, such as sources and receivers.

        Parameters
        ----------
        xy : array of shape (ndim, n)
            Indices of n points along each axis; fractions lie between elements.
        weights : {"linear", "nearest"}, optional
            The elements that a point acts on, as for `dask_p2p.Points`.

        Returns
        -------
        LocalPoints
            ``add(block, values)`` adds values at the points, and ``sample(block)`` returns this
            rank's part of the values there.

        Raises
        ------
        InputError
            If a point lies outside of the array, or the weights are unknown.
        """
        module = self._ctx.device.module
        return LocalPoints(checked_points(xy, self.shape, weights), self.box, module)

    def coarser(self, factor: int = 2) -> Grid:
        """Return the grid of every second point, or every `factor`-th one, along all axes.

        Point i of it is on the rank of point ``factor * i`` of this grid. So a rank finds the
        points of both grids in its own local blocks and their halos.

        Parameters
        ----------
        factor : int, optional
            By default 2.

        Raises
        ------
        ChunksError
            If the local block of a rank begins at another position than a multiple of `factor`.
        InputError
            If `factor` is no number of at least 2.
        """
        by = as_integer(factor, 0)
        if by < 2:
            raise InputError(f"factor: expected an integer of at least 2, got {factor!r}.")
        if by not in self._coarser:
            sizes = [_coarse(axis, along, by) for axis, along in enumerate(self.ranks.local_sizes)]
            self._coarser[by] = Grid(self._ctx, RankGrid(tuple(sizes), self.ranks.grid))
        return self._coarser[by]

    def __repr__(self) -> str:
        return f"<Grid of {self.shape}, {self.ranks.grid} ranks, box {self.box}>"


def _coarse(axis: int, sizes: Sequence[int], factor: int) -> tuple[int, ...]:
    """Return the sizes of the coarser local blocks along an axis."""
    bounds = block_bounds(sizes)
    if odd := [bound for bound in bounds[:-1] if bound % factor]:
        raise ChunksError(
            f"expected local blocks that begin at multiples of {factor}, got one at {odd[0]} along "
            f"axis {axis}. Rechunk the array to multiples of {factor}, or use fewer ranks."
        )
    coarse = [-(-bound // factor) for bound in bounds]
    return tuple(int(n) for n in np.diff(coarse))


def is_by_name(given: Any) -> bool:
    """Return whether an option is a mapping by names of arrays, not by axes."""
    return isinstance(given, Mapping) and any(isinstance(key, str) for key in given)


def by_name(title: str, given: Any, names: Collection[str], default: Any = None) -> dict[str, Any]:
    """Return the option of each array, from one for all or a mapping by names of arrays.

    Raises `InputError` for other names.
    """
    if not is_by_name(given):
        return dict.fromkeys(names, given)
    if unknown := [key for key in given if key not in (*names, OTHERS)]:
        raise InputError(
            f"{title}: expected names of fields, {[*names]}, or {OTHERS!r} for all others, got "
            f"{unknown[0]!r}. Rename it."
        )
    return {name: given.get(name, given.get(OTHERS, default)) for name in names}
