"""A GPU with local blocks: its streams, and the exchanges between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from dask_p2p.config import Options
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.exchange.lending import Lending
from dask_p2p.sections.exchange.regions import ExchangeCall, HaloMover, RegionMover
from dask_p2p.sections.gpu.halo_windows import HaloWindows
from dask_p2p.sections.gpu.lending import GpuLending
from dask_p2p.sections.gpu.messages import MessageLender
from dask_p2p.sections.gpu.regions import GpuRegions
from dask_p2p.sections.gpu.streams import GpuStreams
from dask_p2p.sections.wire.connections import ONE_RANK, Connections
from dask_p2p.transports.cuda_ipc import ipc_part_bytes
from dask_p2p.types import Kind


class Gpu(GpuStreams):
    """The GPU of a rank, with its exchanges."""

    def __init__(
        self,
        connections: Connections = ONE_RANK,
        has_windows: bool = True,
        part_bytes: int = 0,
    ) -> None:
        super().__init__(connections, has_windows, part_bytes)
        if not connections.is_alone:
            connections.lender = MessageLender(self, connections)

    def halo_mover(self, calls: Sequence[ExchangeCall], connections: Connections) -> HaloMover:
        return HaloWindows(self, calls, connections)

    def region_mover(self, connections: Connections, reads_memory: bool) -> RegionMover:
        return GpuRegions(self, connections, reads_memory)

    def lending(self, connections: Connections) -> Lending | None:
        return GpuLending(self, connections)


def device_for(kind: Kind, options: Options, connections: Connections = ONE_RANK) -> Host:
    """Return the device of a rank's local blocks of this kind."""
    if kind == HOST.kind:
        return HOST
    return Gpu(connections, "ipc" in options.order(kind), ipc_part_bytes(options) or 0)
