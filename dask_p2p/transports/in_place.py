"""``cma``: regions of NumPy blocks, read from the memory of another process on this host.

It uses cross-memory attach (see `process_memory`), as MPI libraries and UCX do between processes of
one host. A descriptor holds a block's address. The reader copies parts of the block that fit into
a processor's cache, and permutes each from there. The holder neither packs nor sends.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import asdict
from math import prod
from typing import Any, ClassVar

import numpy as np

from dask_p2p.backends import SLOTS
from dask_p2p.backends.device import wait_until_written
from dask_p2p.config import Options
from dask_p2p.errors import DeviceLostError, Obstacle, TransferError
from dask_p2p.geometry import Box, box_shape, box_size
from dask_p2p.transports import cuda_ipc, process_memory
from dask_p2p.transports.base import Request, WorkerContext
from dask_p2p.transports.buffers import Buffers, Footprint, part_that_fits
from dask_p2p.transports.cuda_ipc import ipc_part_bytes
from dask_p2p.transports.process_memory import Peer, RemoteArray
from dask_p2p.transports.same_host import (
    Descriptor,
    ReadRegion,
    SameHostReading,
    SameHostTransport,
    regions_of,
)
from dask_p2p.types import Array, Kind

# A run costs the kernel as much as 150 additional bytes. Per byte, comm takes four times as long
# as cma.
_SHORT_RUN_BYTES = 128
_PART_BYTES = 2**20  # fits into the second-level cache of a core
_MOST_PART_BYTES = 2**30  # a system call reads 2 GiB at most
_MOST_SHORT_RUNS = 2**14  # up to this number, a request of comm takes longer


class CmaTransport(SameHostTransport):
    """Transport of NumPy blocks between processes of one host.

    `Peer.memory_proof` is the address and the value of a random token, both in hex. If a reader
    finds the token at the address, it has the right process and may read its memory.
    """

    name: ClassVar[str] = "cma"
    kinds: ClassVar[tuple[str, ...]] = ("numpy",)

    @classmethod
    def footprint(cls, options: Options, kind: Kind) -> Footprint:
        part_bytes = min(options.part_bytes or _PART_BYTES, _MOST_PART_BYTES)
        most_bytes = max(1, options.staging_limit_bytes // 2)  # rest: parts from other hosts
        return Footprint(part_that_fits(part_bytes, most_bytes), 0, parts_idle=2)

    # --- both sides ---

    def __init__(self, worker: WorkerContext, options: Options) -> None:
        super().__init__(worker, options)
        self.buffers = Buffers("numpy", self.footprint(options, "numpy").idle_bytes(options))
        self.pools.append(self.buffers)

    def holder_obstacle(self, holder: str) -> Obstacle | None:
        if not process_memory.is_supported():
            return Obstacle("unsupported", "this system has no cross-memory attach")
        return super().holder_obstacle(holder)

    def memory_proof(self) -> str:
        address, token = process_memory.own_token()
        return f"{address:x} {token.hex()}"

    def memory_obstacle(self, local: Peer, remote: Peer) -> Obstacle | None:
        try:
            address, token = remote.memory_proof.split()
            proof = int(address, 16), bytes.fromhex(token)
        except ValueError as exc:
            return Obstacle("forbidden", f"its memory has no valid token: {exc}")
        return process_memory.obstacle(remote.pid, *proof)

    def address_of(self, block: Array) -> dict[str, Any]:
        return {"address": block.ctypes.data}

    def regions(self, descriptor: Descriptor, reading: SameHostReading, number: int) -> ReadRegion:
        request, address = reading.requests[number], descriptor.address["address"]
        _check_runs(request, descriptor)
        unread = sum(map(_weight, request.boxes))

        def read(box: Box, timeout_s: float | None, into: Array | None) -> Any:
            nonlocal unread
            if number not in reading.ending:
                raise TransferError(f"{request} was closed before it was read")
            shape, strides, pid = box_shape(box), descriptor.strides, reading.peer.pid
            start = address + sum(n * s for (n, _), s in zip(box, strides, strict=True))
            remote_array = RemoteArray(pid, start, shape, strides, request.dtype)
            try:
                if 0 in shape:
                    region: Any = np.empty(shape, request.dtype)
                else:
                    region = remote_array.read(into, lambda n: self.buffers.take((n,), np.uint8))
            except (OSError, OverflowError) as exc:
                reading.confirm()
                if getattr(exc, "errno", None) == errno.ESRCH:
                    message = f"{request.holder} ended while {request} was read"
                    raise TransferError(message, scope="block") from exc
                raise TransferError(f"{request} cannot be read: {exc}") from exc
            unread -= _weight(box)
            if not unread:
                # All regions have been read: the holder need not keep its block any longer.
                reading.confirm()
                reading.end(number)
            return region

        return read


def _weight(box: Box) -> int:
    """Return a region's weight in the count of unread elements. Empty regions count as 1."""
    return max(1, box_size(box))


