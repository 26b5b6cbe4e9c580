"""``ucx``: packed regions over UCX: NVLink, InfiniBand, shared memory or TCP, whatever is there.

A reader asks for all that it needs of a block by one RPC of Dask, and names a tag. The holder packs
region after region into buffers, and sends each under a tag of its own, from its UCX endpoint to
the reader's. UCX moves a message when the reader is ready for it, and a holder has only a few
packed ones waiting::

    reader                                     holder
      --- RPC: key, boxes, shape, tag --------->  pack region 0
    look out for tag 0  <== message ============  send it; pack region 1
    put region 0 into place; tag 1  <== message   send it; buffer 0 is free; pack region 2
    ...
      <-- reply: bytes sent --------------------  all have arrived

So control and errors go over Dask's connections, encrypted where those are, and data over the
quickest link. What Dask's own messages go over does not matter.

With ``p2p.checksum`` that reply holds the checksums of all messages too. A reader makes its own as
messages come, and compares in the end.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from dask_p2p.config import Options
from dask_p2p.errors import TransferError
from dask_p2p.kernels import device_of, kernel_for
from dask_p2p.kernels.checksum import ALGORITHMS
from dask_p2p.kernels.device import current_device
from dask_p2p.kernels.queue import queue_for
from dask_p2p.layout import Box, box_shape, box_size, box_slices
from dask_p2p.transports.base import (
    GRACE_S,
    MEET_S,
    Arrived,
    BlockSpec,
    Handler,
    Host,
    Pending,
    RemoteBlock,
    SilentError,
    Transport,
    ask,
    check_reply,
    dtype_text,
    find_block,
    mismatch,
    refuse,
)
from dask_p2p.transports.budget import Room
from dask_p2p.transports.buffers import Buffers, buffer_bytes
from dask_p2p.transports.messenger import Message, Messenger, ucxx_obstacle
from dask_p2p.transports.pacing import Pacing, idle_bytes, ucx_pacing
from dask_p2p.transports.requests import (
    checked_boxes,
    checked_integer,
    checked_key,
    checked_seconds,
    checked_shape,
    checked_text,
    no_more,
)
from dask_p2p.transports.sums import algorithm_of, check_sum, region_sum

__all__ = ["UcxTransport"]

_PEER_OP = "p2p_ucx_peer"
_SEND_OP = "p2p_ucx_send"
_TAGS = 2**64
_LONGEST_ADDRESS_BYTES = 2**16
_MOST_AHEAD = 64
_MOST_CLOSED = 2**31
_REST_S = 1.0  # without messages, after which nobody looks for any
_PAUSE_S = 1e-3  # while others have packed as much as may be
# One a reader that is being sent to. Most of their time they wait, and no reader should have to
# wait for another one.
_SENDING_THREADS = 32


class UcxTransport(Transport):
    """Regions over UCX endpoints of this package's own."""

    name: ClassVar[str] = "ucx"

    def __init__(self, host: Host, options: Options) -> None:
        super().__init__(host, options)
        self._addresses: dict[str, bytes] = {}  # by worker
        self._messenger: Messenger | None = None
        self._lock = threading.Lock()
        # A process may come to the place of one that died in the middle of a message.
        self._next_tag = secrets.randbits(62)
        self._buffers = {
            kind: Buffers(kind, idle_bytes("ucx", options, kind)) for kind in ("numpy", "cupy")
        }
        self._threads = ThreadPoolExecutor(_SENDING_THREADS, thread_name_prefix="p2p-ucx-send")
        self._resting: asyncio.TimerHandle | None = None
        self._serving = 0  # requests; changed on the event loop only
        self._closed = False

    # --- the reader's side, in task threads ---

    def obstacle(self, holder: str, kind: str, dtype: Any) -> str | None:
        if dtype.hasobject:
            return "ucx moves bytes, not Python objects"
        return self._own_obstacle()

    def pacing(self, options: Options, kind: str) -> Pacing:
        return ucx_pacing(options, kind)

    def open(self, block: BlockSpec, boxes: Iterable[Box], options: Options) -> RemoteBlock:
        messenger, boxes = self.messenger(), list(boxes)
        full = [box for box in boxes if box_size(box)]
        with self._lock:
            tag = self._next_tag
            self._next_tag = (tag + len(full)) % 2**62
        opened = _UcxBlock(block, boxes, tag, messenger, self._buffers[block.kind], options)
        if full:
            closed = messenger.closed(self._addresses.get(block.holder, b""))
            asking = asyncio.run_coroutine_threadsafe(
                self._ask(block, full, tag, closed, options), self.host.loop
            )
            opened.follow(asking)
        return opened

    async def _ask(
        self, block: BlockSpec, boxes: Sequence[Box], tag: int, closed: int, options: Options
    ) -> Any:
        """Have the holder send regions; return when it says that all have arrived.

        What is returned is what it says to be their checksums, if they were asked for.
        """
        wait_s = options.request_timeout_s
        more = {"checksum": ALGORITHMS[block.kind]} if options.checksum else {}
        # Each message has a deadline of its own, and whoever waits for it gives up there.
        total_s = wait_s * (len(boxes) + 1)
        reply = check_reply(
            await ask(
                self.host, block.holder, _SEND_OP, total_s, f"block {block.key!r}",
                key=block.key, boxes=boxes, shape=block.shape, dtype=dtype_text(block.dtype),
                tag=tag, reader=self.host.address, closed=closed,
                ahead=options.ucx_parts_in_flight, wait_s=wait_s, **more,
            ),
            block,
            self.name,
        )  # fmt: skip
        expected = sum(map(box_size, boxes)) * block.dtype.itemsize
        if reply.get("nbytes") != expected:
            raise TransferError(
                f"ucx: {block.holder} sent {reply.get('nbytes')} bytes of {block}, not {expected}"
            )
        return reply.get("checksums")

    # --- both sides ---

    def messenger(self) -> Messenger:
        """Return this process' messenger, started when it is first needed; not for event loops."""
        with self._lock:
            if self._closed:
                raise TransferError("ucx: the worker is closing")
            if self._messenger is None:
                if (obstacle := self._own_obstacle()) is not None:
                    raise TransferError(f"ucx: {obstacle}", reason=obstacle)
                self._messenger = Messenger(current_device())
                self.host.loop.call_soon_threadsafe(self._rest_later)
            return self._messenger

    async def _started(self) -> Messenger:
        """Return the messenger, on the event loop; a thread only starts it."""
        if self._messenger is not None and not self._closed:
            return self._messenger
        return await self.host.offload(self.messenger)

    def _rest_later(self) -> None:
        if not self._closed:
            self._resting = self.host.loop.call_later(_REST_S, self._rest)

    def _rest(self) -> None:
        """Let UCX rest when nothing is under way."""
        assert self._messenger is not None
        resting = asyncio.ensure_future(self.host.offload(self._messenger.rest, _REST_S))
        resting.add_done_callback(lambda _: self._rest_later())

    def held(self) -> dict[str, int]:
        messages = 0 if self._messenger is None else self._messenger.under_way
        return {"messages": messages, "serving": self._serving}

    def forget(self, holder: str) -> None:
        address = self._addresses.pop(holder, None)
        if address is not None and self._messenger is not None:
            self.offload(self._messenger.forget, address)  # which waits for a last word

    async def close(self) -> None:
        self._closed = True
        if self._resting is not None:
            self._resting.cancel()
        await self.host.offload(self._close_messenger)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _close_messenger(self) -> None:
        with self._lock:  # one that is just being started is waited for
            if self._messenger is not None:
                self._messenger.close()

    def _own_obstacle(self) -> str | None:
        if self.host.encrypted_only and not self.options.ucx_allow_unencrypted:
            return (
                "UCX does not encrypt, and this cluster requires encryption. To use UCX all the "
                "same, set p2p.transports.ucx.allow-unencrypted on the workers"
            )
        return ucxx_obstacle()

    # --- the holder's side ---

    def handlers(self) -> Mapping[str, Handler]:
        return {_PEER_OP: self._answer_peer, _SEND_OP: self._answer_send}

    async def _answer_peer(self, /, **unknown: Any) -> dict[str, Any]:
        try:
            no_more(unknown)
            messenger = await self._started()
        except Exception as exc:
            return refuse(exc)
        return {"status": "ok", "address": messenger.address}

    async def _answer_send(
        self,
        /,
        key: Any = None,
        boxes: Any = None,
        shape: Any = None,
        dtype: Any = None,
        tag: Any = None,
        reader: Any = None,
        closed: Any = None,
        ahead: Any = None,
        wait_s: Any = None,
        checksum: Any = None,
        **unknown: Any,
    ) -> dict[str, Any]:
        """Send regions, under this tag and those after it. The block is leased until they are."""
        self._serving += 1
        try:
            no_more(unknown)
            shape = checked_shape(shape)
            boxes = checked_boxes(boxes, shape)
            key, dtype = checked_key(key), checked_text("dtype", dtype)
            tag = checked_integer("tag", tag, 0, _TAGS - 1 - len(boxes))
            closed = checked_integer("closed", closed, 0, _MOST_CLOSED)
            ahead = checked_integer("ahead", ahead, 1, _MOST_AHEAD)
            wait_s = checked_seconds("wait_s", wait_s)
            algorithm = None if checksum is None else algorithm_of(checksum)
            messenger = await self._started()
            address = await self._address_of(checked_text("reader", reader))
            room = self.packed.room()
            outbox = _Outbox(messenger, address, closed, tag, ahead, wait_s, room)
            nbytes, sums = await self.host.offload(
                self._send, key, boxes, shape, dtype, outbox, algorithm, threads=self._threads
            )
        except Exception as exc:
            return refuse(exc)
        finally:
            self._serving -= 1
        more = {} if algorithm is None else {"checksums": sums}
        return {"status": "ok", "nbytes": nbytes, **more}

    async def _address_of(self, reader: str) -> bytes:
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

    def _send(
        self,
        key: Any,
        boxes: list[Box],
        shape: tuple[int, ...],
        dtype: str,
        outbox: _Outbox,
        algorithm: str | None,
    ) -> tuple[int, list[int]]:
        """Pack and send regions of a block; return how many bytes that were, and checksums."""
        block = find_block(self.host, key, shape)
        if dtype != dtype_text(block.dtype):
            raise mismatch(f"block {key!r}", dtype, dtype_text(block.dtype))
        with device_of(block):
            return self._send_block(key, boxes, block, outbox, algorithm)

    def _send_block(
        self, key: Any, boxes: list[Box], block: Any, outbox: _Outbox, algorithm: str | None
    ) -> tuple[int, list[int]]:
        kind = kernel_for(block).name
        queue = queue_for(kind, beside_copies=True)
        queue.wait_until_written([block], any_stream=self.options.any_producer_stream)
        # With its box, and how to wait for its values.
        packed: deque[tuple[Any, Box, Callable[[], None]]] = deque()
        sums: list[int] = []

        def send_packed(left: int) -> None:
            while len(packed) > left:
                array, box, wait = packed.popleft()
                wait()
                if algorithm is not None:
                    sums.append(region_sum(key, box, array, algorithm))
                outbox.send(array)

        try:
            for box in boxes:
                nbytes = box_size(box) * block.dtype.itemsize
                if not outbox.has_room(nbytes):
                    send_packed(0)
                    outbox.make_room(nbytes)
                array = self._buffers[kind].take(box_shape(box), block.dtype)
                packed.append((array, box, queue.pack(array, block[box_slices(box)])))
                del array
                send_packed(1)  # one is packed while another is sent
            send_packed(0)
        finally:
            try:
                queue.synchronize()  # only then may buffers be used again
            finally:
                outbox.close()
        return outbox.sent_bytes, sums


