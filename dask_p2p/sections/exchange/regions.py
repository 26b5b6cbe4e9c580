"""Regions of local blocks in host memory: sent in messages, or read in place by other ranks.

A region that is read in place is copied once, and never packed. Its holder sends the address, the
readers copy the region and acknowledge. Until then the holder does not change it. If the holder is
killed, a reader may copy arbitrary bytes. They are dropped with the attempt, because the connection
fails as well.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.geometry import Box, Layout, box_slices
from dask_p2p.interprocess import process_memory
from dask_p2p.sections.exchange.movers import ExchangeCall, RegionMover
from dask_p2p.sections.exchange.staged import begin_in_order
from dask_p2p.sections.wire.connection import AttemptEndedError, Buffer
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array, DType


class RegionExchange(RegionMover):
    """Exchanges regions of local blocks in host memory between ranks."""

    def __init__(
        self,
        connections: Connections,  # connections to other ranks
        reads_memory: bool,  # whether ranks of one host may read each other's memory
    ) -> None:
        self._connections = connections
        self._reads = Reads(connections, reads_memory and not connections.is_alone)
        # Buffers for regions that are not contiguous.
        self._packed, self._arriving = _Memory(), _Memory()

    def bring(self, call: ExchangeCall, source: Array, target: Array) -> None:
        own = call.exchange
        self.give(call, regions_of(source, own.sends), regions_of(target, own.receives))
        for src, dst in own.local:
            NUMPY.permute_into(target[box_slices(dst)], source[box_slices(src)], own.axes)

    def settle(self) -> None:
        pass  # `bring` has waited

    def prepare(self) -> None:
        """Probe, once, which ranks read each other's memory. A collective call of all ranks.

        Later exchanges involve only ranks that have data for each other.
        """
        self._reads.try_all()

    def give(
        self, call: ExchangeCall, regions: Mapping[int, Array], targets: Mapping[int, Array]
    ) -> None:
        """Exchange regions of any arrays with other ranks."""
        if self._connections.is_alone:
            return
        readers, read = set[int](), set[int]()
        if call.mean_elements * call.dtype.itemsize >= tuning.current.read_bytes:
            readers, read = self._read(call, regions, targets)
        sent = {rank: region for rank, region in regions.items() if rank not in readers}
        sends: dict[int, Buffer] = dict.fromkeys(read, b"")  # acknowledgements, by holder
        sends |= {rank: _bytes_of(region) for rank, region in self._in_one_piece(sent, call.dtype)}
        targets = {rank: target for rank, target in targets.items() if rank not in read}
        in_place = call.exchange.axes == tuple(sorted(call.exchange.axes))
        direct = {r for r, target in targets.items() if in_place and target.flags.c_contiguous}
        others = [rank for rank in targets if rank not in direct]
        shapes = [call.exchange.shape_before(targets[rank].shape) for rank in others]
        arriving = dict(zip(others, self._arriving.arrays(shapes, call.dtype), strict=True))
        receives: dict[int, Buffer | None] = {rank: bytearray() for rank in readers}
        receives |= {r: _bytes_of(arriving.get(r, target)) for r, target in targets.items()}
        begin_in_order(self._connections, call.order, call.text, sends, receives)()
        for rank in others:
            NUMPY.permute_into(targets[rank], arriving[rank], call.exchange.axes)

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
        self, call: ExchangeCall, regions: Mapping[int, Array], targets: Mapping[int, Array]
    ) -> tuple[set[int], set[int]]:
        """Read regions in place; return the ranks that read here, and the ranks read from."""
        connections, reads = self._connections, self._reads
        reads.try_all()
        own = {rank: reads.descriptor_for(rank, region) for rank, region in regions.items()}
        descriptors = {rank: each for rank, each in own.items() if each is not None}
        axes = call.exchange.axes
        length = descriptor_bytes(len(axes))
        asked = {rank: bytearray(length) for rank in targets if reads.reads_from(rank)}
        found = connections.exchange(f"{call.text}, descriptors", descriptors, dict(asked))
        read = {rank: descriptor for rank, descriptor in found.items() if any(descriptor)}
        for rank in call.in_turn(connections, read):
            target = targets[rank]
            shape = call.exchange.shape_before(target.shape)
            region = reads.read(rank, read[rank], shape, target, axes, self._arriving_bytes)
            connections.count(rank, target.nbytes)
            if region is not None:
                NUMPY.permute_into(target, region, axes)
        return {rank for rank, descriptor in descriptors.items() if any(descriptor)}, {*read}

    def _arriving_bytes(self, size_bytes: int) -> Array:
        return self._arriving.arrays([(size_bytes,)], np.dtype(np.uint8))[0]


def regions_of(array: Array, boxes: Mapping[int, Sequence[Box]]) -> dict[int, Array]:
    """Return the only region of each rank."""
    return {rank: array[box_slices(box)] for rank, (box,) in boxes.items()}


def descriptor_bytes(ndim: int) -> int:
    """Return the size of the message with a region's address and strides."""
    return 8 * (1 + ndim)


