"""Shares of one cut made into those of another, by exchanges between the members of a gang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any, TypeVar

from dask_p2p.errors import AxesError, InputError, UnsupportedArrayError
from dask_p2p.geometry import box_slices, normal_axes
from dask_p2p.plans.cuts import Moves, cut_of, moves, recut
from dask_p2p.plans.members import Members
from dask_p2p.sections.devices import HOST, Host, check_kind
from dask_p2p.sections.gpu_regions import GpuRegions
from dask_p2p.sections.links import Links
from dask_p2p.sections.pieces import Pieces
from dask_p2p.sections.regions import Call, Local, Regions
from dask_p2p.types import Array

_T = TypeVar("_T")


class Redistribution:
    """How a gang's members divide arrays, and how they get from one cut to another."""

    def __init__(
        self,
        members: Members,  # how they divide the arrays of their section
        rank: int,  # which of them this is
        links: Links | None,  # by which they exchange; None if this is the only one
        reads_memory: bool = True,  # whether members of one host may read each other's memory
        device: Host = HOST,  # where shares lie
    ) -> None:
        self._members, self._rank, self._device = members, rank, device
        self._regions = device.moved_regions(links, reads_memory)
        self._known: dict[str, Any] = {}
        self.shape = tuple(map(sum, members.chunks))

    def members(
        self,
        cut: Any,  # the axes that may be divided; None for those that are in the section's arrays
        shape: Any = None,  # of the array; None if that is the arrays' of the section
        name: str = "cut",  # under which the caller was given `cut`
    ) -> Members:
        """Return how an array is divided.

        `AxesError` if the array has no such axes, `InputError` if that is no shape.
        """
        whole = self.shape if shape is None else checked_shape(shape)
        try:
            given = cut_of(self._members) if cut is None else tuple(map(index, cut))
        except TypeError:
            given = (len(whole),)
        if any(axis not in range(-len(whole), len(whole)) for axis in given):
            raise AxesError(
                f"{name}: expected a sequence of axes of an array of {len(whole)} dimensions, got "
                f"{cut!r}."
            )
        axes = {axis % len(whole) for axis in given}
        if self._members.size > 1 and not axes:
            raise AxesError(
                f"{name}: expected at least one axis that is divided between "
                f"{self._members.size} members, got {cut!r}."
            )
        return recut(self._members, whole, tuple(sorted(axes)))

    def recut(
        self, cut: Any = None, from_cut: Any = None, axes: Any = None, shape: Any = None
    ) -> Recut:
        """Return what makes shares of one cut into those of another: see `Context.redistribute`."""
        asked = repr((cut, from_cut, axes, shape))
        return self.once(asked, lambda: self._recut(cut, from_cut, axes, shape))

    def once(self, asked: str, make: Callable[[], _T]) -> _T:
        """Return what was made when the same was asked before."""
        if asked not in self._known:
            self._known[asked] = make()
        found: _T = self._known[asked]
        return found

    def settle(self) -> None:
        """End what was begun: see `Recut.begin`."""
        self._regions.settle()

    def _recut(self, cut: Any, from_cut: Any, axes: Any, shape: Any) -> Recut:
        own = self.shape
        ndim = len(own if shape is None else checked_shape(shape))
        order = tuple(range(ndim)) if axes is None else normal_axes(axes, ndim)
        if order is None:
            raise AxesError(f"axes: expected a permutation of {ndim} axes, got {axes!r}.")
        if shape is None and cut is None and from_cut is not None:  # back to the section's arrays
            shape = [own[order.index(axis)] for axis in range(ndim)]
        before = self.members(from_cut, shape, "from_cut")
        whole = tuple(map(sum, before.share_sizes))
        after = self.members(cut, [whole[axis] for axis in order])
        return self.between(before, after, order)

    def between(
        self,
        before: Members,  # how members divide the array
        after: Members,  # and how with its axes permuted
        axes: tuple[int, ...],  # axis i of `after` is axis axes[i] of `before`
        name: str = "redistribute()",  # of the call
        order: Sequence[int] | None = None,  # axis i of what is made is axis order[i] of `after`
    ) -> Recut:
        """Return what makes shares of these members into those of others, with axes permuted."""
        whole = tuple(map(sum, before.share_sizes))
        call = f"{name} of {whole}, {before.grid} to {after.grid}, axes {axes}"
        own = moves(before, after, axes, self._rank)
        if order is not None:
            own, axes = own.permuted(order), tuple(axes[axis] for axis in order)
        mean_elements = prod(whole) // before.size**2
        return Recut(own, axes, call, mean_elements, self._regions, self._device)


