"""``ucx``: packed regions over UCX: NVLink, InfiniBand, shared memory or TCP, whatever is there.

A reader asks for a region by an RPC of Dask, and names a tag. The holder packs the region into a
buffer and sends that under the tag, from its own UCX endpoint to the reader's::

    reader                                     holder
    take a buffer, look out for the tag
      --- RPC: key, box, shape, tag ----------->  pack into a buffer
      <== message ==============================  send
      <-- reply: size, dtype, sent ok ----------  buffer free again

So control and errors go over Dask's connections, encrypted where those are, and data over the
quickest link. While one region is on its way the next one is packed, and the one before is put into
place. What Dask's own messages go over does not matter.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, ClassVar

from dask_p2p.config import Options
from dask_p2p.errors import TransferError
from dask_p2p.kernels import kernel_for, kernel_named
from dask_p2p.kernels.queue import queue_for
from dask_p2p.layout import Box, box_shape, box_size
from dask_p2p.transports import cuda_ipc
from dask_p2p.transports.base import (
    MEET_S,
    BlockSpec,
    Handler,
    Host,
    Pacing,
    RemoteBlock,
    Transport,
    ask,
    check_reply,
    cut,
    dtype_text,
    mismatch,
    refuse,
)
from dask_p2p.transports.buffers import Buffers
from dask_p2p.transports.messenger import Messenger, ucxx_obstacle

__all__ = ["UcxTransport"]

_PEER_OP = "p2p_ucx_peer"
_SEND_OP = "p2p_ucx_send"
_LONGEST_ADDRESS_BYTES = 2**16
_IDLE_PARTS = 4  # buffers of one part each that are kept for later, of either kind


class UcxTransport(Transport):
    """Regions over UCX endpoints of this package's own."""

    name: ClassVar[str] = "ucx"

    def __init__(self, host: Host, options: Options) -> None:
        super().__init__(host, options)
        self._addresses: dict[str, bytes] = {}  # by worker
        self._messenger: Messenger | None = None
        self._starting = threading.Lock()
        # Tags of several messengers never meet, but those of one come back if a process sends to
        # a new one in its place.
        self._tags = itertools.count(secrets.randbits(62))
        self._buffers = {
            kind: Buffers(kind, _IDLE_PARTS * _part_bytes(options, kind))
            for kind in ("numpy", "cupy")
        }
        self._closed = False

    # --- the reader's side, in task threads ---

    def obstacle(self, holder: str, kind: str, dtype: Any) -> str | None:
        if dtype.hasobject:
            return "ucx moves bytes, not Python objects"
        return self._own_obstacle()

    def pacing(self, options: Options, kind: str) -> Pacing:
        return Pacing(_part_bytes(options, kind), options.ucx_parts_in_flight)

    def open(self, block: BlockSpec, options: Options) -> RemoteBlock:
        return _UcxBlock(self, block, options.request_timeout_s)

    def take_buffer(self, shape: tuple[int, ...], block: BlockSpec) -> Any:
        """Return an array to receive a region of a block into."""
        return self._buffers[block.kind].take(shape, block.dtype)

    async def bring(self, block: BlockSpec, box: Box, region: Any, timeout_s: float) -> None:
        """Fill an array with a region of a block."""
        tag = next(self._tags) % 2**64
        messenger = await self._started()
        receiving = asyncio.wrap_future(messenger.receive(_raw(region), tag, timeout_s))
        receiving.add_done_callback(_retrieve)
        asking = asyncio.ensure_future(self._ask(block, box, tag, timeout_s))
        asking.add_done_callback(_retrieve)
        both: set[asyncio.Future[Any]] = {receiving, asking}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            if asking.done():  # if both failed, the holder knows better why
                nbytes = asking.result().get("nbytes")
                if nbytes != region.nbytes:
                    raise TransferError(
                        f"ucx: {block.holder} sent {nbytes} bytes of {block}, not {region.nbytes}"
                    )
            self._received(receiving, block)
        except TransferError:
            receiving.cancel()
            raise
        finally:
            asking.cancel()

    def _received(self, receiving: asyncio.Future[None], block: BlockSpec) -> None:
        try:
            receiving.result()
        except TransferError as exc:
            raise TransferError(f"ucx: {block} does not come: {exc}", reason=str(exc)) from exc

    async def _ask(self, block: BlockSpec, box: Box, tag: int, timeout_s: float) -> dict[str, Any]:
        about = f"block {block.key!r}"
        reply = await ask(
            self.host, block.holder, _SEND_OP, timeout_s, about,
            key=block.key, box=box, shape=block.shape, dtype=dtype_text(block.dtype),
            tag=tag, reader=self.host.address, wait_s=timeout_s,
        )  # fmt: skip
        return check_reply(reply, block, self.name)

    # --- both sides ---

    def messenger(self) -> Messenger:
        """Return this process' messenger, started when it is first needed; not for event loops."""
        with self._starting:
            if self._messenger is None:
                if (obstacle := self._own_obstacle()) is not None:
                    raise TransferError(f"ucx: {obstacle}", reason=obstacle)
                self._messenger = Messenger(cuda_ipc.current_device())
            return self._messenger

    def forget(self, holder: str) -> None:
        address = self._addresses.pop(holder, None)
        if address is not None and self._messenger is not None:
            self._messenger.forget(address)

    async def close(self) -> None:
        self._closed = True
        if self._messenger is not None:
            await self.host.offload(self._messenger.close)

    async def _started(self) -> Messenger:
        if self._messenger is not None:
            return self._messenger
        return await self.host.offload(self.messenger)

    def _own_obstacle(self) -> str | None:
        if self.host.encrypted_only and not self.options.ucx_allow_unencrypted:
            return (
                "UCX does not encrypt, and this cluster requires encryption. To use UCX all the "
                "same, set p2p.transports.ucx.allow-unencrypted on the workers"
            )
        return ucxx_obstacle()

    @property
    def messages_under_way(self) -> int:
        """Messages that this worker sends or waits for."""
        return 0 if self._messenger is None else self._messenger.under_way

    # --- the holder's side ---

    def handlers(self) -> Mapping[str, Handler]:
        return {_PEER_OP: self._answer_peer, _SEND_OP: self._answer_send}

    async def _answer_peer(self) -> dict[str, Any]:
        try:
            messenger = await self._started()
        except Exception as exc:
            return refuse(exc)
        return {"status": "ok", "address": messenger.address}

    async def _answer_send(
        self, key: Any, box: Any, shape: Any, dtype: Any, tag: Any, reader: Any, wait_s: Any
    ) -> dict[str, Any]:
        """Send one region. The block is referenced, and so leased, until it is packed."""
        if self._closed:
            return {"status": "error", "message": "the worker is closing"}
        try:
            if type(tag) is not int or not 0 <= tag < 2**64:
                raise ValueError(f"tag {tag!r} is no 64-bit number")
            messenger = await self._started()
            address = await self._address_of(reader)
            packed = await self.host.offload(self._pack, key, box, shape, dtype)
            await asyncio.wrap_future(messenger.send(address, _raw(packed), tag, float(wait_s)))
        except Exception as exc:
            return refuse(exc)
        return {"status": "ok", "nbytes": packed.nbytes}

    async def _address_of(self, reader: Any) -> bytes:
        """Return where a worker's messages go to. It is asked itself, so that nobody else can say.

        What does not come from a messenger would do harm to UCX.
        """
        address = self._addresses.get(reader)
        if address is None:
            reply = await ask(self.host, reader, _PEER_OP, MEET_S, "its UCX address")
            address = reply.get("address") if isinstance(reply, dict) else None
            if not isinstance(address, bytes) or not 0 < len(address) <= _LONGEST_ADDRESS_BYTES:
                raise TransferError(f"{reader} does not tell its UCX address: {reply!r}")
            self._addresses[reader] = address
        return address

    def _pack(self, key: Any, box: Any, shape: Any, dtype: Any) -> Any:
        """Return a region as an array of its own, C-ordered, whose values are all there."""
        region = cut(self.host, key, box, shape)
        if dtype != dtype_text(region.dtype):
            raise mismatch(f"block {key!r}", dtype, dtype_text(region.dtype))
        kind = kernel_for(region).name
        packed = self._buffers[kind].take(region.shape, region.dtype)
        queue = queue_for(kind)
        queue.permute(packed, region, range(region.ndim))
        queue.synchronize()
        return packed


