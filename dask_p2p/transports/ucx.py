"""``ucx``: packed regions over UCX, which chooses NVLink, InfiniBand, shared memory or TCP.

The regions of a batch arrive in one UCX message, with a tag that the reader chooses::

    reader                                 holder
      posts the receive
      --- RPC: keys, boxes, tag --------->   packs the regions
      <== message ========================   sends them from its endpoint to the reader's
      <-- reply: ok or an error ----------   after their arrival

The data use the fastest link, independently of Dask's own messages.

A large region is transferred in parts, each in a message. In Python, a request for each part would
take longer than a fast link takes for the bytes. So one request has the tags of a row of messages,
and the holder packs and sends one after another. The reader posts the next receives while it
processes the messages before, and so controls the pace::

    reader                                     holder
      --- RPC: keys, boxes, tags ----------->    packs and sends, in turn
      posts receives for the first       <====
      posts one more                     <====   packs the next while one is sent
      <-- reply: all are sent, or an error ---
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count, groupby, islice
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends import Backend, backend_for, backend_named, device_of
from dask_p2p.backends.device import current_device
from dask_p2p.config import Options
from dask_p2p.errors import Obstacle, TransferError
from dask_p2p.geometry import box_slices
from dask_p2p.transports.base import PROBE_TIMEOUT_S, Region, WorkerContext
from dask_p2p.transports.buffers import (
    Buffers,
    Footprint,
    Release,
    buffer_bytes,
    fit_parts,
    left_bytes,
    parts_held,
)
from dask_p2p.transports.packed import (
    NO_ROOM,
    PAUSE_S,
    FlatSendBuffer,
    PackedTransport,
    ReadRequest,
)
from dask_p2p.transports.packed_reading import (
    FlatRecvBuffer,
    PackedReading,
    RecvBuffer,
    wait_for_region,
)
from dask_p2p.transports.rpc import Handler, ask, check_reply, refuse, rpc_handler
from dask_p2p.transports.ucx_messenger import NAP_S, Message, Messenger, ucxx_obstacle
from dask_p2p.types import Array, Kind

REST_S = 1.0  # time without messages until UCX's progress thread stops

_PEER_OP = "p2p_ucx_peer"
_PART_BYTES = 2**28  # of device memory
_HOST_PART_BYTES = 2**24
_IN_FLIGHT = 2  # parts requested ahead, each with a buffer of the reader and one of the holder
_IDLE_PARTS = 5
# Threads that send messages. They wait most of the time, and no reader should wait for another.
_THREADS = 32
MOST_MESSAGES = 64  # messages in one row


class MessageTags(NamedTuple):
    """The tags of a reader's receives: one tag for all parts, or one for each part."""

    tags: Sequence[int]  # tags of the messages
    reader: str  # address of the reading worker
    closed: int  # the reader's closed endpoints to the holder: see `Messenger.reset_endpoint`


class UcxRecvBuffer(FlatRecvBuffer):
    """The receive of a message, posted before the request to the holder."""

    message: Message | None = None  # None if the regions are empty

    def allocate(self, reading: PackedReading, size_bytes: int) -> Array:
        self._messenger: Messenger = self.transport.messenger()
        memory: Array = self.transport.buffers[self.about.kind].take((size_bytes,), np.uint8)
        return memory

    def where(self, first: int) -> Any:
        to = self.transport.make_tags(self.about.holder)
        self.post_receive(first, to.tags[0])
        return tuple(to)

    def post_receive(self, first: int, tag: int) -> None:
        memory = self.memory[self.layout.starts[first] :]
        self.message = self._messenger.receive(memory, tag) if memory.size else None

    @property
    def has_arrived(self) -> bool:
        """True if the message has arrived, or the regions are empty and have no message."""
        return self.message is None or self.message.is_complete

    async def wait_for_arrival(self, replies: Sequence[Any], deadline_s: float) -> Array:
        if not any(reply["status"] == "ok" for reply in replies):
            self.abandon()
        elif self.message is not None:
            waiting = self.message.result, max(0.0, deadline_s - time.monotonic())
            try:
                await self.transport.worker.offload(*waiting, threads=self.transport.threads)
            except TransferError as exc:
                text = f"{self.about} did not arrive: {exc}"
                raise type(exc)(text, reason=str(exc)) from exc
        return self.memory

    def abandon(self) -> None:
        if self.message is not None:
            self._messenger.end(self.message)


