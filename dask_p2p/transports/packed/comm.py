"""``comm``: packed regions over Dask's own connections, between any two workers.

The reply contains the regions, sent by Dask's serialisation and protocol (tcp, tls, ucx, inproc).
GPU regions are sent from device memory if the protocol supports this (ucx), otherwise from host
memory.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

from distributed.protocol import to_serialize

from dask_p2p.backends import Queue, backend_for, backend_named
from dask_p2p.config import Options, TransportOptions, option, positive_bytes, positive_int, section
from dask_p2p.geometry import box_size
from dask_p2p.transports.footprint import Footprint, left_bytes, parts_held
from dask_p2p.transports.packed.base import Asked, PackedTransport, Target
from dask_p2p.types import Array, Kind


@section("transports.comm")
class CommOptions(TransportOptions):
    """See p2p-schema.yaml."""

    part_bytes: int = option("part-bytes", positive_bytes)
    parts_in_flight: int = option("parts-in-flight", positive_int)


class CommTransport(PackedTransport):
    """Transport of regions in the replies of RPCs."""

    name: ClassVar[str] = "comm"
    converts: ClassVar[bool] = True
    moves_objects: ClassVar[bool] = True
    sections: ClassVar[tuple[type[TransportOptions], ...]] = (CommOptions,)

    @classmethod
    def footprint(cls, options: Options, kind: Kind) -> Footprint:
        """Return a footprint with parts of the configured size, or the largest size that fits."""
        own, on_device = CommOptions.of(options), backend_named(kind).on_device
        held = parts_held(own.parts_in_flight, kind) + on_device  # one more in host memory
        part_bytes = max(1, min(own.part_bytes, left_bytes(options, kind) // held))
        return Footprint(
            part_bytes,
            own.parts_in_flight,
            parts_held=held,
            parts_packed=own.parts_in_flight + 1,
            copies=2 if on_device else 1,
            is_buffered=False,
            comes_in_batches=True,
        )

    def probe(self, holder: str, kind: Kind) -> None:
        """Do nothing: Dask itself uses these connections, so that they need no probe."""

    async def target(self, asked: Asked, where: Any) -> Target:
        return Reply(self.worker.address)

    def own_bytes(self, asked: Asked) -> list[int]:
        return [box_size(box) * asked.item_bytes for _, box in asked.parts]


class Reply(Target):
    """A reply that contains the regions."""

    def __init__(self, address: str) -> None:
        self._protocol = address.partition("://")[0]

    def pack(self, number: int, queue: Queue, region: Array) -> Array:
        on_device = backend_for(region).on_device
        if not on_device and region.flags.c_contiguous:
            return region
        packed = queue.scratch(region.shape, region.dtype)
        queue.pack(packed, region)()
        if on_device and not self._protocol.startswith("ucx"):
            # On this thread: serialisation would copy it on the event loop.
            packed = queue.to_host(packed)
        if self._protocol != "inproc":  # with inproc the reader owns the array from now on
            # Dask drops its reference after sending.
            weakref.finalize(packed, self.reserved.pop(number)).atexit = False
        return packed

    def payload(self, packed: Array) -> dict[str, Any]:
        return {"data": to_serialize(packed)}
