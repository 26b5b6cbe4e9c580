"""``ucx``: packed regions over UCX: by NVLink, InfiniBand, shared memory or TCP, as UCX chooses.

A reader asks for everything that it needs of a holder by one Dask RPC, and names a tag. The holder
packs the parts into buffers one after another. It sends each under a tag of its own, from its UCX
endpoint to the reader's. UCX moves a message when the reader is ready for it. A holder has only a
few packed messages waiting::

    reader                                     holder
      --- RPC: keys, boxes, tag -------------->  pack part 0
    look out for tag 0  <== message ============  send it; pack part 1
    put part 0 into place; tag 1  <== message   send it; buffer 0 is free; pack part 2
    ...
      <-- reply: bytes sent --------------------  all have arrived

So control and errors go over Dask's connections, encrypted where those are. Data go over the
fastest link, whatever Dask's own messages use.

With ``p2p.checksum`` the reply also holds the checksums of all messages. A reader computes its own
as messages arrive, and compares them at the end.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from dask_p2p.backends import backend_named
from dask_p2p.backends.device import current_device
from dask_p2p.config import (
    NOT_IN_AUTO,
    Options,
    Section,
    option,
    positive_bytes,
    positive_int,
    section,
    yes_or_no,
)
from dask_p2p.errors import Obstacle, TransferError
from dask_p2p.layout import box_size
from dask_p2p.retry import MEET_S
from dask_p2p.transports.base import Handler, Transport, answers
from dask_p2p.transports.buffers import Buffers, buffer_bytes
from dask_p2p.transports.checksums import algorithm_of
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.flow_control import FlowControl, PackingLimits, buffered_flow, parts_held
from dask_p2p.transports.messenger import Messenger, ucxx_obstacle
from dask_p2p.transports.reading import Reading, Request
from dask_p2p.transports.registry import left_bytes
from dask_p2p.transports.replies import ask
from dask_p2p.transports.requests import (
    checked_blocks,
    checked_integer,
    checked_parts,
    checked_seconds,
    checked_text,
)
from dask_p2p.transports.ucx_reading import SEND_OP, UcxReading
from dask_p2p.transports.ucx_sending import Outbox, Sending
from dask_p2p.types import DType, Kind

__all__ = ["UcxOptions", "UcxTransport"]

_PEER_OP = "p2p_ucx_peer"
_TAGS = 2**64
_LONGEST_ADDRESS_BYTES = 2**16
_MOST_AHEAD = 64
_MOST_CLOSED = 2**31
_REST_S = 1.0  # without messages, after which nobody looks for any
# One a reader that is being sent to. Most of their time they wait, and no reader should have to
# wait for another one.
_SENDING_THREADS = 32


@section("transports.ucx")
@dataclass(frozen=True, slots=True)
class UcxOptions(Section):
    """See p2p-schema.yaml."""

    part_bytes: int = option("part-bytes", positive_bytes)
    host_part_bytes: int = option("host-part-bytes", positive_bytes)
    parts_in_flight: int = option("parts-in-flight", positive_int)
    allow_unencrypted: bool = option("allow-unencrypted", yes_or_no)


class UcxTransport(Transport):
    """Regions over UCX endpoints of this package's own."""

    name: ClassVar[str] = "ucx"
    idle_parts: ClassVar[int] = 5

    # --- flow control ---

    @classmethod
    def rank(cls, kind: Kind, options: Options) -> float:
        # Between processes of one host with two cores and NumPy blocks UCX takes 1.3 to 2 times as
        # long as Dask's own TCP.
        return 50 if backend_named(kind).on_device else NOT_IN_AUTO

    @classmethod
    def flow_control(cls, options: Options, kind: Kind) -> FlowControl:
        """Return parts of the configured size, or the largest for which there is room.

        Blocks are asked for in their turn. A holder that is asked ahead of it, by all readers at
        once, packs for each of them before the first one gets anything (four H200: 7 instead of 4
        ms).
        """
        own = UcxOptions.of(options)
        part_bytes = own.part_bytes if backend_named(kind).on_device else own.host_part_bytes
        left = left_bytes(options, kind)
        return buffered_flow(part_bytes, own.parts_in_flight, left, lambda n: parts_held(n, kind))

    @classmethod
    def packing(cls, options: Options, kind: Kind) -> PackingLimits:
        part_bytes = buffer_bytes(cls.flow_control(options, kind).part_bytes or 0)
        ahead = UcxOptions.of(options).parts_in_flight
        return PackingLimits((ahead + 2) * part_bytes, 2)  # into buffers of powers of two

    # --- both sides ---

    def __init__(self, host: WorkerContext, options: Options) -> None:
        super().__init__(host, options)
        self._addresses: dict[str, bytes] = {}  # by worker
        self._messenger: Messenger | None = None
        self._lock = threading.Lock()
        # A process may come to the place of one that died in the middle of a message.
        self._next_tag = secrets.randbits(62)
        self.buffers = {kind: Buffers(kind, self.idle_bytes(options, kind)) for kind in self.kinds}
        self.pools += self.buffers.values()
        self._threads = ThreadPoolExecutor(_SENDING_THREADS, thread_name_prefix="p2p-ucx-send")
        self._resting: asyncio.TimerHandle | None = None

    # --- the reader's side, in task threads ---

    def obstacle(self, holder: str, kind: Kind, dtype: DType) -> Obstacle | None:
        if dtype.hasobject:
            return Obstacle("objects", "ucx moves bytes, not Python objects")
        return self._own_obstacle()

    def read(self, requests: Sequence[Request], options: Options) -> Reading:
        messenger = self.messenger()
        sizes = [box_size(box) for request in requests for box in request.boxes]
        largest_bytes = max(sizes, default=0) * requests[0].dtype.itemsize
        flow = self.flow_for(requests, options).for_regions(largest_bytes)
        buffers = self.buffers[requests[0].kind]
        ahead = max(UcxOptions.of(options).parts_in_flight, flow.parts_in_flight)
        reading = UcxReading(self.host, requests, flow, options, messenger, buffers, ahead)
        messages = sum(1 for part in reading.all_parts if box_size(part.box))
        if messages:
            with self._lock:
                reading.tag = self._next_tag
                self._next_tag = (reading.tag + messages) % 2**62
            closed = messenger.closed(self._addresses.get(requests[0].holder, b""))
            reading.start(closed)
        return reading

    # --- both sides ---

    def messenger(self) -> Messenger:
        """Return this process' messenger, started when it is first needed. Not for event loops."""
        with self._lock:
            if self.is_closed:
                raise TransferError("ucx: the worker is closing")
            if self._messenger is None:
                if (obstacle := self._own_obstacle()) is not None:
                    raise TransferError(f"ucx: {obstacle.full_text}", obstacle.full_text, obstacle)
                self._messenger = Messenger(current_device())
                self.host.loop.call_soon_threadsafe(self._rest_later)
            return self._messenger

    async def _started(self) -> Messenger:
        """Return the messenger, on the event loop; a thread only starts it."""
        if self._messenger is not None and not self.is_closed:
            return self._messenger
        return await self.host.offload(self.messenger)

    def _rest_later(self) -> None:
        if not self.is_closed:
            self._resting = self.host.loop.call_later(_REST_S, self._rest)

    def _rest(self) -> None:
        """Let UCX rest when nothing is under way."""
        assert self._messenger is not None
        resting = asyncio.ensure_future(self.host.offload(self._messenger.rest, _REST_S))
        resting.add_done_callback(lambda _: self._rest_later())

    def usage(self) -> dict[str, int]:
        messages = 0 if self._messenger is None else self._messenger.under_way
        return {"messages": messages, "serving": self.serving}

    def on_worker_left(self, holder: str) -> None:
        address = self._addresses.pop(holder, None)
        if address is not None and self._messenger is not None:
            self.offload(self._messenger.forget, address)  # which waits for a last word

    async def close(self) -> None:
        self.is_closed = True
        if self._resting is not None:
            self._resting.cancel()
        await self.host.offload(self._close_messenger)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _close_messenger(self) -> None:
        with self._lock:  # one that is just being started is waited for
            if self._messenger is not None:
                self._messenger.close()

    def _own_obstacle(self) -> Obstacle | None:
        if self.host.encrypted_only and not UcxOptions.of(self.options).allow_unencrypted:
            return Obstacle(
                "unencrypted",
                "UCX does not encrypt, and this cluster requires encryption",
                "Keep to the transports that remain. To use UCX all the same, set "
                "p2p.transports.ucx.allow-unencrypted on the workers",
            )
        return ucxx_obstacle()

    # --- the holder's side ---

    def handlers(self) -> Mapping[str, Handler]:
        return {_PEER_OP: self._answer_peer, SEND_OP: self._answer_send}

    @answers
    async def _answer_peer(self) -> dict[str, Any]:
        return {"address": (await self._started()).address}

    @answers
    async def _answer_send(
        self,
        *,
        blocks: Any,
        parts: Any,
        dtype: Any,
        tag: Any,
        reader: Any,
        closed: Any,
        ahead: Any,
        wait_s: Any,
        checksum: Any = None,
    ) -> dict[str, Any]:
        """Send parts of blocks, under this tag and those after it. Blocks are leased until then."""
        blocks = checked_blocks(blocks)
        parts = checked_parts(parts, [shape for _, shape in blocks])
        dtype = checked_text("dtype", dtype)
        tag = checked_integer("tag", tag, 0, _TAGS - 1 - len(parts))
        closed = checked_integer("closed", closed, 0, _MOST_CLOSED)
        ahead = checked_integer("ahead", ahead, 1, _MOST_AHEAD)
        wait_s = checked_seconds("wait_s", wait_s)
        algorithm = None if checksum is None else algorithm_of(checksum)
        messenger = await self._started()
        address = await self._address_of(checked_text("reader", reader))
        other_host = urlsplit(reader).hostname != urlsplit(self.host.address).hostname
        reserved = self.packed.reservation()
        outbox = Outbox(messenger, address, closed, tag, ahead, wait_s, reserved, other_host)
        any_stream = self.options.any_producer_stream
        sending = Sending(self.host, self.buffers, any_stream, dtype, outbox, algorithm)
        failure = await self.host.offload(sending.run, blocks, parts, threads=self._threads)
        extra = {} if algorithm is None else {"checksums": sending.sums}
        return {"sent": len(sending.sums), "nbytes": outbox.sent_bytes, **extra, **failure}

    async def _address_of(self, reader: str) -> bytes:
        """Return where a worker's messages go to. It is asked itself, so that nobody else can say.

        What does not come from a messenger would do harm to UCX.
        """
        address = self._addresses.get(reader)
        if address is None:
            reply = await ask(self.host, reader, _PEER_OP, MEET_S, "its UCX address")
            address = reply.get("address") if isinstance(reply, dict) else None
            if not isinstance(address, bytes) or not 0 < len(address) <= _LONGEST_ADDRESS_BYTES:
                raise TransferError(f"{reader} did not send its UCX address: {reply!r}")
            self._addresses[reader] = address
        return address
