"""``ipc``: regions read in place between GPUs of one host, by CUDA IPC.

A descriptor holds the IPC handle of a block's allocation, and the block's offset in it. A reader
maps the allocation into its own process once, and keeps the mapping. Its regions are arrays in the
holder's memory. The reader's queue copies them over NVLink or PCIe, part by part.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from math import prod
from typing import Any, ClassVar

from dask_p2p.backends import SLOTS
from dask_p2p.backends.device import wait_until_written
from dask_p2p.config import Options, TransportOptions
from dask_p2p.errors import DeviceLostError, Obstacle, TransferError
from dask_p2p.interprocess import cuda_ipc
from dask_p2p.interprocess.ipc_options import IpcOptions, ipc_part_bytes
from dask_p2p.interprocess.peer import Peer
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.footprint import Footprint
from dask_p2p.transports.in_place.reading import (
    Descriptor,
    DirectoryOptions,
    ReadRegion,
    SameHostReading,
    regions_of,
)
from dask_p2p.transports.in_place.same_host import SameHostTransport
from dask_p2p.types import Array, Kind

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
    sections: ClassVar[tuple[type[TransportOptions], ...]] = (IpcOptions, DirectoryOptions)

    @classmethod
    def footprint(cls, options: Options, kind: Kind) -> Footprint:
        """Return a footprint with one part for each slot of the queue."""
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
        wanted, peer = reading.requests[number], reading.peer
        ipc_handle = cuda_ipc.IpcHandle(**descriptor.address)
        if ipc_handle.gpu != peer.memory_proof and (
            obstacle := cuda_ipc.peer_obstacle(ipc_handle.gpu)
        ):
            raise TransferError(f"{wanted} is on another GPU than its holder's: {obstacle}")
        block_bytes = prod(wanted.shape) * wanted.dtype.itemsize
        mapping = self.mappings.acquire(peer, ipc_handle, block_bytes)
        reading.ending[number].callback(self.mappings.release, mapping)
        address = mapping.address + ipc_handle.offset_bytes
        strides = descriptor.strides
        return regions_of(cuda_ipc.array_at(address, wanted.shape, strides, wanted.dtype))

    def on_worker_left(self, holder: str) -> None:
        known = self._peers.get(holder)
        super().on_worker_left(holder)
        if known is not None:
            self.mappings.retire(known[0].process)
            self.worker.loop.call_later(_ENDING_S, self._close_unused)

    def _close_unused(self) -> None:
        if not self.is_closed:
            self.offload(self.mappings.close_unused)

    async def close(self) -> None:
        await super().close()
        with suppress(DeviceLostError):  # the mappings are gone with the device
            await self.worker.offload(self.mappings.close)
