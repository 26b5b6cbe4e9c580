"""Regions in messages, at both ends; rows of messages for which a holder is asked once.

A large region is brought in parts, each in a message. To ask for each of them takes Python longer
than a fast link takes for the bytes. So a holder is told the tags of a row of messages, and packs
and sends one after another. The reader looks out for the next ones while those before are put into
place, and so sets the pace::

    reader                                     holder
      --- RPC: keys, boxes, tags ----------->    packs and sends, in turn
      looks out for the first messages   <====
      looks out for one more             <====   packs the next while one is sent
      <-- answer: all are sent, or why not --
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

from dask_p2p.backends import Backend, backend_for, device_of
from dask_p2p.errors import SilentError, TransferError
from dask_p2p.interprocess.messenger import NAP_S, Message, Messenger
from dask_p2p.interprocess.requests import MalformedRequestError, checked_integer, checked_text
from dask_p2p.transports.base import Region
from dask_p2p.transports.packed.base import MemoryTarget
from dask_p2p.transports.packed.reading import MemoryLanding, PackedReading, answered
from dask_p2p.transports.replies import check_reply
from dask_p2p.transports.silence import EVENT_LOOP_GRACE_S
from dask_p2p.types import Array

MOST_MESSAGES = 64  # in one row
_TAGS = 2**62
_MOST_CLOSED = 2**31


class Mailboxes(NamedTuple):
    """Where a reader looks out for a message with all parts, or for one with each of them."""

    tags: Sequence[int]  # of the messages
    reader: str  # address of the worker
    closed: int  # of the reader's endpoints to here: see `Messenger.renew`

    @classmethod
    def checked(cls, where: Any) -> Mailboxes:
        """Read what a reader has sent."""
        sequences = list, tuple
        if type(where) not in sequences or len(where) != 3 or type(where[0]) not in sequences:
            raise MalformedRequestError("where: expected tags, reader and closed")
        tags, reader, closed = where
        if not 0 < len(tags) <= MOST_MESSAGES:
            raise MalformedRequestError(f"where: expected 1 to {MOST_MESSAGES} tags")
        tags = [checked_integer("tag", tag, 0, _TAGS - 1) for tag in tags]
        checked_integer("closed", closed, 0, _MOST_CLOSED)
        return cls(tags, checked_text("reader", reader), closed)


class Incoming(MemoryLanding):
    """A message that is waited for, from before its holder is asked."""

    message: Message | None = None  # None where nothing is to come

    def room(self, reading: PackedReading, size_bytes: int) -> Array:
        self._messenger: Messenger = self.transport.messenger()
        memory: Array = self.transport.buffers[self.about.kind].take((size_bytes,), np.uint8)
        return memory

    def where(self, first: int) -> Any:
        to = self.transport.mailboxes(self.about.holder)
        self.look_out(first, to.tags[0])
        return tuple(to)

    def look_out(self, first: int, tag: int) -> None:
        """Look out for a message with the regions from this one on."""
        memory = self.memory[self.places[first] :]
        self.message = self._messenger.receive(memory, tag) if memory.size else None

    @property
    def has_come(self) -> bool:
        """Whether nothing is to come any more: of an empty region there is no message."""
        return self.message is None or self.message.done

    async def arrived(self, answers: Sequence[Any], deadline_s: float) -> Array:
        is_sent = any(isinstance(of, dict) and of.get("status") == "ok" for of in answers)
        if not is_sent:
            self.abandon()
        elif self.message is not None:
            waiting = self.message.result, max(0.0, deadline_s - time.monotonic())
            try:
                await self.transport.worker.offload(*waiting, threads=self.transport.threads)
            except TransferError as exc:
                text = f"{self.about} does not come: {exc}"
                raise type(exc)(text, reason=str(exc)) from exc
        return self.memory

    def abandon(self) -> None:
        if self.message is not None:
            self._messenger.end(self.message)


class StreamedReading(PackedReading):
    """Regions that come in messages, large ones in rows."""

    def __init__(self, transport: Any, *args: Any) -> None:
        super().__init__(transport, *args)
        self._ucx = transport
        self.expected: set[Incoming] = set()  # messages of rows
        self._missing: dict[Any, int] = {}  # how many messages have not come, by the row's call

    def __iter__(self) -> Iterator[Region]:
        if self._with_sums:  # which come with answers, one for each message
            yield from super().__iter__()
            return
        for is_batch, batches in groupby(self._batches(), key=lambda batch: len(batch) > 1):
            row: list[Region] = []
            for batch in batches:
                if is_batch:
                    yield from self._asked(batch)
                    continue
                row += batch
                if len(row) == MOST_MESSAGES:
                    yield from self._streamed(row)
                    row = []
            if row:
                yield from self._streamed(row) if len(row) > 1 else self._asked(row)

    def _streamed(self, row: Sequence[Region]) -> Iterator[Region]:
        """Ask for a row of messages, and look out for one after another."""
        try:
            where = self._ucx.mailboxes(self.requests[0].holder, len(row))
        except TransferError as exc:
            yield from (part.failed(exc) for part in row)
            return
        call = self._begun(self._ask(row, tuple(where), len(row)))
        self._missing[call] = len(row)
        self.ahead = self._answers_ahead
        for number, (part, tag) in enumerate(zip(row, where.tags, strict=True)):
            try:
                landing = Incoming(self._ucx, self, [part])
                landing.look_out(0, tag)
            except TransferError as exc:
                yield part.failed(exc)
                continue
            self.expected.add(landing)
            streamed = _Streamed(self, landing, call, number)
            yield part.on_its_way(streamed.result, streamed.done)

    def note_arrival(self, call: Future[Sequence[Any]]) -> None:
        """Take note that a message of a row has come.

        The answer about a row of which all have come says nothing new. It is let come all the same:
        to cancel the call would close its connection, and to make one takes longer than an answer.
        """
        self._missing[call] -= 1
        if not self._missing[call]:
            self.calls.discard(call)

    def ask_again(self, landing: Incoming) -> Any:
        """Return a part by itself, since its row has ended before."""
        self.expected.discard(landing)
        landing.abandon()
        return answered(self._call(landing.parts), 0, self.timeout_s + EVENT_LOOP_GRACE_S)

    def close(self) -> None:
        super().close()
        while self.expected:
            self.expected.pop().abandon()


@dataclass(slots=True)
class _Streamed:
    """A region in one of a row of messages."""

    reading: StreamedReading
    landing: Incoming
    call: Future[Sequence[Any]]
    number: int  # in the row

    def done(self) -> bool:
        return self.landing.has_come or self.call.done()

    def result(self, *_: Any) -> Any:
        landing, deadline_s = self.landing, time.monotonic() + self.reading.timeout_s
        while not landing.has_come:
            if self.call.done() and not self._is_sent():
                return self.reading.ask_again(landing)
            if time.monotonic() > deadline_s:
                raise SilentError(f"no message of {landing.about.holder} came in time")
            time.sleep(NAP_S)
        self.reading.expected.discard(landing)
        if landing.message is not None:
            landing.message.result(0.0)
        self.reading.note_arrival(self.call)
        return landing.region(landing.memory, 0)

    def _is_sent(self) -> bool:
        """Return whether the holder has sent this message; raise if it says why it cannot."""
        answers = self.call.result()  # which raises what all of them have failed by
        if self.number >= len(answers):  # it ended at another one
            return False
        check_reply(answers[self.number], self.landing.about)
        return True


class Outgoing(MemoryTarget):
    """A message that is packed, and then sent."""

    def __init__(self, transport: Any, to: Mailboxes, messenger: Messenger, address: bytes) -> None:
        self._transport, self._to = transport, to
        self._messenger, self._address = messenger, address
        self._memory: Array | None = None
        self._message: Message | None = None
        self.block: Array | None = None  # that is read until it is packed

    def takes(self, block: Array) -> bool:
        """Return whether its regions fit into the message: spilled blocks' into no GPU's memory."""
        there = self._memory
        return there is None or backend_for(block).on_device or not backend_for(there).on_device

    def memory(self, backend: Backend) -> Array:
        if self._memory is None:
            pool = self._transport.buffers[backend.name]
            self._memory = pool.take((self.size_bytes,), np.uint8)
        return self._memory

    def send(self) -> None:
        self.start()
        self.wait()

    def start(self) -> None:
        """Begin to send it, as soon as it is packed."""
        self._end_packing()
        if not self.size_bytes or self._message is not None:
            return
        here = self._transport.worker.address
        other_host = urlsplit(self._to.reader).hostname != urlsplit(here).hostname
        self._messenger.renew(self._address, self._to.closed)
        with device_of(self._memory):
            self._message = self._messenger.send(
                self._address, self._memory, self._to.tags[0], other_host=other_host
            )

    def wait(self) -> None:
        """Wait until it has arrived, if it was sent."""
        if self._message is not None:
            with device_of(self._memory):
                self._message.result(self.asked.left_s)

    def _end_packing(self) -> None:
        if self.block is not None:
            with device_of(self.block):
                self.wait_until_packed()
            self.block = None

    def close(self) -> None:
        self._end_packing()  # which writes into its memory
        self._memory = None  # before others may have its room
        super().close()