class _Outbox:
    """Messages to one reader under consecutive tags, a few of them on their way at a time."""

    def __init__(
        self,
        messenger: Messenger,
        address: bytes,
        closed: int,
        tag: int,
        ahead: int,
        timeout_s: float,
        room: Room,
    ) -> None:
        self.sent_bytes = 0
        self._room = room
        self._messenger = messenger
        self._address = address
        self._closed_there = closed  # of the reader's endpoints to here
        self._tag = tag
        self._ahead = ahead
        self._timeout_s = timeout_s
        self._sent: deque[tuple[Message, int]] = deque()  # with the size of its buffer

    def has_room(self, nbytes: int) -> bool:
        """Take room for an array that is to be packed, if there is room now."""
        return self._room.take(buffer_bytes(nbytes))

    def make_room(self, nbytes: int) -> None:
        """Take room for an array that is to be packed, when what was sent has arrived."""
        deadline_s = time.monotonic() + self._timeout_s
        while not self.has_room(nbytes):
            if self._sent:
                self._wait_for_oldest()
            elif time.monotonic() > deadline_s:
                raise TransferError("it has packed as much for others as p2p.memory allows")
            else:
                time.sleep(_PAUSE_S)

    def send(self, array: Any) -> None:
        """Send an array; wait until there is room for another."""
        self._messenger.renew(self._address, self._closed_there)
        message = self._messenger.send(self._address, _raw(array), self._tag)
        self._sent.append((message, buffer_bytes(array.nbytes)))
        self._tag += 1
        self.sent_bytes += array.nbytes
        while len(self._sent) > self._ahead:
            self._wait_for_oldest()

    def close(self) -> None:
        """Wait until everything has arrived."""
        try:
            while self._sent:
                self._wait_for_oldest()
        finally:
            self._room.close()

    def _wait_for_oldest(self) -> None:
        message, size_bytes = self._sent.popleft()
        message.result(self._timeout_s)
        self._room.give_back(size_bytes)


