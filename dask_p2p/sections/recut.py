"""Shares of one cut made into those of another, by messages between the members of a gang.

Shares in memory of a GPU go through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any, TypeVar

import numpy as np

from dask_p2p.backends.numpy import NUMPY
from dask_p2p.errors import AxesError, InputError, UnsupportedArrayError
from dask_p2p.geometry import box_slices, normal_axes
from dask_p2p.plans.cuts import Moves, cut_of, moves, recut
from dask_p2p.plans.members import Members
from dask_p2p.plans.orders import partners
from dask_p2p.sections.devices import HOST, Host, check_kind
from dask_p2p.sections.links import Buffer, Links
from dask_p2p.sections.reads import LEAST_BYTES, Reads, place_bytes
from dask_p2p.sections.staged import begin_in_order
from dask_p2p.types import Array, DType

__all__ = ["Recut", "Redistribution", "checked_shape"]

_T = TypeVar("_T")


class Redistribution:
    """How a gang's members divide arrays, and how they get from one cut to another.

    Parameters
    ----------
    members, rank
        How they divide the arrays of their section, and which member this is.
    links
        By which they exchange; None if this is the only one.
    reads_memory
        Whether members of one host may read each other's memory.
    device
        Where shares lie.
    """

    def __init__(
        self,
        members: Members,
        rank: int,
        links: Links | None,
        reads_memory: bool = True,
        device: Host = HOST,
    ) -> None:
        self._members, self._rank, self._links, self._device = members, rank, links, device
        self._reads = Reads(rank, members.size, links, reads_memory) if links else None
        self._known: dict[str, Any] = {}
        self._packed, self._arriving = _Memory(), _Memory()
        self.shape = tuple(map(sum, members.chunks))

    def members(self, cut: Any, shape: Any = None, name: str = "cut") -> Members:
        """Return how an array is divided.

        Parameters
        ----------
        cut
            The axes that may be divided; None for those that are in the section's arrays.
        shape
            Of the array; None if that is the arrays' of the section.
        name
            Under which the caller was given `cut`.

        Raises
        ------
        AxesError
            If the array has no such axes.
        InputError
            If that is no shape.
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
        before: Members,
        after: Members,
        axes: tuple[int, ...],
        name: str = "redistribute()",
    ) -> Recut:
        """Return what makes shares of these members into those of others, with axes permuted."""
        whole = tuple(map(sum, before.share_sizes))
        call = f"{name} of {whole}, {before.grid} to {after.grid}, axes {axes}"
        own = moves(before, after, axes, self._rank)
        part_elements = prod(whole) // before.size**2
        memory = self._packed, self._arriving
        return Recut(
            own, axes, call, self._links, *memory, part_elements, self._reads, self._device
        )


