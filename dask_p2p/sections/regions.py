"""Regions of shares in host memory: sent to other members, or read by them where they lie."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from dask_p2p.backends.numpy import NUMPY
from dask_p2p.geometry import Box, box_slices
from dask_p2p.plans.orders import partners
from dask_p2p.sections.links import Buffer, Links
from dask_p2p.sections.reads import LEAST_BYTES, Reads, place_bytes
from dask_p2p.sections.staged import begin_in_order
from dask_p2p.types import Array, DType

__all__ = ["Call", "Local", "Regions"]


@dataclass(frozen=True)
class Call:
    """What all members do at the same time."""

    text: str  # by which they find out whether they do
    dtype: DType  # of what they exchange
    order: str  # in which they do: one of `dask_p2p.plans.orders.ORDERS`
    axes: tuple[int, ...]  # axis i afterwards is axis axes[i] before
    mean_elements: int  # that one member gives another

    def shape_before(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape, before the axes are permuted, of what has this one afterwards."""
        return tuple(shape[self.axes.index(axis)] for axis in range(len(shape)))

    def in_turn(self, links: Links, sources: Collection[int]) -> list[int]:
        """Return the members that are read, in the order in which this one reads them."""
        order = "diagonal" if self.order == "auto" else self.order
        in_turn = (stage.source for stage in partners(order, *links.place))
        return [rank for rank in in_turn if rank is not None and rank in sources]


class Local(NamedTuple):
    """What of a share stays with its member."""

    box: Box
    target: Array  # where it belongs


class Regions:
    """Brings regions again and again."""

    def __init__(
        self,
        links: Links | None,  # by which members exchange; None if this is the only one
        reads_memory: bool,  # whether members of one host may read each other's memory
    ) -> None:
        self._links = links
        self._reads = None if links is None else Reads(*links.place, links, reads_memory)
        # For regions that do not lie in one piece.
        self._packed, self._arriving = _Memory(), _Memory()

    def bring(
        self,
        call: Call,  # what this is for
        share: Array,  # what this member has
        boxes: Mapping[int, Box],  # what each other member gets of it, by its rank
        targets: Mapping[int, Array],  # where that belongs which each of them gives
        local: Local | None = None,  # what stays here
    ) -> None:
        """Give other members regions of a share, and get those that they give."""
        self.give(call, {rank: share[box_slices(box)] for rank, box in boxes.items()}, targets)
        if local is not None:
            NUMPY.permute_into(local.target, share[box_slices(local.box)], call.axes)

    def prepare(self) -> None:
        """Find out, once, who reads whose memory. All members must call this at the same time.

        From then on only those take part in an exchange that have something for each other.
        """
        if self._reads is not None:
            self._reads.try_all()

    def give(self, call: Call, regions: Mapping[int, Array], targets: Mapping[int, Array]) -> None:
        """Do the same with regions that lie anywhere."""
        links = self._links
        if links is None:
            return
        readers, read = set[int](), set[int]()
        if self._reads is not None and call.mean_elements * call.dtype.itemsize >= LEAST_BYTES:
            readers, read = self._read(links, self._reads, call, regions, targets)
        sent = {rank: region for rank, region in regions.items() if rank not in readers}
        sends: dict[int, Buffer] = dict.fromkeys(read, b"")  # who waits for that
        sends |= {rank: _bytes_of(region) for rank, region in self._in_one_piece(sent, call.dtype)}
        targets = {rank: target for rank, target in targets.items() if rank not in read}
        in_place = call.axes == tuple(sorted(call.axes))
        direct = {r for r, target in targets.items() if in_place and target.flags.c_contiguous}
        others = [rank for rank in targets if rank not in direct]
        shapes = [call.shape_before(targets[rank].shape) for rank in others]
        arriving = dict(zip(others, self._arriving.arrays(shapes, call.dtype), strict=True))
        receives: dict[int, Buffer | None] = {rank: bytearray() for rank in readers}
        receives |= {r: _bytes_of(arriving.get(r, target)) for r, target in targets.items()}
        begin_in_order(links, call.order, call.text, sends, receives)()
        for rank in others:
            NUMPY.permute_into(targets[rank], arriving[rank], call.axes)

    def _in_one_piece(
        self, regions: Mapping[int, Array], dtype: DType
    ) -> Iterator[tuple[int, Array]]:
        scattered = [rank for rank, region in regions.items() if not region.flags.c_contiguous]
        shapes = [regions[rank].shape for rank in scattered]
        packed = dict(zip(scattered, self._packed.arrays(shapes, dtype), strict=True))
        for rank, region in regions.items():
            if rank in packed:
                NUMPY.permute_into(packed[rank], region, range(region.ndim))
            yield rank, packed.get(rank, region)

    def _read(
        self,
        links: Links,
        reads: Reads,
        call: Call,
        regions: Mapping[int, Array],
        targets: Mapping[int, Array],
    ) -> tuple[set[int], set[int]]:
        """Read from others; return the members that read here, and those that were read."""
        reads.try_all()
        places = {rank: reads.place_for(rank, region) for rank, region in regions.items()}
        told = {rank: place for rank, place in places.items() if place is not None}
        length = place_bytes(len(call.axes))
        asked = {rank: bytearray(length) for rank in targets if reads.reads_from(rank)}
        found = links.exchange(f"{call.text}, places", told, dict(asked))
        read = {rank: place for rank, place in found.items() if any(place)}
        for rank in call.in_turn(links, read):
            target = targets[rank]
            shape = call.shape_before(target.shape)
            region = reads.read(rank, read[rank], shape, target, call.axes, self._arriving_bytes)
            links.count(rank, target.nbytes)
            if region is not None:
                NUMPY.permute_into(target, region, call.axes)
        return {rank for rank, place in told.items() if any(place)}, {*read}

    def _arriving_bytes(self, size_bytes: int) -> Array:
        return self._arriving.arrays([(size_bytes,)], np.dtype(np.uint8))[0]


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


def _bytes_of(region: Array) -> Buffer:
    """Return the bytes of an array that lies in one piece."""
    flat = region.reshape(-1)
    return memoryview(flat.view(np.uint8)) if region.nbytes else bytearray()
