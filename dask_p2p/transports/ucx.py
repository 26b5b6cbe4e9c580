"""``ucx``: packed regions over UCX: NVLink, InfiniBand, shared memory or TCP, whatever is there.

A reader asks for all that it needs of a holder by one RPC of Dask, and names a tag. The holder
packs part after part into buffers, and sends each under a tag of its own, from its UCX endpoint to
the reader's. UCX moves a message when the reader is ready for it, and a holder has only a few
packed ones waiting::

    reader                                     holder
      --- RPC: keys, boxes, tag -------------->  pack part 0
    look out for tag 0  <== message ============  send it; pack part 1
    put part 0 into place; tag 1  <== message   send it; buffer 0 is free; pack part 2
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar

from dask_p2p.config import Options
from dask_p2p.errors import BlockMismatchError, TransferError
from dask_p2p.kernels import device_of, kernel_for
from dask_p2p.kernels.checksum import ALGORITHMS
from dask_p2p.kernels.device import current_device
from dask_p2p.kernels.queue import queue_for
from dask_p2p.layout import Box, box_shape, box_size, box_slices
from dask_p2p.transports.base import (
    GRACE_S,
    MEET_S,
    Arrived,
    Handler,
    Host,
    Part,
    Reading,
    Region,
    Request,
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
    checked_blocks,
    checked_integer,
    checked_parts,
    checked_seconds,
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

    def read(self, requests: Sequence[Request], options: Options) -> Reading:
        messenger = self.messenger()
        sizes = [box_size(box) for request in requests for box in request.boxes]
        largest_bytes = max(sizes, default=0) * requests[0].dtype.itemsize
        pacing = self.flow(requests, options).for_regions(largest_bytes)
        buffers = self._buffers[requests[0].kind]
        reading = _UcxReading(self.host, requests, pacing, options, messenger, buffers)
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

    def buffers(self, kind: str) -> Buffers:
        """Return the buffers for messages of blocks of this kind."""
        return self._buffers[kind]

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
        blocks: Any = None,
        parts: Any = None,
        dtype: Any = None,
        tag: Any = None,
        reader: Any = None,
        closed: Any = None,
        ahead: Any = None,
        wait_s: Any = None,
        checksum: Any = None,
        **unknown: Any,
    ) -> dict[str, Any]:
        """Send parts of blocks, under this tag and those after it. Blocks are leased until then."""
        self._serving += 1
        try:
            no_more(unknown)
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
            room = self.packed.room()
            outbox = _Outbox(messenger, address, closed, tag, ahead, wait_s, room)
            sending = _Sending(self, dtype, outbox, algorithm)
            failure = await self.host.offload(sending.run, blocks, parts, threads=self._threads)
        except Exception as exc:
            return refuse(exc)
        finally:
            self._serving -= 1
        sent = {"sent": len(sending.sums), "nbytes": outbox.sent_bytes}
        more = {} if algorithm is None else {"checksums": sending.sums}
        return {"status": "ok", **sent, **more, **failure}

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


class _Sending:
    """Parts of blocks packed one after another, one while another is sent.

    Attributes
    ----------
    sums : list of int
        For each message that was sent its checksum; 0 where none is asked for.
    """

    def __init__(
        self, transport: UcxTransport, dtype: str, outbox: _Outbox, algorithm: str | None
    ) -> None:
        self.sums: list[int] = []
        self._transport = transport
        self._dtype = dtype
        self._outbox = outbox
        self._algorithm = algorithm
        # With the key, the box, and how to wait for the values.
        self._packed: deque[tuple[Any, Any, Box, Callable[[], None]]] = deque()

    def run(
        self, blocks: Sequence[tuple[Any, tuple[int, ...]]], parts: Sequence[tuple[int, Box]]
    ) -> dict[str, Any]:
        """Send all parts, up to the first block that fails; return what is to be said of that."""
        try:
            for number, group in groupby(parts, key=itemgetter(0)):
                key, shape = blocks[number]
                try:
                    block = self._find(key, shape)
                except Exception as exc:
                    self._send_packed(0)
                    return {**refuse(exc), "block": number}
                with device_of(block):
                    self._send(key, block, [box for _, box in group])
                del block
        finally:
            self._outbox.close()
        return {}

    def _find(self, key: Any, shape: tuple[int, ...]) -> Any:
        block = find_block(self._transport.host, key, shape)
        if self._dtype != dtype_text(block.dtype):
            raise mismatch(f"block {key!r}", self._dtype, dtype_text(block.dtype))
        return block

    def _send(self, key: Any, block: Any, boxes: Sequence[Box]) -> None:
        kind, transport = kernel_for(block).name, self._transport
        queue = queue_for(kind, beside_copies=True)
        queue.wait_until_written([block], any_stream=transport.options.any_producer_stream)
        buffers = transport.buffers(kind)
        try:
            for box in boxes:
                nbytes = box_size(box) * block.dtype.itemsize
                if not self._outbox.has_room(nbytes):
                    self._send_packed(0)
                    self._outbox.make_room(nbytes)
                array = buffers.take(box_shape(box), block.dtype)
                self._packed.append((array, key, box, queue.pack(array, block[box_slices(box)])))
                del array
                self._send_packed(1)  # one is packed while another is sent
            self._send_packed(0)
        finally:
            queue.synchronize()  # only then may buffers be used again

    def _send_packed(self, left: int) -> None:
        while len(self._packed) > left:
            array, key, box, wait = self._packed.popleft()
            wait()
            algorithm = self._algorithm
            sum_ = 0 if algorithm is None else region_sum(key, box, array, algorithm)
            self._outbox.send(array)
            self.sums.append(sum_)


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


class _UcxReading(Reading):
    """Parts that arrive one after another, each as a message."""

    def __init__(
        self,
        host: Host,
        requests: Sequence[Request],
        pacing: Pacing,
        options: Options,
        messenger: Messenger,
        buffers: Buffers,
    ) -> None:
        super().__init__(requests, pacing)
        self.all_parts = list(self.parts())
        self.tag = 0  # of the first message
        self._host = host
        self._options = options
        self._messenger = messenger
        self._buffers = buffers
        self._algorithm = ALGORITHMS[requests[0].kind] if options.checksum else None
        self._here: dict[int, tuple[Part, int]] = {}  # checksums of what came, by its number
        self._there: dict[int, Any] = {}  # as the holder says
        self._refused: dict[int, Exception] = {}  # by request
        self._broken: Exception | None = None  # that keeps the others from coming too
        self._asking: Future[None] | None = None
        self._pending: list[Message] = []

    def start(self, closed: int) -> None:
        """Ask the holder; its answer comes when all have arrived."""
        self._asking = asyncio.run_coroutine_threadsafe(self._ask(closed), self._host.loop)

    async def _ask(self, closed: int) -> None:
        """Have the holder send all messages; of a block that fails it sends none, or no more."""
        messages = [part for part in self.all_parts if box_size(part.box)]
        done = 0
        while done < len(messages):
            asked = list(dict.fromkeys(part.request for part in messages[done:]))
            reply = await self._ask_for(messages[done:], asked, self.tag + done, closed)
            failed = _failed_of(reply, asked)
            about = self.requests[asked[0] if failed is None else failed]
            try:
                check_reply(reply, about, "ucx")
                sent = len(messages) - done
            except (TransferError, BlockMismatchError) as exc:
                if failed is None:
                    raise
                sent = checked_integer("sent", reply.get("sent"), 0, len(messages) - done)
                self._refused[failed] = exc
            self._note_sent(reply, messages[done : done + sent], done, about)
            done += sent
            while done < len(messages) and messages[done].request in self._refused:
                done += 1

    async def _ask_for(
        self, parts: Sequence[Part], asked: Sequence[int], tag: int, closed: int
    ) -> Any:
        numbers = {request: number for number, request in enumerate(asked)}
        first, options = self.requests[asked[0]], self._options
        wait_s = options.request_timeout_s
        more = {} if self._algorithm is None else {"checksum": self._algorithm}
        # Each message has a deadline of its own, and whoever waits for it gives up there.
        return await ask(
            self._host, first.holder, _SEND_OP, wait_s * (len(parts) + 1), f"block {first.key!r}",
            blocks=[(self.requests[n].key, self.requests[n].shape) for n in asked],
            parts=[(numbers[part.request], part.box) for part in parts],
            dtype=dtype_text(first.dtype), tag=tag, reader=self._host.address, closed=closed,
            ahead=max(options.ucx_parts_in_flight, self.ahead), wait_s=wait_s, **more,
        )  # fmt: skip

    def _note_sent(
        self, reply: dict[str, Any], parts: Sequence[Part], first: int, about: Request
    ) -> None:
        """Check what the holder says to have sent, from this message on."""
        expected = sum(box_size(part.box) for part in parts) * about.dtype.itemsize
        if reply.get("nbytes") != expected:
            raise TransferError(
                f"ucx: {about.holder} sent {reply.get('nbytes')} bytes of {about}, not {expected}"
            )
        if self._algorithm is None:
            return
        sums: Any = reply.get("checksums")
        if type(sums) not in (list, tuple) or len(sums) != len(parts):
            raise TransferError(f"ucx: {about.holder} sent no checksums of {about}")
        self._there.update(enumerate(sums, first))

    def __iter__(self) -> Iterator[Region]:
        number = 0
        for part in self.all_parts:
            is_message = bool(box_size(part.box))
            if part.request not in self._dropped:
                request = self.requests[part.request]
                region = self._buffers.take(box_shape(part.box), request.dtype)
                if is_message:
                    message = self._messenger.receive(_raw(region), self.tag + number)
                    self._pending.append(message)
                    yield Region(part, _Arriving(self, message, region, number, part))
                else:
                    yield Region(part, Arrived(region))
                del region
            number += is_message

    def wait(self, message: Message, part: Part) -> None:
        """Wait for a message, or for the holder's word that there will be none."""
        request = self.requests[part.request]
        try:
            message.result(self._options.request_timeout_s, partial(self._check_answer, part))
        except (TransferError, BlockMismatchError) as exc:
            if exc is self._refused.get(part.request) or exc is self._answered():
                raise
            said = f"ucx: {request} does not come: {exc}"
            error = SilentError if isinstance(exc, SilentError) else TransferError
            # The holder goes on with the next message only when this one has arrived.
            self._broken = error(said, reason=str(exc))
            raise self._broken from exc
        finally:
            self._pending.remove(message)

    def note(self, number: int, part: Part, region: Any) -> None:
        """Make the checksum of a region that is here, to be compared in the end."""
        if self._algorithm is not None:
            key = self.requests[part.request].key
            self._here[number] = part, region_sum(key, part.box, region, self._algorithm)

    def confirm(self) -> None:
        # UCX takes a message that is too short for a good one: only the holder knows.
        if self._asking is None:
            return
        first = self.requests[0]
        try:
            self._asking.result(self._options.request_timeout_s + GRACE_S)
        except TimeoutError:
            raise TransferError(
                f"ucx: {first.holder} does not say that it has sent {first}"
            ) from None
        for number, (part, here) in self._here.items():
            request, there = self.requests[part.request], self._there.get(number)
            assert self._algorithm is not None
            check_sum("ucx", request, part.box, here, there, self._algorithm)

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

    def _check_answer(self, part: Part) -> None:
        error = self._refused.get(part.request) or self._answered() or self._broken
        if error is not None:
            raise error


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A region on its way."""

    reading: _UcxReading
    message: Message
    region: Any
    number: int  # of the message
    part: Part

    def result(self, timeout_s: float | None = None) -> Any:
        self.reading.wait(self.message, self.part)
        self.reading.note(self.number, self.part, self.region)
        return self.region


def _failed_of(reply: Any, asked: Sequence[int]) -> int | None:
    """Return which of the requests that were asked for has failed on its own; None if none has."""
    number = reply.get("block") if isinstance(reply, dict) else None
    return asked[number] if type(number) is int and 0 <= number < len(asked) else None


def _raw(array: Any) -> Any:
    """Return the bytes of a C-ordered array."""
    return array.reshape(-1).view("u1")