def _check_runs(block: Request, descriptor: Descriptor) -> None:
    """Raise `TransferError` if the requested elements are in too many short runs of memory."""
    itemsize = block.dtype.itemsize
    largest = box_shape(max(block.boxes, key=box_size))
    run_bytes = process_memory.run_bytes_of(largest, descriptor.strides, itemsize)
    nbytes = sum(map(box_size, block.boxes)) * itemsize
    if run_bytes < _SHORT_RUN_BYTES and nbytes > _MOST_SHORT_RUNS * run_bytes:
        raise TransferError(
            f"the requested regions of {block} lie in memory in runs of {run_bytes} bytes",
            scope="region",
        )


# ``ipc``: regions read in place between GPUs of one host, by CUDA IPC.
#
# A descriptor holds the IPC handle of a block's allocation, and the block's offset in it. A reader
# maps the allocation into its own process once, and keeps the mapping. Its regions are arrays in
# the holder's memory. The reader's queue copies them over NVLink or PCIe, part by part.

# Delay between a worker's departure and the closing of its mappings, so that its process can exit.
# Earlier, closing could wait for a GPU that waits for the process.
_ENDING_S = 1.0


class IpcTransport(SameHostTransport):
    """Transport of CuPy blocks between GPUs of one host, mapped by CUDA IPC.

    `Peer.memory_proof` is the GPU's UUID.
    """

    name: ClassVar[str] = "ipc"
    kinds: ClassVar[tuple[str, ...]] = ("cupy",)
    in_place: ClassVar[bool] = True

    @classmethod
    def footprint(cls, options: Options, kind: Kind) -> Footprint:
        part_bytes = ipc_part_bytes(options)
        return Footprint(part_bytes, SLOTS - 1, parts_held=SLOTS, copies=SLOTS, is_buffered=False)

    # --- both sides ---

    def __init__(self, worker: WorkerContext, options: Options) -> None:
        super().__init__(worker, options)
        self.mappings = cuda_ipc.MAPPINGS

    def memory_proof(self) -> str:
        return cuda_ipc.gpu_uuid()

    def memory_obstacle(self, local: Peer, remote: Peer) -> Obstacle | None:
        return cuda_ipc.memory_obstacle(local, remote)

    def address_of(self, block: Array) -> dict[str, Any]:
        wait_until_written([block], any_stream=self.options.any_producer_stream)
        return asdict(cuda_ipc.export(block))

    def regions(self, descriptor: Descriptor, reading: SameHostReading, number: int) -> ReadRegion:
        request, peer = reading.requests[number], reading.peer
        ipc_handle = cuda_ipc.IpcHandle(**descriptor.address)
        if ipc_handle.gpu != peer.memory_proof and (
            obstacle := cuda_ipc.peer_obstacle(ipc_handle.gpu)
        ):
            raise TransferError(f"{request} is on another GPU than its holder's: {obstacle}")
        block_bytes = prod(request.shape) * request.dtype.itemsize
        mapping = self.mappings.acquire(peer, ipc_handle, block_bytes)
        reading.ending[number].callback(self.mappings.release, mapping)
        address = mapping.address + ipc_handle.offset_bytes
        strides = descriptor.strides
        return regions_of(cuda_ipc.array_at(address, request.shape, strides, request.dtype))

    def on_worker_left(self, holder: str) -> None:
        description = self._peers.get(holder)
        super().on_worker_left(holder)
        if description is not None:
            self.mappings.retire(description[0].process)
            self.worker.loop.call_later(_ENDING_S, self._close_unused)

    def _close_unused(self) -> None:
        if not self.is_closed:
            self.offload(self.mappings.close_unused)

    async def close(self) -> None:
        await super().close()
        with suppress(DeviceLostError):  # the mappings are gone with the device
            await self.worker.offload(self.mappings.close)