class _UcxBlock(RemoteBlock):
    """A block whose regions arrive one after another."""

    def __init__(
        self,
        block: BlockSpec,
        boxes: Sequence[Box],
        tag: int,
        messenger: Messenger,
        buffers: Buffers,
        options: Options,
    ) -> None:
        self._block = block
        self._boxes = iter(boxes)
        self._messages = sum(1 for box in boxes if box_size(box))
        self._requested = 0  # of these messages
        self._algorithm = ALGORITHMS[block.kind] if options.checksum else None
        self._sums: dict[int, tuple[Box, int]] = {}  # of what came, by its number
        self._tag = tag
        self._messenger = messenger
        self._buffers = buffers
        self._timeout_s = options.request_timeout_s
        self._asking: Future[Any] | None = None
        self._pending: list[Message] = []

    def follow(self, asking: Future[Any]) -> None:
        """Take note of the holder's answer, which comes when all have arrived."""
        self._asking = asking

    def request(self) -> Pending:
        box = next(self._boxes)
        shape = box_shape(box)
        region = self._buffers.take(shape, self._block.dtype)
        if not prod(shape):
            return Arrived(region)
        message = self._messenger.receive(_raw(region), self._tag)
        self._tag += 1
        self._pending.append(message)
        self._requested += 1
        return _Arriving(self, message, region, self._requested - 1, box)

    def wait(self, message: Message) -> None:
        """Wait for a message, or for the holder's word that there will be none."""
        try:
            message.result(self._timeout_s, self._check_answer)
        except TransferError as exc:
            if self._answered() is exc:
                raise
            said = f"ucx: {self._block} does not come: {exc}"
            error = SilentError if isinstance(exc, SilentError) else TransferError
            raise error(said, reason=str(exc)) from exc
        finally:
            self._pending.remove(message)

    def note(self, number: int, box: Box, region: Any) -> None:
        """Make the checksum of a region that is here, to be compared in the end."""
        if self._algorithm is not None:
            self._sums[number] = box, region_sum(self._block.key, box, region, self._algorithm)

    def confirm(self) -> None:
        # UCX takes a message that is too short for a good one: only the holder knows.
        if self._asking is None:
            return
        try:
            theirs = self._asking.result(self._timeout_s + GRACE_S)
        except TimeoutError:
            raise TransferError(
                f"ucx: {self._block.holder} does not say that it has sent {self._block}"
            ) from None
        if self._algorithm is None:
            return
        if type(theirs) not in (list, tuple) or len(theirs) != self._messages:
            raise TransferError(f"ucx: {self._block.holder} sent no checksums of {self._block}")
        for number, (box, here) in self._sums.items():
            check_sum("ucx", self._block, box, here, theirs[number], self._algorithm)

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        for message in self._pending:
            self._messenger.end(message)
        self._pending.clear()

    def _answered(self) -> BaseException | None:
        """Return the holder's error, if it has said one."""
        asking = self._asking
        if asking is None or not asking.done() or asking.cancelled():
            return None
        return asking.exception()

    def _check_answer(self) -> None:
        error = self._answered()
        if error is not None:
            raise error


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A region on its way."""

    block: _UcxBlock
    message: Message
    region: Any
    number: int  # among those of the block
    box: Box

    def result(self, timeout_s: float | None = None) -> Any:
        self.block.wait(self.message)
        self.block.note(self.number, self.box, self.region)
        return self.region


def _raw(array: Any) -> Any:
    """Return the bytes of a C-ordered array."""
    return array.reshape(-1).view("u1")
