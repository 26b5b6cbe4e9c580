"""``comm``: regions over Dask's own connections, between any two workers.

The holder cuts the region out of its block, packs it into one piece of memory and sends it as
the answer to an RPC; Dask's serialisation and protocol (tcp, tls, ucx, inproc) do the rest. GPU
regions are sent from device memory where the protocol can (ucx), else through host memory.

With ``p2p.checksum`` the answer holds a checksum too, of the packed bytes.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar

from distributed.protocol import to_serialize

from dask_p2p.config import Options
from dask_p2p.errors import TransferError
from dask_p2p.kernels import device_of, kernel_for
from dask_p2p.kernels.checksum import algorithm_for
from dask_p2p.kernels.queue import queue_for
from dask_p2p.layout import Box, box_shape, box_slices
from dask_p2p.transports.base import (
    BlockSpec,
    Handler,
    Host,
    RemoteBlock,
    Transport,
    ask,
    check_reply,
    find_block,
    mismatch,
    refuse,
)
from dask_p2p.transports.pacing import Pacing, comm_pacing
from dask_p2p.transports.requests import (
    checked_box,
    checked_key,
    checked_shape,
    checked_yes_or_no,
    no_more,
)
from dask_p2p.transports.sums import algorithm_of, check_sum, region_sum

__all__ = ["CommTransport"]

_OP = "p2p_region"
_PAUSE_S = 1e-3  # while others have packed as much as may be


class CommTransport(Transport):
    """Regions as answers to RPCs."""

    name: ClassVar[str] = "comm"

    def __init__(self, host: Host, options: Options) -> None:
        super().__init__(host, options)
        self._closed = False
        self._opened: set[_CommBlock] = set()  # by task threads
        self._serving = 0  # requests; changed on the event loop only

    def handlers(self) -> Mapping[str, Handler]:
        return {_OP: self._serve}

    def obstacle(self, holder: str, kind: str, dtype: Any) -> str | None:
        return None

    def probe(self, holder: str, kind: str) -> None:
        """Nothing to prove: it is the last resort, and what Dask itself uses all the time."""

    def pacing(self, options: Options, kind: str) -> Pacing:
        return comm_pacing(options, kind)

    def open(self, block: BlockSpec, boxes: Iterable[Box], options: Options) -> RemoteBlock:
        opened = _CommBlock(self.host, block, boxes, options, self._opened.discard)
        self._opened.add(opened)
        return opened

    def held(self) -> dict[str, int]:
        return {
            "opened": len(self._opened),
            "requested": sum(block.under_way for block in list(self._opened)),
            "serving": self._serving,
        }

    async def close(self) -> None:
        self._closed = True

    async def _serve(
        self,
        /,
        key: Any = None,
        box: Any = None,
        shape: Any = None,
        checksum: Any = False,
        **unknown: Any,
    ) -> dict[str, Any]:
        """Answer one request. The block is referenced, and so leased, until it is sent."""
        if self._closed:
            return {"status": "error", "message": "the worker is closing"}
        self._serving += 1
        try:
            no_more(unknown)
            shape = checked_shape(shape)
            box = checked_box(box, shape)
            checksum = checked_yes_or_no("checksum", checksum)
            region, sums = await self._packed(checked_key(key), box, shape, checksum)
        except Exception as exc:
            return refuse(exc)
        finally:
            self._serving -= 1
        return {"status": "ok", "data": to_serialize(region), **sums}

    async def _packed(
        self, key: Any, box: Box, shape: tuple[int, ...], checksum: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Return a packed region, as soon as there is room for it, and what goes with it."""
        deadline_s = time.monotonic() + self.options.request_timeout_s
        while (region := await self.host.offload(self._pack, key, box, shape)) is None:
            if time.monotonic() > deadline_s:
                raise TransferError("it has packed as much for others as p2p.memory allows")
            await asyncio.sleep(_PAUSE_S)
        if not checksum:
            return region, {}
        # By what is sent: the reader gets it in the same kind of memory.
        algorithm = algorithm_for(region)
        found = await self.host.offload(region_sum, key, box, region, algorithm)
        return region, {"checksum": (algorithm, found)}

    def _pack(self, key: Any, box: Box, shape: tuple[int, ...]) -> Any:
        """Pack a region; return None if there is no room for it now."""
        block = find_block(self.host, key, shape)  # the box lies in the shape, and so in the block
        region = block[box_slices(box)]
        kind = kernel_for(block).name
        if kind == "numpy" and region.flags.c_contiguous:
            return region
        # Copying to the host here keeps Dask's serialisation from doing it on the event loop.
        to_host = kind != "numpy" and not self.host.address.startswith("ucx")
        room = self.packed.room()
        if not room.take(region.nbytes * (2 if to_host else 1)):
            return None
        try:
            with device_of(block):
                queue = queue_for(kind)
                queue.wait_until_written([block], any_stream=self.options.any_producer_stream)
                packed = queue.scratch(region.shape, region.dtype)
                queue.pack(packed, region)()
                packed = queue.to_host(packed) if to_host else packed
            if self.host.address.startswith("inproc"):  # it is the reader's own from now on
                room.close()
            else:  # Dask lets go of it when it is sent
                weakref.finalize(packed, room.close).atexit = False
        except BaseException:
            room.close()
            raise
        return packed


class _CommBlock(RemoteBlock):
    def __init__(
        self,
        host: Host,
        block: BlockSpec,
        boxes: Iterable[Box],
        options: Options,
        closed: Callable[[_CommBlock], None],
    ) -> None:
        self._host = host
        self._block = block
        self._boxes = iter(boxes)
        self._timeout_s = options.request_timeout_s
        # Objects are pickled: their bytes are others here than there.
        self._with_sum = options.checksum and not block.dtype.hasobject
        self._requests: set[Future[Any]] = set()
        self._tell_closed = closed

    @property
    def under_way(self) -> int:
        """Requests that are not answered yet."""
        return len(self._requests)

    def request(self) -> Future[Any]:
        future = asyncio.run_coroutine_threadsafe(self._pull(next(self._boxes)), self._host.loop)
        self._requests.add(future)
        future.add_done_callback(self._requests.discard)
        return future

    def close(self) -> None:
        for future in list(self._requests):
            future.cancel()
        self._tell_closed(self)

    async def _pull(self, box: Box) -> Any:
        block = self._block
        more = {"checksum": True} if self._with_sum else {}
        reply = check_reply(
            await ask(
                self._host, block.holder, _OP, self._timeout_s, f"block {block.key!r}",
                key=block.key, box=box, shape=block.shape, **more,
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
        if self._with_sum:
            await self._host.offload(self._check, region, box, reply.get("checksum"))
        return region

    def _check(self, region: Any, box: Box, said: Any) -> None:
        """Raise `TransferError` unless the region is what the holder sent, by its checksum."""
        block = self._block
        try:
            name, there = said
            algorithm = algorithm_of(name)
        except (TypeError, ValueError):
            raise TransferError(
                f"comm: {block.holder} sent no checksum of {box} of {block}, but {said!r:.100}"
            ) from None
        here = region_sum(block.key, box, region, algorithm)
        check_sum("comm", block, box, here, there, algorithm)
