"""The reader's side of ``ucx``: messages to wait for, and the holder's reply about them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from dask_p2p.backends import backend_named
from dask_p2p.config import Options
from dask_p2p.errors import BlockMismatchError, SilentError, TransferError
from dask_p2p.layout import box_shape, box_size
from dask_p2p.retry import GRACE_S
from dask_p2p.transports.buffers import Buffers, raw_bytes
from dask_p2p.transports.checksums import check_sum, region_sum
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.flow_control import FlowControl
from dask_p2p.transports.messenger import Message, Messenger
from dask_p2p.transports.reading import Arrived, Part, Reading, Region, Request
from dask_p2p.transports.replies import ask, check_reply, dtype_text
from dask_p2p.types import Array

__all__ = ["SEND_OP", "UcxReading"]

SEND_OP = "p2p_ucx_send"
_MOST_MESSAGES = 2**15  # that one request asks for


class UcxReading(Reading):
    """Parts that arrive one after another, each as a message."""

    def __init__(
        self,
        host: WorkerContext,
        requests: Sequence[Request],
        flow: FlowControl,
        options: Options,
        messenger: Messenger,
        buffers: Buffers,
        sent_ahead: int,
    ) -> None:
        super().__init__(requests, flow)
        self.all_parts = list(self.parts())
        self.tag = 0  # of the first message
        self._host = host
        self._options = options
        self._messenger = messenger
        self._buffers = buffers
        self._sent_ahead = sent_ahead  # messages that the holder may have on their way
        self._algorithm = (
            backend_named(requests[0].kind).checksum_algorithm if options.checksum else None
        )
        self._local_sums: dict[int, tuple[Part, int]] = {}  # checksums of what came, by its number
        self._remote_sums: dict[int, Any] = {}  # as the holder says
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
        answered = 0
        while rest := messages[answered : answered + _MOST_MESSAGES]:
            reply = await self._ask_for(rest, self.tag + answered, closed)
            sent = _sent_before_failure(reply, len(rest))
            failed = rest[sent or 0].request
            about = self.requests[failed]
            try:
                check_reply(reply, about, "ucx")
                sent = len(rest)
            except (TransferError, BlockMismatchError) as exc:
                if sent is None:
                    raise
                self._refused[failed] = exc
            self._note_sent(reply, rest[:sent], answered, about)
            answered += sent
            while answered < len(messages) and messages[answered].request in self._refused:
                answered += 1

    async def _ask_for(self, parts: Sequence[Part], tag: int, closed: int) -> Any:
        first, options = self.requests[parts[0].request], self._options
        wait_s = options.request_timeout_s
        extra = {} if self._algorithm is None else {"checksum": self._algorithm}
        # Each message has a deadline of its own, and whoever waits for it gives up there.
        return await ask(
            self._host, first.holder, SEND_OP, wait_s * (len(parts) + 1), f"block {first.key!r}",
            **self.named(parts),
            dtype=dtype_text(first.dtype), tag=tag, reader=self._host.address, closed=closed,
            ahead=self._sent_ahead, wait_s=wait_s, **extra,
        )  # fmt: skip

    def _note_sent(
        self, reply: dict[str, Any], parts: Sequence[Part], first: int, about: Request
    ) -> None:
        """Check what the holder reports as sent, from this message on."""
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
        self._remote_sums.update(enumerate(sums, first))

    def __iter__(self) -> Iterator[Region]:
        number = 0
        for part in self.all_parts:
            is_message = bool(box_size(part.box))
            if part.request not in self._dropped:
                request = self.requests[part.request]
                region = self._buffers.take(box_shape(part.box), request.dtype)
                if is_message:
                    message = self._messenger.receive(raw_bytes(region), self.tag + number)
                    self._pending.append(message)
                    yield Region(part, _Arriving(self, message, region, number, part))
                else:
                    yield Region(part, Arrived(region))
                del region
            number += is_message

    def wait(self, message: Message, part: Part) -> None:
        """Wait for a message, or for the holder's reply that there will be none."""
        request = self.requests[part.request]
        try:
            message.result(self._options.request_timeout_s, partial(self._check_answer, part))
        except (TransferError, BlockMismatchError) as exc:
            if exc is self._refused.get(part.request) or exc is self._answered():
                raise
            text = f"ucx: {request} does not come: {exc}"
            error = SilentError if isinstance(exc, SilentError) else TransferError
            # The holder goes on with the next message only when this one has arrived.
            self._broken = error(text, reason=str(exc))
            raise self._broken from exc
        finally:
            self._pending.remove(message)

    def note(self, number: int, part: Part, region: Array) -> None:
        """Compute the checksum of a region that has arrived, to be compared at the end."""
        if self._algorithm is not None:
            key = self.requests[part.request].key
            self._local_sums[number] = part, region_sum(key, part.box, region, self._algorithm)

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
        for number, (part, local) in self._local_sums.items():
            request, remote = self.requests[part.request], self._remote_sums.get(number)
            assert self._algorithm is not None
            check_sum("ucx", request, part.box, local, remote, self._algorithm)

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        for message in self._pending:
            self._messenger.end(message)
        self._pending.clear()

    def _answered(self) -> BaseException | None:
        """Return the holder's error, if it has reported one."""
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

    reading: UcxReading
    message: Message
    region: Array
    number: int  # of the message
    part: Part

    def done(self) -> bool:
        return self.message.done

    def result(self, timeout_s: float | None = None) -> Any:
        self.reading.wait(self.message, self.part)
        self.reading.note(self.number, self.part, self.region)
        return self.region


def _sent_before_failure(reply: Any, asked: int) -> int | None:
    """Return how many messages were sent before the one whose block failed on its own.

    None if none has: all were sent, or something else failed.
    """
    sent = reply.get("sent") if isinstance(reply, dict) else None
    return sent if type(sent) is int and 0 <= sent < asked else None
