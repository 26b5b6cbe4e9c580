"""Repartition: local blocks of one partition become those of another, by exchanges of a gang."""

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
    """Partitions of a gang's arrays, and the exchanges between partitions."""

    def __init__(
        self,
        members: Members,  # partition of the section's arrays
        rank: int,
        links: Links | None,  # connections to other ranks; None for a single rank
        reads_memory: bool = True,  # whether ranks of one host may read each other's memory
        device: Host = HOST,  # device of the local blocks
    ) -> None:
        self._members, self._rank, self._device = members, rank, device
        self._regions = device.moved_regions(links, reads_memory)
        self._known: dict[str, Any] = {}
        self.shape = tuple(map(sum, members.chunks))

    def members(
        self,
        cut: Any,  # axes that may be divided; None: those divided in the section's arrays
        shape: Any = None,  # shape of the array; None: that of the section's arrays
        name: str = "cut",  # parameter name of `cut`, for errors
    ) -> Members:
        """Return the partition of an array.

        Raises `AxesError` if the array has no such axes, `InputError` for an invalid shape.
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
                f"{self._members.size} ranks, got {cut!r}."
            )
        return recut(self._members, whole, tuple(sorted(axes)))

    def recut(
        self, cut: Any = None, from_cut: Any = None, axes: Any = None, shape: Any = None
    ) -> Recut:
        """Return the exchange between two partitions: see `Context.redistribute`."""
        asked = repr((cut, from_cut, axes, shape))
        return self.once(asked, lambda: self._recut(cut, from_cut, axes, shape))

    def once(self, asked: str, make: Callable[[], _T]) -> _T:
        """Return the object made for a request, cached by its text."""
        if asked not in self._known:
            self._known[asked] = make()
        found: _T = self._known[asked]
        return found

    def settle(self) -> None:
        """Complete the exchanges that were begun: see `Recut.begin`."""
        self._regions.settle()

    def _recut(self, cut: Any, from_cut: Any, axes: Any, shape: Any) -> Recut:
        own = self.shape
        ndim = len(own if shape is None else checked_shape(shape))
        order = tuple(range(ndim)) if axes is None else normal_axes(axes, ndim)
        if order is None:
            raise AxesError(f"axes: expected a permutation of {ndim} axes, got {axes!r}.")
        if shape is None and cut is None and from_cut is not None:  # back to the section's shape
            shape = [own[order.index(axis)] for axis in range(ndim)]
        before = self.members(from_cut, shape, "from_cut")
        whole = tuple(map(sum, before.share_sizes))
        after = self.members(cut, [whole[axis] for axis in order])
        return self.between(before, after, order)

    def between(
        self,
        before: Members,  # partition of the array
        after: Members,  # partition of the array with permuted axes
        axes: tuple[int, ...],  # axis i of `after` is axis axes[i] of `before`
        name: str = "redistribute()",  # name of the call
        order: Sequence[int] | None = None,  # axis i of the result is axis order[i] of `after`
    ) -> Recut:
        """Return the exchange between two partitions, with permuted axes."""
        whole = tuple(map(sum, before.share_sizes))
        call = f"{name} of {whole}, {before.grid} to {after.grid}, axes {axes}"
        own = moves(before, after, axes, self._rank)
        if order is not None:
            own, axes = own.permuted(order), tuple(axes[axis] for axis in order)
        mean_elements = prod(whole) // before.size**2
        return Recut(own, axes, call, mean_elements, self._regions, self._device)


@dataclass(frozen=True)
class Recut:
    """Reusable exchange from the local blocks of one partition to those of another."""

    moves: Moves  # sends and receives of this rank
    axes: tuple[int, ...]  # axis i afterwards is axis axes[i] before
    call: str  # text of the call, the same on all ranks
    mean_elements: int  # mean number of elements from one rank to another
    regions: Regions | GpuRegions  # moves the data
    device: Host = HOST  # device of the local blocks

    def __call__(self, share: Any, out: Array | None = None, order: str = "auto") -> Array:
        """Return this rank's local block of the new partition, from that of the old one.

        Raises `InputError` for an unsuitable `share` or `out`, and `SectionError` if the ranks made
        different calls.
        """
        made = self.begin(share, out, order)
        self.regions.settle()
        return made

    def begin(self, share: Any, out: Array | None = None, order: str = "auto") -> Array:
        """Begin the exchange: `share` must not change until `Redistribution.settle`.

        On a GPU, `share` may be `Pieces`.
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
        """Raise an error unless `share` is this rank's local block of the old partition."""
        try:
            check_kind(self.device, "a", share)
        except UnsupportedArrayError as exc:
            raise UnsupportedArrayError(f"a: {exc}") from None
        if share.dtype.hasobject:
            raise InputError(
                f"a: expected elements of a fixed size, got dtype {share.dtype}. Ranks cannot "
                f"exchange Python objects. Convert the array to numbers."
            )
        if share.shape != self.moves.before:
            raise InputError(
                f"a: expected an array of shape {self.moves.before}, as this rank's local block, "
                f"got one of shape {share.shape}. Give from_cut= for another partition, and shape= "
                f"if the whole array has another shape than the section's arrays."
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
                "out: expected a writable array that shares no memory with a. Give another array."
            )


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return lengths of axes as integers. Raises `InputError` for an invalid shape."""
    try:
        lengths = tuple(map(index, shape))
    except TypeError:
        lengths = (-1,)
    if min(lengths, default=0) < 0:
        raise InputError(f"shape: expected lengths of axes, at least 0, got {shape!r}.")
    return lengths
