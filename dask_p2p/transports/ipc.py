"""``ipc``: regions read in place, between GPUs of one host, through CUDA IPC.

A descriptor holds the handle of the allocation that a block lies in, and its place there. A reader
maps the allocation into its own process (once: mappings are kept) and hands out arrays that lie in
the holder's memory. The reader's queue fetches them over NVLink or PCIe, part by part.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any, ClassVar

from dask_p2p.backends import SLOTS
from dask_p2p.backends.device import wait_until_written
from dask_p2p.config import NOT_IN_AUTO, Options, Section, option, section, size_bytes
from dask_p2p.errors import DeviceLostError, Obstacle, TransferError
from dask_p2p.transports import cuda_ipc
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.descriptor import Descriptor, Peer
from dask_p2p.transports.directory import Lease
from dask_p2p.transports.flow_control import FlowControl
from dask_p2p.transports.reading import Request
from dask_p2p.transports.requests import checked_integer
from dask_p2p.transports.same_host import SameHostTransport
from dask_p2p.transports.same_host_reading import ArrayBlock, LeasedBlock, SameHostReading
from dask_p2p.types import Array, Kind

__all__ = ["IpcOptions", "IpcReading", "IpcTransport"]

_SMALLEST_SLOT_BYTES = 2**16  # below, a copy engine takes longer to start than a kernel to read


@section("transports.ipc")
@dataclass(frozen=True, slots=True)
class IpcOptions(Section):
    """See p2p-schema.yaml."""

    staging_bytes: int = option("staging-bytes", size_bytes)


class IpcTransport(SameHostTransport):
    """Blocks of GPUs of this host, mapped by CUDA IPC. `Peer.memory` is the GPU's UUID, in hex."""

    name: ClassVar[str] = "ipc"
    kind: ClassVar[Kind] = "cupy"
    kinds: ClassVar[tuple[str, ...]] = ("cupy",)
    in_place: ClassVar[bool] = True

    # --- flow control ---

    @classmethod
    def rank(cls, kind: Kind, options: Options) -> float:
        return 10 if kind == cls.kind else NOT_IN_AUTO

    @classmethod
    def beside_bytes(cls, options: Options, kind: Kind) -> int:
        """Return what the slots of a queue may take: half at most, for other routes too."""
        return min(IpcOptions.of(options).staging_bytes, options.staging_limit_bytes // 2)

    @classmethod
    def flow_control(cls, options: Options, kind: Kind) -> FlowControl:
        """Return parts as large as a slot of the queue; what is requested is there at once."""
        slot_bytes = cls.beside_bytes(options, kind) // SLOTS
        return FlowControl(
            slot_bytes if slot_bytes >= _SMALLEST_SLOT_BYTES else None, parts_in_flight=0
        )

    @classmethod
    def staging_bytes(
        cls, options: Options, kind: Kind, largest_bytes: int, remote_bytes: int, item_bytes: int
    ) -> int:
        return SLOTS * min(cls.flow_control(options, kind).part_bytes or 0, largest_bytes)

    # --- both sides ---

    def __init__(self, host: WorkerContext, options: Options) -> None:
        super().__init__(host, options)
        self.mappings = cuda_ipc.Mappings()
        self.reading = partial(IpcReading, self.mappings)

    def describe_memory(self) -> str:
        return cuda_ipc.gpu_uuid()

    def memory_obstacle(self, local: Peer, remote: Peer) -> Obstacle | None:
        if not local.memory or not remote.memory:
            return Obstacle("no-gpu", "one of the two has no GPU", "Run one worker a GPU")
        return cuda_ipc.peer_obstacle(remote.memory)

    def wait_until_written(self, block: Array) -> None:
        wait_until_written([block], any_stream=self.options.any_producer_stream)

    def place_of(self, block: Array) -> dict[str, Any]:
        return asdict(cuda_ipc.export(block))

    def on_worker_left(self, holder: str) -> None:
        known = self._peers.get(holder)
        super().on_worker_left(holder)
        if known is not None:
            self.mappings.retire(known[0].folder)
            self.offload(self.mappings.close_unused)

    def usage(self) -> dict[str, int]:
        return {**super().usage(), "mapped": len(self.mappings)}

    async def close(self) -> None:
        await super().close()
        with suppress(DeviceLostError):  # what was mapped is gone with it
            await self.host.offload(self.mappings.close)


class IpcReading(SameHostReading):
    """Blocks that are mapped, and read where they lie."""

    transport: ClassVar[str] = "ipc"
    kind: ClassVar[Kind] = "cupy"
    is_tapered: ClassVar[bool] = True

    def __init__(self, mappings: cuda_ipc.Mappings, *args: Any) -> None:
        super().__init__(*args)
        self._mappings = mappings

    def open_leased(self, descriptor: Descriptor, block: Request, lease: Lease) -> LeasedBlock:
        try:
            place = _checked_place(tuple(descriptor.place.items()))
        except (AttributeError, TypeError, ValueError) as exc:
            raise TransferError(f"ipc: the descriptor of {block} cannot be read: {exc}") from exc
        if place.gpu != self.peer.memory and (obstacle := cuda_ipc.peer_obstacle(place.gpu)):
            raise TransferError(f"ipc: {block} is on another GPU than its holder's: {obstacle}")
        block_bytes = prod(block.shape) * block.dtype.itemsize
        mapping = self._mappings.acquire(self.peer.folder, place, block_bytes)
        try:
            array = cuda_ipc.array_at(
                mapping.address + place.offset_bytes,
                descriptor.shape,
                descriptor.strides,
                block.dtype,
            )
        except BaseException:
            self._mappings.release(mapping)
            raise
        return ArrayBlock(array, block, lease, partial(self._mappings.release, mapping))


@lru_cache(maxsize=1024)  # tasks of a worker read the same blocks, one task after the other
def _checked_place(fields: tuple[tuple[str, Any], ...]) -> cuda_ipc.Place:
    place = cuda_ipc.Place(**dict(fields))
    bytes.fromhex(place.handle)
    checked_integer("buffer_id", place.buffer_id, 0, 2**64)
    checked_integer("offset_bytes", place.offset_bytes, 0, 2**63)
    return place
