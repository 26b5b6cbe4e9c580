"""``comm``: regions over Dask's own connections, between any two workers.

A reader asks a holder by one RPC for several parts at a time, of any of its blocks. The holder
packs each part into contiguous memory, and sends all of them as the reply. Dask's serialisation and
protocol (tcp, tls, ucx, inproc) do the rest. GPU regions are sent from device memory where the
protocol can (ucx), else through host memory.

With ``p2p.checksum`` the answer holds checksums too, of the packed bytes.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from distributed.protocol import to_serialize

from dask_p2p.backends import backend_for, backend_named, device_of
from dask_p2p.config import Options, Section, option, positive_bytes, positive_int, section
from dask_p2p.errors import Obstacle, TransferError
from dask_p2p.layout import Box, box_slices
from dask_p2p.transports.base import Handler, Transport, answers
from dask_p2p.transports.budget import LIMIT_REACHED
from dask_p2p.transports.checksums import region_sum
from dask_p2p.transports.comm_reading import CommReading
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.flow_control import FlowControl, Pace, PackingLimits, parts_held
from dask_p2p.transports.reading import Reading, Request
from dask_p2p.transports.registry import left_bytes
from dask_p2p.transports.replies import find_block, refuse
from dask_p2p.transports.requests import (
    checked_blocks,
    checked_parts,
    checked_yes_or_no,
)
from dask_p2p.types import DType, Key, Kind

__all__ = ["CommOptions", "CommTransport"]

_PAUSE_S = 1e-3  # while the limit is reached


@section("transports.comm")
@dataclass(frozen=True, slots=True)
class CommOptions(Section):
    """See p2p-schema.yaml."""

    part_bytes: int = option("part-bytes", positive_bytes)
    parts_in_flight: int = option("parts-in-flight", positive_int)


class CommTransport(Transport):
    """Regions as answers to RPCs."""

    name: ClassVar[str] = "comm"
    reading: ClassVar[type[CommReading]] = CommReading

    # --- flow control ---

    @classmethod
    def rank(cls, kind: Kind, options: Options) -> float:
        return 90  # works always: the last resort

    @classmethod
    def flow_control(cls, options: Options, kind: Kind) -> FlowControl:
        """Parts are as large as is configured, or as fits."""
        own = CommOptions.of(options)
        most_bytes = left_bytes(options, kind) // cls._held(own.parts_in_flight, kind)
        return FlowControl(max(1, min(own.part_bytes, most_bytes)), own.parts_in_flight)

    @staticmethod
    def _held(in_flight: int, kind: Kind) -> int:
        """Count parts at a time: with CuPy blocks they are in host and then in device memory."""
        return parts_held(in_flight, kind) + backend_named(kind).on_device

    @classmethod
    def staging_bytes(
        cls, options: Options, kind: Kind, largest_bytes: int, remote_bytes: int, item_bytes: int
    ) -> int:
        flow = cls.flow_control(options, kind)  # small parts come together
        part_bytes = min(max(item_bytes, flow.part_bytes or 0), remote_bytes)
        copies = 2 if backend_named(kind).on_device else 1  # in host and in device memory
        return min(cls._held(flow.parts_in_flight, kind) * part_bytes, copies * remote_bytes)

    @classmethod
    def packing(cls, options: Options, kind: Kind) -> PackingLimits:
        flow = cls.flow_control(options, kind)
        each_bytes = (flow.parts_in_flight + 1) * (flow.part_bytes or 0)
        return PackingLimits(
            each_bytes, 2 if backend_named(kind).on_device else 1
        )  # it copies to the host

    # --- both sides ---

    def __init__(self, host: WorkerContext, options: Options) -> None:
        super().__init__(host, options)
        self._opened: set[CommReading] = set()  # by task threads
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)  # by holder

    def handlers(self) -> Mapping[str, Handler]:
        return {self.reading.op: self._serve}

    def obstacle(self, holder: str, kind: Kind, dtype: DType) -> Obstacle | None:
        return None

    def probe(self, holder: str, kind: Kind) -> None:
        """Do nothing: there is nothing to prove, since Dask itself uses these connections."""

    def read(self, requests: Sequence[Request], options: Options) -> Reading:
        pace, flow = self._paces[requests[0].holder], self.flow_for(requests, options)
        flow = replace(flow, part_bytes=min(flow.part_bytes or pace.most_bytes, pace.most_bytes))
        reading = self.reading(self.host, requests, flow, options, self._opened.discard, pace)
        self._opened.add(reading)
        return reading

    def usage(self) -> dict[str, int]:
        return {
            "opened": len(self._opened),
            "requested": sum(reading.under_way for reading in list(self._opened)),
            "serving": self.serving,
        }

    def on_worker_left(self, holder: str) -> None:
        self._paces.pop(holder, None)

    async def close(self) -> None:
        self.is_closed = True

    @answers
    async def _serve(self, *, blocks: Any, parts: Any, checksum: Any = False) -> dict[str, Any]:
        """Answer one request. Blocks are referenced, and so leased, until they are sent."""
        blocks = checked_blocks(blocks)
        parts = checked_parts(parts, [shape for _, shape in blocks])
        return {"parts": await self._packed(blocks, parts, checked_yes_or_no("checksum", checksum))}

    async def _packed(
        self, blocks: Sequence[tuple[Any, Any]], parts: Sequence[tuple[int, Box]], checksum: bool
    ) -> list[dict[str, Any]]:
        """Return answers for the first parts: as many as there is room for, but at least one."""
        deadline_s = time.monotonic() + self.options.request_timeout_s
        while True:
            answers = await self.host.offload(self._pack_some, blocks, parts, checksum)
            if answers or not parts:
                return answers
            if time.monotonic() > deadline_s:
                raise TransferError(LIMIT_REACHED)
            await asyncio.sleep(_PAUSE_S)

    def _pack_some(
        self, blocks: Sequence[tuple[Any, Any]], parts: Sequence[tuple[int, Box]], checksum: bool
    ) -> list[dict[str, Any]]:
        """Pack the parts for which there is room now; for a block that fails, the error."""
        answers: list[dict[str, Any]] = []
        for number, box in parts:
            key, shape = blocks[number]
            try:
                region = self._pack(key, box, shape)
                if region is None:
                    break
                answer: dict[str, Any] = {"status": "ok", "data": to_serialize(region)}
                if checksum:
                    # By what is sent: the reader gets it in the same kind of memory.
                    algorithm = backend_for(region).checksum_algorithm
                    answer["checksum"] = (algorithm, region_sum(key, box, region, algorithm))
            except Exception as exc:
                answer = refuse(exc)
            answers.append(answer)
        return answers

    def _pack(self, key: Key, box: Box, shape: tuple[int, ...]) -> Any:
        """Pack a region; return None if there is no room for it now."""
        block = find_block(self.host, key, shape)  # the box lies in the shape, and so in the block
        region = block[box_slices(box)]
        backend = backend_for(block)
        if not backend.on_device and region.flags.c_contiguous:
            return region
        # Copying to the host here keeps Dask's serialisation from doing it on the event loop.
        to_host = backend.on_device and not self.host.address.startswith("ucx")
        reserved = self.packed.reservation()
        if not reserved.reserve(region.nbytes * (2 if to_host else 1)):
            return None
        try:
            with device_of(block):
                queue = backend.queue()
                queue.wait_until_written([block], any_stream=self.options.any_producer_stream)
                packed = queue.scratch(region.shape, region.dtype)
                queue.pack(packed, region)()
                packed = queue.to_host(packed) if to_host else packed
            if self.host.address.startswith("inproc"):  # it is the reader's own from now on
                reserved.close()
            else:  # Dask lets go of it when it is sent
                weakref.finalize(packed, reserved.close).atexit = False
        except BaseException:
            reserved.close()
            raise
        return packed