class _Memory:
    """Memory that one exchange after the other uses: as much as the largest of them takes."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def arrays(self, shapes: Sequence[tuple[int, ...]], dtype: DType) -> list[Array]:
        """Return arrays in it, one after the other."""
        starts = [0]
        for shape in shapes:
            starts.append(starts[-1] + prod(shape) * dtype.itemsize)
        if self._bytes.nbytes < starts[-1]:
            self._bytes = np.empty(starts[-1], np.uint8)
        return [
            np.ndarray(shape, dtype, self._bytes, start)
            for shape, start in zip(shapes, starts, strict=False)
        ]


@dataclass(frozen=True)
class Recut:
    """Makes shares of one cut into those of another, again and again.

    Parameters
    ----------
    moves
        What this member does.
    axes
        Axis ``i`` afterwards is axis ``axes[i]`` before.
    call
        What is done. All members must name the same.
    links
        By which they exchange; None if this is the only one.
    packed, arriving
        Memory for regions that do not lie in one piece.
    part_elements
        What one member gives another, in the mean.
    reads
        By which members read large parts; None if they do not.
    device
        Where shares lie.
    """

    moves: Moves
    axes: tuple[int, ...]
    call: str
    links: Links | None
    packed: _Memory
    arriving: _Memory
    part_elements: int
    reads: Reads | None
    device: Host = HOST

    def __call__(self, share: Any, out: Array | None = None, order: str = "auto") -> Array:
        """Return this member's share of the other cut, of its share of the one before.

        Raises
        ------
        InputError
            If `share` or `out` is not what is expected.
        SectionError
            If the members made different calls.
        """
        share = self.device.as_array(share)
        self.check(share)
        if out is None:
            out = self.device.empty(self.moves.after, share.dtype)
        else:
            self._check_out(out, share)
        given, made = self.device.to_host(share), self.device.host_memory_of(out)
        if self.links is not None:
            self._exchange(self.links, given, made, order)
        if self.moves.local is not None:
            src, dst = map(box_slices, self.moves.local)
            NUMPY.permute_into(made[dst], given[src], self.axes)
        self.device.copy_from_host(out, made)
        return out

    def _exchange(self, links: Links, share: Array, out: Array, order: str) -> None:
        call, axes = f"{self.call}, {share.dtype}", self.axes
        regions = {rank: share[box_slices(box)] for rank, box in self.moves.sends.items()}
        targets = {rank: out[box_slices(box)] for rank, box in self.moves.receives.items()}
        readers, read = set[int](), set[int]()
        if self.reads is not None and self.part_elements * share.itemsize >= LEAST_BYTES:
            readers, read = self._read(links, self.reads, order, call, regions, targets)
        sent = {rank: region for rank, region in regions.items() if rank not in readers}
        sends: dict[int, Buffer] = dict.fromkeys(read, b"")  # who waits for that
        sends |= {rank: _bytes_of(region) for rank, region in self._in_one_piece(sent, share.dtype)}
        targets = {rank: target for rank, target in targets.items() if rank not in read}
        in_place = axes == tuple(sorted(axes))
        direct = {r for r, target in targets.items() if in_place and target.flags.c_contiguous}
        others = [rank for rank in targets if rank not in direct]
        shapes = [self._arriving_shape(targets[rank].shape) for rank in others]
        arriving = dict(zip(others, self.arriving.arrays(shapes, share.dtype), strict=True))
        receives: dict[int, Buffer | None] = {rank: bytearray() for rank in readers}
        receives |= {r: _bytes_of(arriving.get(r, target)) for r, target in targets.items()}
        begin_in_order(links, order, call, sends, receives)()
        for rank in others:
            NUMPY.permute_into(targets[rank], arriving[rank], axes)

    def _in_one_piece(self, regions: dict[int, Array], dtype: DType) -> Iterator[tuple[int, Array]]:
        scattered = [rank for rank, region in regions.items() if not region.flags.c_contiguous]
        shapes = [regions[rank].shape for rank in scattered]
        packed = dict(zip(scattered, self.packed.arrays(shapes, dtype), strict=True))
        for rank, region in regions.items():
            if rank in packed:
                NUMPY.permute_into(packed[rank], region, range(region.ndim))
            yield rank, packed.get(rank, region)

    def _read(
        self,
        links: Links,
        reads: Reads,
        order: str,
        call: str,
        regions: dict[int, Array],
        targets: dict[int, Array],
    ) -> tuple[set[int], set[int]]:
        """Read from others; return the members that read here, and those that were read."""
        reads.try_all()
        places = {rank: reads.place_for(rank, region) for rank, region in regions.items()}
        told = {rank: place for rank, place in places.items() if place is not None}
        length = place_bytes(len(self.axes))
        asked = {rank: bytearray(length) for rank in targets if reads.reads_from(rank)}
        found = links.exchange(f"{call}, places", told, dict(asked))
        read = {rank: place for rank, place in found.items() if any(place)}
        in_turn = partners("diagonal" if order == "auto" else order, *links.place)
        for rank in (each.source for each in in_turn if each.source in read):
            assert rank is not None
            place, target = read[rank], targets[rank]
            shape = self._arriving_shape(target.shape)
            region = reads.read(rank, place, shape, target, self.axes, self._arriving_bytes)
            links.count(rank, target.nbytes)
            if region is not None:
                NUMPY.permute_into(target, region, self.axes)
        return {rank for rank, place in told.items() if any(place)}, {*read}

    def _arriving_bytes(self, size_bytes: int) -> Array:
        return self.arriving.arrays([(size_bytes,)], np.dtype(np.uint8))[0]

    def _arriving_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape, before the axes are permuted, of what has this one afterwards."""
        return tuple(shape[self.axes.index(axis)] for axis in range(len(shape)))

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
    """Return lengths of axes.

    Raises
    ------
    InputError
        If they are none.
    """
    try:
        lengths = tuple(map(index, shape))
    except TypeError:
        lengths = (-1,)
    if min(lengths, default=0) < 0:
        raise InputError(f"shape: expected lengths of axes, got {shape!r}.")
    return lengths


def _bytes_of(region: Array) -> Buffer:
    """Return the bytes of an array that lies in one piece."""
    flat: Any = region.reshape(-1)
    return memoryview(flat.view(np.uint8)) if region.nbytes else bytearray()