class Reads:
    """Reads of other ranks' memory on one host."""

    def __init__(
        self,
        connections: Connections,
        is_allowed: bool,  # whether this rank reads others' memory, and offers its own
    ) -> None:
        self._connections, (self._rank, _) = connections, connections.rank_and_size
        self._is_allowed = is_allowed and process_memory.is_supported()
        self._pids: list[int] = []  # by rank, after the probe; 0: this rank cannot read it
        self._readers: Any = None  # by holder and reader: whether the reader can read

    def try_all(self) -> None:
        """Probe, once, which ranks can read which. A collective call of all ranks."""
        if self._readers is not None:
            return
        nothing = bytes(process_memory.PROOF_BYTES)
        proof = process_memory.own_proof() if self._is_allowed else nothing
        proofs = self._connections.gather("probe of memory reads", proof)
        self._pids = [self._readable_pid(rank, proof) for rank, proof in enumerate(proofs)]
        row = bytes(map(bool, self._pids))
        rows = self._connections.gather("results of the probe of memory reads", row)
        self._readers = np.array([np.frombuffer(each, bool) for each in rows]).T

    def _readable_pid(self, rank: int, proof: Any) -> int:
        is_near = rank != self._rank and not self._connections.is_on_other_host(rank)
        return process_memory.readable_pid(proof) if is_near and self._is_allowed else 0

    def reads_from(self, holder: int) -> bool:
        """Return whether this rank reads a holder's memory."""
        return bool(self._readers[holder, self._rank])

    def is_read_by(self, reader: int) -> bool:
        """Return whether a rank reads this rank's memory."""
        return bool(self._readers[self._rank, reader])

    def descriptor_for(self, reader: int, region: Array) -> bytes | None:
        """Return a region's address and strides for a reader; None if it cannot read here.

        All bytes are zero if the region's rows are too short: it is sent in a message then.
        """
        if not self.is_read_by(reader):
            return None
        shape, strides = region.shape, region.strides
        run_bytes = process_memory.run_bytes_of(shape, strides, region.itemsize)
        if run_bytes < tuning.current.read_run_bytes:
            return bytes(descriptor_bytes(region.ndim))
        return struct.pack(f"<Q{region.ndim}q", region.ctypes.data, *strides)

    def read(
        self,
        holder: int,  # rank of the holder
        descriptor: Any,  # address and strides there
        shape: Sequence[int],
        into: Array,  # destination
        axes: Sequence[int],  # axis i of the destination is axis axes[i] of the region
        memory_of: Callable[[int], Any],  # returns a buffer of a size, if one is needed
    ) -> Array | None:
        """Read a region into its destination. If that needs a copy, return the region instead."""
        address, *strides = struct.unpack(f"<Q{len(shape)}q", descriptor)
        layout = tuple(shape), tuple(strides), into.dtype
        there = process_memory.RemoteArray(self._pids[holder], address, *layout)
        try:
            region: Array = there.read(into if list(axes) == sorted(axes) else None, memory_of)
        except (OSError, OverflowError) as exc:
            raise AttemptEndedError(f"memory of rank {holder} cannot be read: {exc}") from exc
        return None if region is into else region

    def read_bytes(self, holder: int, address: int, into: Array) -> None:
        """Read contiguous bytes of another rank into contiguous memory."""
        descriptor = struct.pack("<Qq", address, 1)
        self.read(holder, descriptor, into.shape, into, (0,), NUMPY.allocate)


class _Memory:
    """Reused buffer that grows to the largest exchange."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def arrays(self, shapes: Sequence[tuple[int, ...]], dtype: DType) -> list[Array]:
        """Return arrays in the buffer, one after the other."""
        layout = Layout(shapes, dtype.itemsize)
        if self._bytes.nbytes < layout.size_bytes:
            self._bytes = np.empty(layout.size_bytes, np.uint8)
        return layout.views(self._bytes, dtype)


def _bytes_of(region: Array) -> Buffer:
    """Return the bytes of a contiguous array."""
    flat = region.reshape(-1)
    return memoryview(flat.view(np.uint8)) if region.nbytes else bytearray()
