"""Regions in UCX messages, on both sides, and rows of messages with a single request.

A large region is transferred in parts, each in a message. In Python, a request for each part would
take longer than a fast link takes for the bytes. So one request has the tags of a row of messages,
and the holder packs and sends one after another. The reader posts the next receives while it
processes the messages before, and so controls the rate::

    reader                                     holder
      --- RPC: keys, boxes, tags ----------->    packs and sends, in turn
      posts receives for the first       <====
      posts one more                     <====   packs the next while one is sent
      <-- reply: all are sent, or an error ---
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends import Backend, backend_for, device_of
from dask_p2p.errors import TransferError
from dask_p2p.transports.base import Region
from dask_p2p.transports.packed import FlatSendBuffer
from dask_p2p.transports.packed_reading import FlatRecvBuffer, PackedReading, wait_for_region
from dask_p2p.transports.rpc import check_reply
from dask_p2p.transports.ucx_messenger import NAP_S, Message, Messenger
from dask_p2p.types import Array

MOST_MESSAGES = 64  # messages in one row


class MessageTags(NamedTuple):
    """The tags of a reader's receives: one tag for all parts, or one for each part."""

    tags: Sequence[int]  # tags of the messages
    reader: str  # address of the reading worker
    closed: (
        int  # number of the reader's closed endpoints to the holder: see `Messenger.reset_endpoint`
    )


class UcxRecvBuffer(FlatRecvBuffer):
    """The receive of a message, posted before the request to the holder."""

    message: Message | None = None  # None if the regions are empty

    def room(self, reading: PackedReading, size_bytes: int) -> Array:
        self._messenger: Messenger = self.transport.messenger()
        memory: Array = self.transport.buffers[self.about.kind].take((size_bytes,), np.uint8)
        return memory

    def where(self, first: int) -> Any:
        to = self.transport.make_tags(self.about.holder)
        self.post_receive(first, to.tags[0])
        return tuple(to)

    def post_receive(self, first: int, tag: int) -> None:
        """Post the receive of a message with the regions from this one on."""
        memory = self.memory[self.layout.starts[first] :]
        self.message = self._messenger.receive(memory, tag) if memory.size else None

    @property
    def has_arrived(self) -> bool:
        """True if the message has arrived, or the regions are empty and have no message."""
        return self.message is None or self.message.is_complete

    async def arrived(self, replies: Sequence[Any], deadline_s: float) -> Array:
        is_sent = any(isinstance(reply, dict) and reply.get("status") == "ok" for reply in replies)
        if not is_sent:
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
        """Request a row of messages, and post one receive after another."""
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
            streamed = _Streamed(self, recv_buffer, call, number)
            yield part.mark_requested(streamed.result, streamed.has_arrived)

    def record_arrival(self, call: Future[Sequence[Any]]) -> None:
        """Record the arrival of a message of a row.

        When all messages of a row have arrived, its reply has no new information. Still, `close`
        does not cancel the call: this would close the connection, and a new one takes longer.
        """
        self._missing[call] -= 1
        if not self._missing[call]:
            self.calls.discard(call)

    def ask_again(self, recv_buffer: UcxRecvBuffer) -> Any:
        """Request a part on its own, since its row ended before it. Return the region."""
        self.expected.discard(recv_buffer)
        recv_buffer.abandon()
        limit_s = self.timeout_s + tuning.current.event_loop_grace_s
        return wait_for_region(self._call(recv_buffer.parts), 0, limit_s)

    def close(self) -> None:
        super().close()
        while self.expected:
            self.expected.pop().abandon()


@dataclass(slots=True)
class _Streamed:
    """A region whose message is part of a row."""

    reading: StreamedReading
    recv_buffer: UcxRecvBuffer
    call: Future[Sequence[Any]]
    number: int  # index in the row

    def has_arrived(self) -> bool:
        return self.recv_buffer.has_arrived or self.call.done()

    def result(self, *_: Any) -> Any:
        recv_buffer, deadline_s = self.recv_buffer, time.monotonic() + self.reading.timeout_s
        while not recv_buffer.has_arrived:
            if self.call.done() and not self._is_sent():
                return self.reading.ask_again(recv_buffer)
            if time.monotonic() > deadline_s:
                raise TransferError(
                    f"no message of {recv_buffer.about.holder} came in time", is_silence=True
                )
            time.sleep(NAP_S)
        self.reading.expected.discard(recv_buffer)
        if recv_buffer.message is not None:
            recv_buffer.message.result(0.0)
        self.reading.record_arrival(self.call)
        return recv_buffer.region(recv_buffer.memory, 0)

    def _is_sent(self) -> bool:
        """Return whether the holder has sent this message. Raise its error if it failed."""
        replies = self.call.result()  # raises the error of the whole row, if any
        if self.number >= len(replies):  # the row ended before this message
            return False
        about = self.recv_buffer.about
        check_reply(replies[self.number], about.holder, about)
        return True


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

    def takes(self, block: Array) -> bool:
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
        """Wait until the message is packed, and start to send it."""
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
        """Wait for the message's arrival, if it was sent."""
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
