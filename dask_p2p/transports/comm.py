"""``comm``: regions over Dask's own connections, between any two workers.

The holder cuts the region out of its block, packs it into one piece of memory and sends it as
the answer to an RPC; Dask's serialisation and protocol (tcp, tls, ucx, inproc) do the rest. GPU
regions are sent from device memory where the protocol can (ucx), else through host memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from distributed.protocol import to_serialize

from dask_p2p.config import Options
from dask_p2p.errors import TransferError
from dask_p2p.kernels import kernel_for
from dask_p2p.kernels.queue import queue_for
from dask_p2p.layout import Box, box_shape, box_slices
from dask_p2p.transports.base import (
    BlockSpec,
    Handler,
    Host,
    Pacing,
    RemoteBlock,
    Transport,
    ask,
    check_reply,
    checked_box,
    find_block,
    mismatch,
    refuse,
)

__all__ = ["CommTransport"]

_OP = "p2p_region"


class CommTransport(Transport):
    """Regions as answers to RPCs."""

    name: ClassVar[str] = "comm"

    def __init__(self, host: Host, options: Options) -> None:
        super().__init__(host, options)
        self._closed = False

    def handlers(self) -> Mapping[str, Handler]:
        return {_OP: self._serve}

    def obstacle(self, holder: str, kind: str, dtype: Any) -> str | None:
        return None

    def probe(self, holder: str, kind: str) -> None:
        """Nothing to prove: it is the last resort, and what Dask itself uses all the time."""

    def pacing(self, options: Options, kind: str) -> Pacing:
        return Pacing(options.comm_part_bytes, options.comm_parts_in_flight)

    def open(self, block: BlockSpec, boxes: Sequence[Box], options: Options) -> RemoteBlock:
        return _CommBlock(self.host, block, boxes, options.request_timeout_s)

    async def close(self) -> None:
        self._closed = True

    async def _serve(self, key: Any, box: Any, shape: Any) -> dict[str, Any]:
        """Answer one request. The block is referenced, and so leased, until it is sent."""
        if self._closed:
            return {"status": "error", "message": "the worker is closing"}
        try:
            region = await self.host.offload(self._pack, key, box, shape)
        except Exception as exc:
            return refuse(exc)
        return {"status": "ok", "data": to_serialize(region)}

    def _pack(self, key: Any, box: Any, shape: Any) -> Any:
        block = find_block(self.host, key, shape)
        region = block[box_slices(checked_box(box, block.shape))]
        kind = kernel_for(block).name
        if kind == "numpy" and region.flags.c_contiguous:
            return region
        queue = queue_for(kind)
        packed = queue.empty(region.shape, region.dtype)
        queue.permute(packed, region, range(region.ndim))
        queue.synchronize()
        # Copying to the host here keeps Dask's serialisation from doing it on the event loop.
        return packed if kind == "numpy" or self.host.address.startswith("ucx") else packed.get()


class _CommBlock(RemoteBlock):
    def __init__(
        self, host: Host, block: BlockSpec, boxes: Sequence[Box], timeout_s: float
    ) -> None:
        self._host = host
        self._block = block
        self._boxes = iter(boxes)
        self._timeout_s = timeout_s
        self._requests: set[Future[Any]] = set()

    def request(self) -> Future[Any]:
        future = asyncio.run_coroutine_threadsafe(self._pull(next(self._boxes)), self._host.loop)
        self._requests.add(future)
        future.add_done_callback(self._requests.discard)
        return future

    def close(self) -> None:
        for future in list(self._requests):
            future.cancel()

    async def _pull(self, box: Box) -> Any:
        block = self._block
        reply = check_reply(
            await ask(
                self._host, block.holder, _OP, self._timeout_s, f"block {block.key!r}",
                key=block.key, box=box, shape=block.shape,
            ),
            block,
            "comm",
        )  # fmt: skip
        region: Any = reply.get("data")
        shape = getattr(region, "shape", type(region).__name__)
        if shape != box_shape(box):
            raise TransferError(
                f"comm: {block.holder} sent {shape} instead of {box_shape(box)} of {block}"
            )
        if region.dtype != block.dtype:
            raise mismatch(block, block.dtype, region.dtype)
        return region
