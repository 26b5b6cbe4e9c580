"""Arrays of other shapes than the section's: their division between ranks, halos, coarser grids."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any
from weakref import ProxyTypes, proxy

import numpy as np

from dask_p2p.backends.base import check_plain
from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, block_bounds, box_shape, box_slices
from dask_p2p.inputs import as_integer, checked_choice, checked_dtype, checked_flag
from dask_p2p.ops.arguments import checked_boundaries, checked_depths
from dask_p2p.plans.halo import plan_halo_exchange
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.exchange.boundaries import At, Ends, described, planned
from dask_p2p.sections.exchange.device import check_kind
from dask_p2p.sections.exchange.halo import HaloArray, HaloExchange, HaloLayout
from dask_p2p.sections.exchange.regions import checked_order
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
        module = self._ctx.device.module
        index: tuple[Array, ...] = module.ix_(*(module.arange(*bounds) for bounds in self.box))
        return index

    def zeros(self, dtype: DTypeLike = float) -> Array:
        """Return a local block of zeros."""
        checked = checked_dtype("dtype", dtype)
        return self._ctx.device.zeros(self.ranks.shape(self._ctx.rank), checked)

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
        if is_by_name(boundary) and (missing := [n for n, end in of_each.items() if end is None]):
            raise InputError(
                f"boundary: expected one for each of {', '.join(blocks)}, got none for {missing}. "
                f'Give the others by "*".'
            )
        arrays = {name: self._checked(name, block) for name, block in blocks.items()}
        kinds = {name: block.dtype.str for name, block in arrays.items()}
        key = f"{kinds} {depth!r} {of_each!r}"
        if key not in self._pads:
            layouts = [
                self._layout(
                    f"pad(){f' of {name}' * (len(arrays) > 1)}, {block.dtype} {self.shape}",
                    block.dtype,
                    depth,
                    of_each[name],
                )
                for name, block in arrays.items()
            ]
            if len(self._pads) >= _MOST_PADS:  # such as a new function in each step
                del self._pads[next(iter(self._pads))]
            self._pads[key] = layouts, HaloExchange(layouts, self._ctx._connections)
        layouts, exchange = self._pads[key]
        halo_arrays = []
        for layout, block in zip(layouts, arrays.values(), strict=True):
            memory = self._ctx.device.empty(layout.halo.shape, layout.dtype)
            halo_arrays.append(HaloArray(layout, memory))
            halo_arrays[-1].inner[...] = block
        exchange.begin(halo_arrays, in_background=False).wait()
        padded = {name: filled.data for name, filled in zip(arrays, halo_arrays, strict=True)}
        return padded if isinstance(a, Mapping) else padded["a"]

    def halo_array(
        self,
        call: str,  # text of its exchange, without its kind
        local: Array | None,
        depth: DepthLike,
        boundary: BoundaryLike,
        corners: bool,
        dtype: DTypeLike | None,
        exchange: str,
    ) -> HaloArray:
        """Return memory for a local block with a halo: see `Context.with_halo`."""
        device, corners = self._ctx.device, checked_flag("corners", corners)
        local = None if local is None else device.as_array(local)
        local_dtype = np.dtype(getattr(local, "dtype", np.float64))
        kind = local_dtype if dtype is None else checked_dtype("dtype", dtype)
        if kind.hasobject:
            raise InputError(f"dtype: expected one without Python objects, got {kind}.")
        layout = self._layout(f"{call}, {kind}", kind, depth, boundary, corners, exchange)
        halo_array = HaloArray(layout)
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
            check_kind(device, "local", local)
            halo_array.inner[...] = local
        return halo_array

    def _layout(
        self,
        call: str,  # text of the exchange, without its depth
        dtype: Any,
        depth: DepthLike,
        boundary: BoundaryLike,
        corners: bool = True,
        exchange: str = "auto",
    ) -> HaloLayout:
        (widths,) = checked_depths(depth, [self.shape])
        (beyond,) = checked_boundaries(boundary, [self.shape], dtype, in_section=True)
        rank, device = self._ctx.rank, self._ctx.device
        halo = plan_halo_exchange(self.ranks, rank, widths, planned(beyond), corners)
        text = f"{call}, depth {widths}, boundary {described(beyond)}, corners {corners}"
        at = At(rank, self.shape, self.box, device.module, self._ctx.step_for)
        ends = Ends(halo, beyond, at, device, dtype)
        return HaloLayout(halo, dtype, text, checked_order(exchange), device, ends)

    def _checked(self, name: str, a: Any) -> Array:
        block = self._ctx.device.as_array(a)
        check_kind(self._ctx.device, name, block)
        shape = self.ranks.shape(self._ctx.rank)
        if block.shape != shape or block.dtype.hasobject:
            raise InputError(
                f"{name}: expected an array of shape {shape}, as this rank's local block of an "
                f"array of numbers of shape {self.shape}, got {block.dtype} {block.shape}. Use "
                f"the grid of that array, ctx.grid_of(shape)."
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
        block = self._checked("a", a)
        parts = self._ctx.allgather(block, ragged=True)
        gathered = self._ctx.device.empty(self.shape, block.dtype)
        for rank, part in enumerate(parts):
            gathered[box_slices(self.ranks.box(rank))] = part
        return gathered

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
        InputError
            If the local block of a rank begins at another position than a multiple of `factor`.
            Also if `factor` is no number of at least 2.
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
        raise InputError(
            f"expected local blocks that begin at multiples of {factor}, got one at {odd[0]} along "
            f"axis {axis}. Rechunk the array to multiples of {factor}, or use fewer ranks."
        )
    coarse = [-(-bound // factor) for bound in bounds]
    return tuple(int(n) for n in np.diff(coarse))


def is_by_name(argument: Any) -> bool:
    """Return whether an option is a mapping by names of arrays, not by axes."""
    return isinstance(argument, Mapping) and any(isinstance(key, str) for key in argument)


def by_name(
    title: str, argument: Any, names: Collection[str], default: Any = None
) -> dict[str, Any]:
    """Return the option of each array, from one for all or a mapping by names of arrays.

    Raises `InputError` for other names.
    """
    if not is_by_name(argument):
        return dict.fromkeys(names, argument)
    if unknown := [key for key in argument if key not in (*names, OTHERS)]:
        raise InputError(
            f"{title}: expected names of fields, {[*names]}, or {OTHERS!r} for all others, got "
            f"{unknown[0]!r}. Rename it."
        )
    return {name: argument.get(name, argument.get(OTHERS, default)) for name in names}


# Points of a whole array, between its elements: sources and receivers of a simulation.
#
# A point acts on its neighbours, two along each axis, with linear weights; or on the nearest one.
# Each rank acts on those neighbours that are in its own local block::
#
#     elements   0     1     2  |  3     4          point at 2.25: 0.75 of element 2, which rank 0
#     ranks      rank 0         |  rank 1           has, and 0.25 of element 3, which rank 1 has


@dataclass(frozen=True)
class Points:
    """A constant of `iterate`: points, such as sources and receivers.

    The function receives `dask_p2p.results.LocalPoints`, with the methods `add` and `sample`.

    Parameters
    ----------
    xy : array of shape (ndim, n)
        Indices of n points along each axis of the whole array; fractions lie between elements.
    weights : {"linear", "nearest"}, optional
        The elements that a point acts on: by default its neighbours, with linear weights. "nearest"
        is the nearest element alone, the upper one of two at the same distance.

    See Also
    --------
    iterate : Its errors include those of points: `InputError` for other shapes.

    Examples
    --------
    >>> import dask.array as da
    >>> import numpy as np
    >>> from dask_p2p import Points, iterate
    >>> def heated(u, source, out):
    ...     out[:] = u
    ...     source.add(out, 1.0)
    >>> source = Points(np.array([[2.25]]))
    >>> y = iterate(heated, da.zeros(4), 0, 2, constants=[source])
    >>> y.compute(scheduler="sync")
    array([0. , 0. , 1.5, 0.5])
    """

    xy: Any
    weights: str = "linear"


class LocalPoints:
    """Points of a whole array, as one rank sees them: from `Context.points` or a `Points`."""

    def __init__(
        self,
        xy: Array,  # as `checked_points` returns it
        box: Box,  # of the rank's block
        module: Any,  # of the arrays: NumPy or CuPy
        peer_points: Iterable[tuple[tuple[int, ...], tuple[int, ...]]] = (),
    ) -> None:
        """`peer_points` has shapes of blocks with halo, and where the box begins in each."""
        self._count: int = xy.shape[1]
        self._module = module
        self._starts: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for shape, start in (*peer_points, (box_shape(box), (0,) * len(box))):
            self._starts.setdefault(shape, set()).add(start)
        numbers, weights, index = _neighbours(xy, box)
        self._numbers, self._weights = module.asarray(numbers), module.asarray(weights)
        self._index = [module.asarray(along) for along in index]

    def __len__(self) -> int:
        return self._count

    def add(self, block: Any, values: Any) -> None:
        """Add values to a block at the neighbours of the points, times their weights.

        Parameters
        ----------
        block : array or HaloArray
            This rank's block, which is changed. In `iterate` with or without halo.
        values : number or array
            One value for all points, or one for each.

        Raises
        ------
        InputError
            If the block has another shape, or the number of values differs.
        """
        array, where = self._located(block)
        all_values = self._module.asarray(values)
        if all_values.shape not in ((), (self._count,)):
            raise InputError(
                f"values: expected a number, or one for each of {self._count} points, got an "
                f"array of shape {all_values.shape}. Give one for each point."
            )
        point_values = all_values[self._numbers] if all_values.ndim else all_values
        self._module.add.at(array, where, self._weights * point_values)

    def sample(self, block: Any) -> Array:
        """Return this rank's part of the values at the points: their sum over all ranks is whole.

        Parameters
        ----------
        block : array or HaloArray
            This rank's block. In `iterate` with or without halo.

        Returns
        -------
        array
            One value for each point; 0 where this rank has no neighbour.

        Raises
        ------
        InputError
            If the block has another shape.
        """
        array, where = self._located(block)
        parts = self._weights * array[where]
        samples: Array = self._module.zeros(self._count, parts.dtype)
        self._module.add.at(samples, self._numbers, parts)
        return samples

    def _located(self, block: Any) -> tuple[Any, tuple[Array, ...]]:
        """Return the array of a block, and where it has the neighbours."""
        array = block.inner if isinstance(block, HaloArray) else block
        shape = getattr(array, "shape", None)
        starts = self._starts.get(shape, set()) if isinstance(shape, tuple) else set()
        if len(starts) != 1:
            text = " or ".join(map(str, self._starts))
            raise InputError(
                f"block: expected this rank's block, an array of shape {text}, got "
                f"{type(array).__name__} of shape {shape}. Give the local block without halo."
            )
        (start,) = starts
        pairs = zip(self._index, start, strict=True)
        return array, tuple(along + first if first else along for along, first in pairs)


def checked_points(xy: Any, shape: Sequence[int], weights: str = "linear") -> Array:
    """Return the points of an array of a shape, moved to the elements if weights are "nearest".

    Raises `InputError` if a point lies outside, or the weights are unknown.
    """
    checked_choice("weights", weights, ("linear", "nearest"))
    check_plain("points", xy)
    on_host = xy.get() if hasattr(xy, "get") and hasattr(xy, "dtype") else xy
    try:
        positions = np.asarray(on_host, float)
        actual = f"one of shape {positions.shape}"
    except (TypeError, ValueError):
        positions, actual = np.empty(0), f"{xy!r:.80}"
    if positions.ndim != 2 or len(positions) != len(shape):
        raise InputError(
            f"points: expected indices along each axis in an array of shape ({len(shape)}, n), got "
            f"{actual}. Give numpy.array([[y0, y1], [x0, x1]])."
        )
    last = np.array(shape)[:, None] - 1
    outside = ~((positions >= 0) & (positions <= last)).all(axis=0)
    if outside.any():
        raise InputError(
            f"points: expected indices from 0 to {tuple(n - 1 for n in shape)}, got "
            f"{positions[:, outside.argmax()].tolist()}. Move the point, or leave it out."
        )
    return np.floor(positions + 0.5) if weights == "nearest" else positions


def _neighbours(xy: Array, box: Box) -> tuple[Array, Array, Array]:
    """Return the neighbours in a box: points' numbers, weights, and indices in the box."""
    low = np.floor(xy).astype(int)
    beyond = xy - low
    numbers, weights, index = [], [], []
    start, stop = np.array(box, int).reshape(-1, 2).T[:, :, None]
    for corner in product((0, 1), repeat=len(box)):
        side = np.array(corner, int)[:, None]
        weight = np.where(side == 1, beyond, 1 - beyond).prod(axis=0)
        at = low + side
        (is_near,) = np.nonzero((weight > 0) & ((at >= start) & (at < stop)).all(axis=0))
        numbers.append(is_near)
        weights.append(weight[is_near])
        index.append((at - start)[:, is_near])
    numbers_of, weights_of = np.concatenate(numbers), np.concatenate(weights)
    order = np.argsort(numbers_of, kind="stable")  # so sums do not depend on the ranks
    return numbers_of[order], weights_of[order], np.concatenate(index, axis=1)[:, order]
