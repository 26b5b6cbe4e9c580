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
from dask_p2p.transports.base import PROBE_TIMEOUT_S, WorkerContext, answers
from dask_p2p.transports.buffers import (
    Buffers,
    Footprint,
    Release,
    buffer_bytes,
    buffered,
    left_bytes,
    parts_held,
)
from dask_p2p.transports.packed import NO_ROOM, PAUSE_S, Asked, PackedTransport
from dask_p2p.transports.packed_reading import Landing, PackedReading
from dask_p2p.transports.rpc import Handler, ask, check_reply, refuse
from dask_p2p.transports.streamed import Incoming, Mailboxes, Outgoing, StreamedReading
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
    landing: ClassVar[type[Landing]] = Incoming

    @classmethod
    def is_in_auto(cls, kind: Kind) -> bool:
        # For NumPy blocks on a host with two cores, UCX takes 1.3 to 2 times as long as Dask's TCP.
        return kind == "cupy"

    @classmethod
    def footprint(cls, options: Options, kind: Kind) -> Footprint:
        """Return a footprint with parts of the configured size, or the largest size that fits."""
        default_bytes = _PART_BYTES if backend_named(kind).on_device else _HOST_PART_BYTES
        part_bytes, left = options.part_bytes or default_bytes, left_bytes(options, kind)
        footprint = buffered(part_bytes, _IN_FLIGHT, left, lambda n: parts_held(n, kind))
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
                resting = self._rest(self._messenger)
                self._resting = asyncio.run_coroutine_threadsafe(resting, self.worker.loop)
            return self._messenger

    async def _started(self) -> Messenger:
        """Return the messenger, on the event loop. A thread starts it if necessary."""
        if self._messenger is not None and not self.is_closed:
            return self._messenger
        return await self.worker.offload(self.messenger)

    async def _rest(self, messenger: Messenger) -> None:
        """Stop UCX's progress thread whenever no message is in transfer."""
        while True:
            await asyncio.sleep(REST_S)
            await self.worker.offload(messenger.rest, REST_S)

    def on_worker_left(self, holder: str) -> None:
        super().on_worker_left(holder)
        address = self.addresses.pop(holder, None)
        if address is not None and self._messenger is not None:
            self.offload(self._messenger.forget, address)  # waits for the endpoint's closing

    def let_go(self) -> None:
        with self._lock:  # waits for a messenger that is just starting
            if self._resting is not None:
                self._resting.cancel()
            if self._messenger is not None:
                self._messenger.close()
        super().let_go()

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

    def mailboxes(self, holder: str, number: int = 1) -> Mailboxes:
        """Return mailboxes for this number of messages."""
        closed = self.messenger().closed(self.addresses.get(holder, b""))
        return Mailboxes([*islice(self.tags, number)], self.worker.address, closed)

    # --- the holder's side ---

    async def packed_for(self, asked: Asked, where: Any) -> Sequence[dict[str, Any]]:
        to = Mailboxes(*where)
        if len(to.tags) == 1:
            return await super().packed_for(asked, to)
        row = [await self.target(asked, to._replace(tags=[tag])) for tag in to.tags]
        streaming = self._stream_all, asked, row, asked.left_s
        return await self.worker.offload(*streaming, threads=self.threads)

    def _stream_all(
        self, asked: Asked, targets: Sequence[Outgoing], wait_s: float
    ) -> list[dict[str, Any]]:
        """Pack and send messages in turn. Stop at the first failure. Return the replies.

        While a message is packed, the one before starts, and a few more are in transfer.
        """
        answers: list[dict[str, Any]] = []
        sending: deque[Outgoing] = deque()
        packing: deque[Outgoing] = deque()

        def send_packed(left: int = 0) -> None:
            while len(packing) > left:
                packing.popleft().start()
                answers.append({"status": "ok"})

        try:
            for part, target in zip(asked.parts, targets, strict=True):
                one = asked._replace(parts=[part], deadline_s=time.monotonic() + wait_s)
                while len(sending) > _IN_FLIGHT:
                    _finish(sending)
                target.begin(one, self._reserved(one, sending))
                sending.append(target)
                try:
                    self._begin_to_pack(target)
                except Exception:
                    send_packed()  # the messages before have not failed
                    raise
                packing.append(target)
                send_packed(left=1)
            send_packed()
            while sending:
                _finish(sending)
        except Exception as exc:
            answers.append(refuse(exc))
        finally:
            while sending:
                sending.popleft().close()
        return answers

    def _begin_to_pack(self, target: Outgoing) -> None:
        """Queue the packing of a message with one region."""
        asked, (number, box) = target.asked, target.asked.parts[0]
        block = self._find(asked, *asked.blocks[number])
        with device_of(block):
            target.pack(0, self._queue_for(block), block[box_slices(box)])
        target.block = block

    def _reserved(self, asked: Asked, sending: deque[Outgoing]) -> list[Release]:
        """Reserve memory for one message. If necessary, wait for the arrival of those before."""
        while (reserved := self.packed.reserve(*self.own_bytes(asked))) is None:
            if sending:
                _finish(sending)
            elif not asked.left_s:
                raise TransferError(NO_ROOM)
            else:
                time.sleep(PAUSE_S)
        return reserved

    def handlers(self) -> Mapping[str, Handler]:
        return {**super().handlers(), _PEER_OP: self._answer_peer}

    @answers
    async def _answer_peer(self) -> dict[str, Any]:
        return {"address": (await self._started()).address}

    async def target(self, asked: Asked, where: Mailboxes) -> Outgoing:
        return Outgoing(self, where, await self._started(), await self._address_of(where.reader))

    def own_bytes(self, asked: Asked) -> list[int]:
        return [buffer_bytes(asked.layout().size_bytes)]

    async def _address_of(self, reader: str) -> bytes:
        """Return a worker's UCX address, requested from the worker itself."""
        address = self.addresses.get(reader)
        if address is None:
            about = "its UCX address"
            reply = await ask(self.worker, reader, _PEER_OP, PROBE_TIMEOUT_S, about)
            address = self.addresses[reader] = check_reply(reply, reader, about)["address"]
        return address


def _finish(sending: deque[Outgoing]) -> None:
    """Send the first message, if it has not started, and wait for its arrival."""
    with closing(sending.popleft()) as first:
        first.send()