class _UcxBlock(RemoteBlock):
    def __init__(self, transport: UcxTransport, block: BlockSpec, timeout_s: float) -> None:
        self._transport = transport
        self._block = block
        self._timeout_s = timeout_s
        self._requests: set[Future[Any]] = set()

    def request(self, box: Box) -> Future[Any]:
        if not box_size(box):
            return _done(kernel_named(self._block.kind).empty(box_shape(box), self._block.dtype))
        # Here and not on the event loop, since new memory may have to be waited for.
        region = self._transport.take_buffer(box_shape(box), self._block)
        future = asyncio.run_coroutine_threadsafe(
            self._bring(box, region), self._transport.host.loop
        )
        self._requests.add(future)
        future.add_done_callback(self._requests.discard)
        return future

    async def _bring(self, box: Box, region: Any) -> Any:
        await self._transport.bring(self._block, box, region, self._timeout_s)
        return region

    def close(self) -> None:
        for future in list(self._requests):
            future.cancel()


def _done(array: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(array)
    return future


def _raw(array: Any) -> Any:
    """Return the bytes of a C-ordered array."""
    return array.reshape(-1).view("u1")


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Look at a future's error, which the loop would otherwise log as overlooked."""
    if not future.cancelled():
        future.exception()


def _part_bytes(options: Options, kind: str) -> int:
    return options.ucx_part_bytes if kind == "cupy" else options.ucx_host_part_bytes