@dataclass(frozen=True)
class Recut:
    """Makes shares of one cut into those of another, again and again."""

    moves: Moves  # what this member does
    axes: tuple[int, ...]  # axis i afterwards is axis axes[i] before
    call: str  # what is done: all members must name the same
    mean_elements: int  # that one member gives another
    regions: Regions | GpuRegions  # what brings these there
    device: Host = HOST  # where shares lie

    def __call__(self, share: Any, out: Array | None = None, order: str = "auto") -> Array:
        """Return this member's share of the other cut, of its share of the one before.

        `InputError` if `share` or `out` is not what is expected, `SectionError` if the members made
        different calls.
        """
        made = self.begin(share, out, order)
        self.regions.settle()
        return made

    def begin(self, share: Any, out: Array | None = None, order: str = "auto") -> Array:
        """Do the same, of what must stay as it is until `Redistribution.settle`.

        On a GPU that may be `Pieces` of a share.
        """
        if not isinstance(share, Pieces):
            share = self.device.as_array(share)
            self.check(share)
        if out is None:
            out = self.device.empty(self.moves.after, share.dtype)
        else:
            self._check_out(out, share)
        text = f"{self.call}, {share.dtype}"
        call = Call(text, share.dtype, order, self.axes, self.mean_elements)
        targets = {rank: out[box_slices(box)] for rank, box in self.moves.receives.items()}
        local = None
        if self.moves.local is not None:
            src, dst = self.moves.local
            local = Local(src, out[box_slices(dst)])
        self.regions.bring(call, share, self.moves.sends, targets, local)
        return out

    def check(self, share: Array) -> None:
        """Refuse what is not this member's share of the cut before."""
        try:
            check_kind(self.device, "a", share)
        except UnsupportedArrayError as exc:
            raise UnsupportedArrayError(f"a: {exc}") from None
        if share.dtype.hasobject:
            raise InputError(
                f"a: expected numbers, or anything else of a fixed size, got dtype {share.dtype}: "
                f"members cannot exchange Python objects."
            )
        if share.shape != self.moves.before:
            raise InputError(
                f"a: expected an array of shape {self.moves.before}, which this member has of the "
                f"whole, got one of shape {share.shape}. Say how it is divided by from_cut, and by "
                f"shape if it is of another whole than the section's arrays."
            )

    def _check_out(self, out: Any, share: Array) -> None:
        shape, dtype = self.moves.after, share.dtype
        module = self.device.module
        if not isinstance(out, module.ndarray) or (out.shape, out.dtype) != (shape, dtype):
            found = getattr(out, "shape", type(out).__name__), getattr(out, "dtype", "no dtype")
            raise InputError(
                f"out: expected an array of shape {shape} and dtype {dtype}, got {found[0]} and "
                f"{found[1]}."
            )
        is_fixed = not getattr(out.flags, "writeable", True)  # CuPy has no such flag
        if is_fixed or module.may_share_memory(out, share):
            raise InputError(
                "out: expected an array that can be written, and shares no memory with a."
            )


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return lengths of axes; `InputError` if they are none."""
    try:
        lengths = tuple(map(index, shape))
    except TypeError:
        lengths = (-1,)
    if min(lengths, default=0) < 0:
        raise InputError(f"shape: expected lengths of axes, got {shape!r}.")
    return lengths
