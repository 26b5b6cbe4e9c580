"""Regions of shares in host memory: sent to other members, or read by them where they lie.

What is read is copied once, and never packed. A member tells where a region lies, the others read
it there, and say so. Until then it stays as it is. If a member is killed meanwhile its memory ends,
or is another's: what was read then is thrown away with the attempt, since the link has ended too.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from dask_p2p.backends.numpy import NUMPY
from dask_p2p.geometry import Box, box_slices
from dask_p2p.interprocess import process_memory
from dask_p2p.plans.orders import partners
from dask_p2p.sections.link import AttemptEndedError, Buffer
from dask_p2p.sections.links import Links
from dask_p2p.sections.staged import begin_in_order
from dask_p2p.types import Array, DType

LEAST_BYTES = 1 << 16  # of the parts that two members exchange: messages are quicker below
_LEAST_RUN_BYTES = 256  # of one row of a region; to pack shorter ones is quicker
_PROOF = struct.Struct(
    f"<QQ{process_memory.TOKEN_BYTES}s"
)  # process, address of the token, the token


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

    def settle(self) -> None:
        """Have the share as free as before. Here nobody reads it any more."""

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


def place_bytes(ndim: int) -> int:
    """Return how long it is to tell where a region lies."""
    return 8 * (1 + ndim)


class Reads:
    """Which members read whose memory."""

    def __init__(
        self,
        rank: int,  # which member this is
        size: int,  # of how many
        links: Links,  # between them
        is_allowed: bool,  # whether this one's memory may be read, and this one reads
    ) -> None:
        self._rank, self._size, self._links = rank, size, links
        self._is_allowed = is_allowed and process_memory.is_supported()
        self._token = process_memory.new_token()
        self._pids: list[int] = []  # by rank, as soon as members have tried
        self._readers: Any = None  # of each member, whether each other reads it

    def try_all(self) -> None:
        """Find out, once, who can read whom. All members must call this at the same time."""
        if self._readers is not None:
            return
        proof = bytes(_PROOF.size)
        if self._is_allowed:
            process_memory.allow_readers()
            proof = _PROOF.pack(os.getpid(), self._token.ctypes.data, self._token.tobytes())
        proofs = self._links.gather("whether members read each other's memory", proof)
        self._pids = [_PROOF.unpack(each)[0] for each in proofs]
        row = bytes(self._sees(rank, proofs[rank]) for rank in range(self._size))
        rows = self._links.gather("whose memory members read", row)
        self._readers = np.array([np.frombuffer(each, bool) for each in rows]).T

    def _sees(self, rank: int, proof: Any) -> bool:
        pid, address, token = _PROOF.unpack(proof)
        own = rank == self._rank or self._links.is_on_other_host(rank)
        if own or not (pid and self._is_allowed):
            return False
        try:
            return process_memory.holds(pid, address, token)
        except (OSError, OverflowError):
            return False

    def reads_from(self, holder: int) -> bool:
        """Return whether this member reads that one's memory."""
        return bool(self._readers[holder, self._rank])

    def place_for(self, reader: int, region: Array) -> bytes | None:
        """Return where that member reads a region; None if it gets a message."""
        if not self._readers[self._rank, reader]:
            return None
        shape, strides = region.shape, region.strides
        if process_memory.run_bytes_of(shape, strides, region.itemsize) < _LEAST_RUN_BYTES:
            return bytes(place_bytes(region.ndim))
        return struct.pack(f"<Q{region.ndim}q", region.ctypes.data, *strides)

    def read(
        self,
        holder: int,  # whose it is
        place: Any,  # where it lies there
        shape: Sequence[int],
        into: Array,  # where it belongs
        axes: Sequence[int],  # axis i there is axis axes[i] of the region
        memory_of: Callable[[int], Any],  # for so many bytes that cannot be read to there
    ) -> Array | None:
        """Read a region to where it belongs; return it if it has still to be copied there."""
        address, *strides = struct.unpack(f"<Q{len(shape)}q", place)
        pid, dtype = self._pids[holder], into.dtype
        try:
            runs = process_memory.runs_of(address, tuple(shape), tuple(strides), dtype.itemsize)
            if list(axes) == sorted(axes) and process_memory.read_into(pid, runs, into):
                return None
            memory = memory_of(len(runs.addresses) * runs.run_bytes)
            region = process_memory.read(pid, runs, dtype, memory)
        except (OSError, OverflowError) as exc:
            raise AttemptEndedError(f"memory of member {holder} cannot be read: {exc}") from exc
        return np.broadcast_to(region, tuple(shape))


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