class StreamedReading(PackedReading):
    """The reading of regions in messages. Large regions arrive in rows of messages."""

    def __init__(self, transport: Any, *args: Any) -> None:
        super().__init__(transport, *args)
        self._ucx = transport
        self.expected: set[UcxRecvBuffer] = set()  # posted receives of rows
        self._missing: dict[Any, int] = {}  # number of missing messages, by the row's call

    def __iter__(self) -> Iterator[Region]:
        for is_batch, batches in groupby(self._batches(), key=lambda batch: len(batch) > 1):
            row: list[Region] = []
            for batch in batches:
                if is_batch:
                    yield from self._request_batch(batch)
                    continue
                row += batch
                if len(row) == MOST_MESSAGES:
                    yield from self._request_row(row)
                    row = []
            if row:
                yield from self._request_row(row) if len(row) > 1 else self._request_batch(row)

    def _request_row(self, row: Sequence[Region]) -> Iterator[Region]:
        try:
            where = self._ucx.make_tags(self.requests[0].holder, len(row))
        except TransferError as exc:
            yield from (part.mark_failed(exc) for part in row)
            return
        call = self._start_call(self._ask(row, tuple(where), len(row)))
        self._missing[call] = len(row)
        self.ahead = self._answers_ahead
        for number, (part, tag) in enumerate(zip(row, where.tags, strict=True)):
            try:
                recv_buffer = UcxRecvBuffer(self._ucx, self, [part])
                recv_buffer.post_receive(0, tag)
            except TransferError as exc:
                yield part.mark_failed(exc)
                continue
            self.expected.add(recv_buffer)
            yield part.mark_requested(
                partial(self._wait_for_message, recv_buffer, call, number),
                partial(_is_decided, recv_buffer, call),
            )

    def _wait_for_message(
        self, recv_buffer: UcxRecvBuffer, call: Future[Sequence[Any]], number: int, *_: Any
    ) -> Any:
        """Return the region of this message of a row, whose request is the call."""
        about, deadline_s = recv_buffer.about, time.monotonic() + self.timeout_s
        while not recv_buffer.has_arrived:
            if call.done():
                replies = call.result()  # raises the error of the whole row, if any
                if number >= len(replies):  # the row ended before this message: ask again
                    self.expected.discard(recv_buffer)
                    recv_buffer.abandon()
                    limit_s = self.timeout_s + tuning.current.event_loop_grace_s
                    return wait_for_region(self._call(recv_buffer.parts), 0, limit_s)
                check_reply(replies[number], about.holder, about)  # raises if it was not sent
            if time.monotonic() > deadline_s:
                raise TransferError(f"no message of {about.holder} came in time", is_silence=True)
            time.sleep(NAP_S)
        self.expected.discard(recv_buffer)
        if recv_buffer.message is not None:
            recv_buffer.message.result(0.0)
        # When all messages of a row have arrived, its reply has no new information. Still, `close`
        # does not cancel the call: this would close the connection, and a new one takes longer.
        self._missing[call] -= 1
        if not self._missing[call]:
            self.calls.discard(call)
        return recv_buffer.region(recv_buffer.memory, 0)

    def close(self) -> None:
        super().close()
        while self.expected:
            self.expected.pop().abandon()


def _is_decided(recv_buffer: UcxRecvBuffer, call: Future[Any]) -> bool:
    return recv_buffer.has_arrived or call.done()


class UcxSendBuffer(FlatSendBuffer):
    """The packing and sending of a message."""

    def __init__(
        self, transport: Any, to: MessageTags, messenger: Messenger, address: bytes
    ) -> None:
        self._transport, self._to = transport, to
        self._messenger, self._address = messenger, address
        self._memory: Array | None = None
        self._message: Message | None = None
        self.block: Array | None = None  # block that is referenced until it is packed

    def can_join(self, block: Array) -> bool:
        """Return whether the block's regions can join the message.

        Regions of a block spilled to host memory cannot join a message in GPU memory.
        """
        memory = self._memory
        return memory is None or backend_for(block).on_device or not backend_for(memory).on_device

    def memory(self, backend: Backend) -> Array:
        if self._memory is None:
            pool = self._transport.buffers[backend.name]
            self._memory = pool.take((self.size_bytes,), np.uint8)
        return self._memory

    def send(self) -> None:
        self.start()
        self.wait()

    def start(self) -> None:
        self._end_packing()
        if not self.size_bytes or self._message is not None:
            return
        own_address = self._transport.worker.address
        other_host = urlsplit(self._to.reader).hostname != urlsplit(own_address).hostname
        self._messenger.reset_endpoint(self._address, self._to.closed)
        with device_of(self._memory):
            self._message = self._messenger.send(
                self._address, self._memory, self._to.tags[0], other_host=other_host
            )

    def wait(self) -> None:
        if self._message is not None:
            with device_of(self._memory):
                self._message.result(self.request.left_s)

    def _end_packing(self) -> None:
        if self.block is not None:
            with device_of(self.block):
                self.wait_until_packed()
            self.block = None

    def close(self) -> None:
        self._end_packing()  # until now it writes to the memory
        self._memory = None  # before the reservation is released
        super().close()


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
        if self._messenger is not None and not self.is_closed:
            return self._messenger
        return await self.worker.offload(self.messenger)  # a thread starts UCX

    async def _stop_when_idle(self, messenger: Messenger) -> None:
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
        closed = self.messenger().count_closed(self.addresses.get(holder, b""))
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
                    number, box = part
                    block = self._find(request, *request.blocks[number])
                    with device_of(block):
                        send_buffer.pack(0, self._queue_for(block), block[box_slices(box)])
                    send_buffer.block = block
                    del block  # the buffer drops it when it is packed
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

    def _reserve_message(
        self, request: ReadRequest, sending: deque[UcxSendBuffer]
    ) -> list[Release]:
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
        messenger, address = await self._ensure_messenger(), self.addresses.get(where.reader)
        if address is None:
            reader, about = where.reader, "its UCX address"
            reply = await ask(self.worker, reader, _PEER_OP, PROBE_TIMEOUT_S, about)
            address = self.addresses[reader] = check_reply(reply, reader, about)["address"]
        return UcxSendBuffer(self, where, messenger, address)

    def own_bytes(self, request: ReadRequest) -> list[int]:
        return [buffer_bytes(request.layout().size_bytes)]


def _finish(sending: deque[UcxSendBuffer]) -> None:
    with closing(sending.popleft()) as first:
        first.send()
