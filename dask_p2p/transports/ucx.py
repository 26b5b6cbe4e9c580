"""``ucx``: packed regions over UCX, which chooses NVLink, InfiniBand, shared memory or TCP.

The regions of a batch arrive in one UCX message, with a tag that the reader chooses::

    reader                                 holder
      posts the receive
      --- RPC: keys, boxes, tag --------->   packs the regions
      <== message ========================   sends them from its endpoint to the reader's
      <-- reply: ok or an error ----------   after their arrival

The data use the fastest link, independently of Dask's own messages.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import count, islice
from typing import Any, ClassVar

from dask_p2p.backends import backend_named, device_of
from dask_p2p.backends.device import current_device
from dask_p2p.config import Options
from dask_p2p.errors import Obstacle, TransferError
from dask_p2p.geometry import box_slices
from dask_p2p.transports.base import PROBE_TIMEOUT_S, WorkerContext
from dask_p2p.transports.buffers import (
    Buffers,
    Footprint,
    Release,
    buffer_bytes,
    fit_parts,
    left_bytes,
    parts_held,
)
from dask_p2p.transports.packed import NO_ROOM, PAUSE_S, PackedTransport, ReadRequest
from dask_p2p.transports.packed_reading import PackedReading, RecvBuffer
from dask_p2p.transports.rpc import Handler, ask, check_reply, refuse, rpc_handler
from dask_p2p.transports.streamed import MessageTags, StreamedReading, UcxRecvBuffer, UcxSendBuffer
from dask_p2p.transports.ucx_messenger import Messenger, ucxx_obstacle
from dask_p2p.types import Kind

REST_S = 1.0  # time without messages until UCX's progress thread stops

_PEER_OP = "p2p_ucx_peer"
_PART_BYTES = 2**28  # of device memory
_HOST_PART_BYTES = 2**24
_IN_FLIGHT = 2  # parts requested ahead, each with a buffer of the reader and one of the holder
_IDLE_PARTS = 5
# Threads that send messages. They wait most of the time, and no reader should wait for another.
_THREADS = 32


class UcxTransport(PackedTransport):
    """Transport of regions over this package's own UCX endpoints."""

    name: ClassVar[str] = "ucx"
    reading: ClassVar[type[PackedReading]] = StreamedReading
    recv_buffer: ClassVar[type[RecvBuffer]] = UcxRecvBuffer

    @classmethod
    def is_in_auto(cls, kind: Kind) -> bool:
        # For NumPy blocks on a host with two cores, UCX takes 1.3 to 2 times as long as Dask's TCP.
        return kind == "cupy"

    @classmethod
    def footprint(cls, options: Options, kind: Kind) -> Footprint:
        """Return a footprint with parts of the configured size, or the largest size that fits."""
        default_bytes = _PART_BYTES if backend_named(kind).on_device else _HOST_PART_BYTES
        part_bytes, available_bytes = options.part_bytes or default_bytes, left_bytes(options, kind)
        footprint = fit_parts(
            part_bytes, _IN_FLIGHT, available_bytes, lambda n: parts_held(n, kind)
        )
        return replace(footprint, parts_packed=_IN_FLIGHT + 1, parts_idle=_IDLE_PARTS)

    # --- both sides ---

    def __init__(self, worker: WorkerContext, options: Options) -> None:
        super().__init__(worker, options)
        self.addresses: dict[str, bytes] = {}  # by worker
        self._messenger: Messenger | None = None
        self._lock = threading.Lock()
        # A random start: a new process may replace one that died in the middle of a message.
        self.tags = count(secrets.randbits(61))
        self.buffers = {
            kind: Buffers(kind, self.footprint(options, kind).idle_bytes(options))
            for kind in self.kinds
        }
        self.pools += self.buffers.values()
        self.threads: ThreadPoolExecutor = ThreadPoolExecutor(_THREADS, "p2p-ucx-send")
        self._resting: Future[None] | None = None

    def messenger(self) -> Messenger:
        """Return this process' messenger, started if necessary. May block: use a thread."""
        with self._lock:
            if self.is_closed:
                raise TransferError("the worker is closing")
            if self._messenger is None:
                if (obstacle := self.holder_obstacle(self.worker.address)) is not None:
                    raise TransferError(obstacle.full_text, obstacle=obstacle)
                self._messenger = Messenger(current_device())
                resting = self._stop_when_idle(self._messenger)
                self._resting = asyncio.run_coroutine_threadsafe(resting, self.worker.loop)
            return self._messenger

    async def _ensure_messenger(self) -> Messenger:
        """Return the messenger, on the event loop. A thread starts it if necessary."""
        if self._messenger is not None and not self.is_closed:
            return self._messenger
        return await self.worker.offload(self.messenger)

    async def _stop_when_idle(self, messenger: Messenger) -> None:
        """Stop UCX's progress thread whenever no message is in transfer."""
        while True:
            await asyncio.sleep(REST_S)
            await self.worker.offload(messenger.stop_when_idle, REST_S)

    def on_worker_left(self, holder: str) -> None:
        super().on_worker_left(holder)
        address = self.addresses.pop(holder, None)
        if address is not None and self._messenger is not None:
            self.offload(self._messenger.forget, address)  # waits for the endpoint's closing

    def free_memory(self) -> None:
        with self._lock:  # waits for a messenger that is just starting
            if self._resting is not None:
                self._resting.cancel()
            if self._messenger is not None:
                self._messenger.close()
        super().free_memory()

    def holder_obstacle(self, holder: str) -> Obstacle | None:  # the same for all holders
        if self.worker.encrypted_only and not self.options.allow_unencrypted:
            return Obstacle(
                "unencrypted",
                "UCX does not encrypt, and this cluster requires encryption",
                "Use the other transports. To use UCX without encryption, set "
                "p2p.transports.ucx.allow-unencrypted on the workers",
            )
        return ucxx_obstacle()

    # --- the reader's side, in task threads ---

    def make_tags(self, holder: str, number: int = 1) -> MessageTags:
        """Return make_tags for this number of messages."""
        closed = self.messenger().closed(self.addresses.get(holder, b""))
        return MessageTags([*islice(self.tags, number)], self.worker.address, closed)

    # --- the holder's side ---

    async def pack_request(self, request: ReadRequest, where: Any) -> Sequence[dict[str, Any]]:
        to = MessageTags(*where)
        if len(to.tags) == 1:
            return await super().pack_request(request, to)
        row = [await self.make_send_buffer(request, to._replace(tags=[tag])) for tag in to.tags]
        streaming = self._stream_all, request, row, request.left_s
        return await self.worker.offload(*streaming, threads=self.threads)

    def _stream_all(
        self, request: ReadRequest, send_buffers: Sequence[UcxSendBuffer], wait_s: float
    ) -> list[dict[str, Any]]:
        """Pack and send messages in turn. Stop at the first failure. Return the replies.

        While a message is packed, the one before starts, and a few more are in transfer.
        """
        replies: list[dict[str, Any]] = []
        sending: deque[UcxSendBuffer] = deque()
        packing: deque[UcxSendBuffer] = deque()

        def send_packed(remaining: int = 0) -> None:
            while len(packing) > remaining:
                packing.popleft().start()
                replies.append({"status": "ok"})

        try:
            for part, send_buffer in zip(request.parts, send_buffers, strict=True):
                one = request._replace(parts=[part], deadline_s=time.monotonic() + wait_s)
                while len(sending) > _IN_FLIGHT:
                    _finish(sending)
                send_buffer.begin(one, self._reserve_message(one, sending))
                sending.append(send_buffer)
                try:
                    self._begin_to_pack(send_buffer)
                except Exception:
                    send_packed()  # the messages before have not failed
                    raise
                packing.append(send_buffer)
                send_packed(remaining=1)
            send_packed()
            while sending:
                _finish(sending)
        except Exception as exc:
            replies.append(refuse(exc))
        finally:
            while sending:
                sending.popleft().close()
        return replies

    def _begin_to_pack(self, send_buffer: UcxSendBuffer) -> None:
        """Queue the packing of a message with one region."""
        request, (number, box) = send_buffer.request, send_buffer.request.parts[0]
        block = self._find(request, *request.blocks[number])
        with device_of(block):
            send_buffer.pack(0, self._queue_for(block), block[box_slices(box)])
        send_buffer.block = block

    def _reserve_message(
        self, request: ReadRequest, sending: deque[UcxSendBuffer]
    ) -> list[Release]:
        """Reserve memory for one message. If necessary, wait for the arrival of those before."""
        while (reserved := self.packed.reserve(*self.own_bytes(request))) is None:
            if sending:
                _finish(sending)
            elif not request.left_s:
                raise TransferError(NO_ROOM)
            else:
                time.sleep(PAUSE_S)
        return reserved

    def handlers(self) -> Mapping[str, Handler]:
        return {**super().handlers(), _PEER_OP: self._serve_peer}

    @rpc_handler
    async def _serve_peer(self) -> dict[str, Any]:
        return {"address": (await self._ensure_messenger()).address}

    async def make_send_buffer(self, request: ReadRequest, where: MessageTags) -> UcxSendBuffer:
        return UcxSendBuffer(
            self, where, await self._ensure_messenger(), await self._address_of(where.reader)
        )

    def own_bytes(self, request: ReadRequest) -> list[int]:
        return [buffer_bytes(request.layout().size_bytes)]

    async def _address_of(self, reader: str) -> bytes:
        """Return a worker's UCX address, requested from the worker itself."""
        address = self.addresses.get(reader)
        if address is None:
            about = "its UCX address"
            reply = await ask(self.worker, reader, _PEER_OP, PROBE_TIMEOUT_S, about)
            address = self.addresses[reader] = check_reply(reply, reader, about)["address"]
        return address


def _finish(sending: deque[UcxSendBuffer]) -> None:
    """Send the first message, if it has not started, and wait for its arrival."""
    with closing(sending.popleft()) as first:
        first.send()
