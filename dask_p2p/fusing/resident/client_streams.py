"""The client's side of a resident gang: the streams of commands to all ranks.

When the ranks have begun, the client connects to the worker of each. A stream that ends, ends the
attempt of all ranks. The client then waits for the ranks of the next attempt, and repeats the
commands of the log.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf, isnan, prod
from typing import Any, TypeAlias
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakValueDictionary

from dask.utils import format_bytes
from distributed.comm import connect

from dask_p2p import tuning
from dask_p2p.errors import MemoryLimitError, SectionError
from dask_p2p.fusing.planning.sizes import Declared
from dask_p2p.fusing.resident.commands import (
    CALL,
    COMMANDS,
    DONE,
    DROP,
    END,
    KEEP,
    TOPIC,
    CommandLog,
    CommandStream,
    Ranks,
)
from dask_p2p.fusing.running.gang import PREFIX
from dask_p2p.geometry import block_shape
from dask_p2p.sections.gang.rank import name_of_gang
from dask_p2p.types import Key

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # time between two checks whether the client is open
_MOST_AHEAD = 64  # calls that have not run

_DROP_S = 0.1  # time until dropped handles go to the ranks, without another call

#: Submits a gang with a token; returns the future of its commit task, and its inputs on workers.
Submit = Callable[[str], tuple[Any, Sequence[Any]]]


class ClientStreams:
    """The commands of a client to a resident gang, and the answers."""

    def __init__(
        self,
        client: Any,
        size: int,  # number of ranks
        memory: HandleMemory,
    ) -> None:
        self.client, self._memory = client, memory
        self._loop: asyncio.AbstractEventLoop = client.loop.asyncio_loop
        self._streams: Sequence[CommandStream] = ()
        self._attempt: asyncio.Future[None] | None = None
        self._future: Any = None  # of the gang's commit task
        self._inputs: Sequence[Any] = ()  # Dask arrays on workers, until the gang has ended
        self._is_awake = self._drops_soon = False  # whether `_send` will run
        #: By number of a request whose answers a thread awaits; None: not all have come.
        self._replies: dict[int, Mapping[int, Any] | None] = {}
        self._dropped: deque[int] = deque()  # numbers of handles
        self._error: BaseException | None = None
        self._has_raised = False  # whether the user has got the error
        self._changed = threading.Condition(threading.RLock())
        self._kept_s = time.monotonic()  # when the last checkpoint was due
        self.log = CommandLog(size, tuning.current.logged_commands)
        self.attempt = 0  # number of attempts so far
        self.ranks: Ranks = ()  # of the newest attempt
        self.is_over = False  # whether the gang has ended, or was ended

    # --- in any thread

    def start(self, submit: Submit) -> None:
        token = uuid4().hex  # each gang has its own ranks
        by_gang = _streams.setdefault(self.client, WeakValueDictionary())
        by_gang[name_of_gang(PREFIX, token)] = self
        # Once more for each gang: the client may have connected to another scheduler.
        self.client.subscribe_topic(TOPIC, partial(_record_ranks, by_gang))
        self._future, self._inputs = submit(token)
        self._future.add_done_callback(self._record_end)

    def call(self, arguments: Sequence[Any], first: int) -> None:
        """Send a call once few calls are ahead; now and then, also the command for a checkpoint.

        Raises `MemoryLimitError` if its results would not fit, and the error of a gang that has
        ended.
        """
        with self._changed:
            self._wait_until(lambda: self.log.calls_ahead < _MOST_AHEAD)
            self._add_dropped()  # first, so that ranks have them no longer than the client
            self._memory.check(self.ranks)
            self._add(CALL, arguments, first)
            self._memory.live.update(range(self._memory.results))
            if self._is_checkpoint_due():
                self._kept_s = time.monotonic()
                self._add(KEEP)

    def _is_checkpoint_due(self) -> bool:
        log, since_kept = self.log, self.log.last - self.log.last_checkpoint
        if log.is_keeping:
            return False
        if len({address for address, *_ in self.ranks}) < 2:  # its loss would take all checkpoints
            return since_kept >= log.command_limit
        is_late = time.monotonic() - self._kept_s >= tuning.current.kept_s
        return is_late or since_kept >= tuning.current.kept_commands

    def _add_dropped(self) -> None:
        if dropped := [self._dropped.popleft() for _ in range(len(self._dropped))]:
            self.log.add(DROP, dropped)
            self._memory.drop(dropped)

    def _add(self, kind: str, *arguments: Any) -> int:
        self._check_runs()
        number = self.log.add(kind, *arguments)
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon_threadsafe(self._send)
        return number

    def request(self, kind: str, *arguments: Any) -> list[Any]:
        with self._changed:
            number = self._add(kind, *arguments)
            self._replies[number] = None
            try:
                self._wait_until(lambda: self._replies[number] is not None)
            finally:
                replies = self._replies.pop(number) or {}
        return [replies[rank] for rank in range(len(replies))]

    def drop(self, handle: int) -> None:
        """Send the number of a handle that is not used any more, soon or with the next call.

        Python may call this within any other method, so that it takes no lock.
        """
        self._dropped.append(handle)
        if not (self.is_over or self._drops_soon or self._loop.is_closed()):
            self._drops_soon = True
            self._loop.call_soon_threadsafe(self._loop.call_later, _DROP_S, self._send_dropped)

    def finish(self) -> None:
        """Send the last command, and wait until all ranks have returned.

        Raises the error of the gang, if no call has raised it before.
        """
        with self._changed:
            if not self.is_over:
                self._add(END)
                self._wait_until(lambda: self.is_over)
            if self._error is not None and not self._has_raised:
                raise self._error

    def close(self) -> None:
        with self._changed:
            self.is_over, self._inputs = True, ()
        if self._future is not None:
            self._future.release()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_attempt)

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._check_runs()
            self._changed.wait(_LOOK_S)

    def _check_runs(self) -> None:
        if self._error is not None:
            self._has_raised = True
            raise self._error
        if self.is_over or self.client.status != "running":
            raise SectionError("the resident gang has ended. Begin another one: step.resident(x).")

    def _record_end(self, future: Any) -> None:
        error = future.exception() if future.status == "error" else None
        if error is None and future.status != "finished":
            error = SectionError(f"the resident gang is {future.status}. Begin another one.")
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            if not self.is_over:
                self._error, self.is_over = error, True
            self._changed.notify_all()

    # --- on the event loop

    def record_ranks(self, ranks: Ranks, resume: int) -> None:
        """Connect to the ranks of another attempt, which have the handles of a checkpoint."""
        self._end_attempt()
        if not self.is_over:
            self._attempt = asyncio.ensure_future(self._run(ranks, resume))

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()

    async def _run(self, ranks: Ranks, resume: int) -> None:
        """Send commands to the ranks of one attempt, and receive answers, until one is lost."""
        streams: list[CommandStream] = []
        reading: list[asyncio.Future[None]] = []
        try:
            await self._connect(ranks, streams)
            with self._changed:
                self.log.restart(resume)
                if self.attempt:  # soon: Dask bounds the losses of workers between two checkpoints
                    self._kept_s = -inf
                self.attempt, self.ranks, self._streams = self.attempt + 1, ranks, streams
            self._send()
            reading += [
                asyncio.ensure_future(self._read(rank, stream))
                for rank, stream in enumerate(streams)
            ]
            await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        except SectionError as exc:  # the handles are lost
            self._end(exc)
            self._future.release()
        finally:
            for task in reading:
                task.cancel()
            for stream in streams:
                stream.close()
            if self._streams is streams:
                self._streams = ()

    async def _connect(self, ranks: Ranks, streams: list[CommandStream]) -> None:
        """Open a stream to each rank.

        A worker that cannot be reached may be lost: then the ranks of another attempt begin, and
        this coroutine is cancelled. Otherwise its rank raises an error that names the client.
        """
        for address, token, _ in ranks:
            try:
                comm = await connect(address, **self.client.connection_args)
                streams.append(stream := CommandStream(comm))
                await comm.write({"op": COMMANDS, "token": token, "reply": False})
                await stream.read()
            except OSError as exc:
                logger.info("cannot connect to the rank on %s: %s", address, exc)
                await asyncio.Event().wait()

    async def _read(self, rank: int, stream: CommandStream) -> None:
        with suppress(OSError):  # the rank is lost
            while True:
                batch = await stream.read()
                with self._changed:
                    for kind, number, *reply in batch:
                        self._record(rank, kind, number, *reply)
                    self._changed.notify_all()

    def _record(self, rank: int, kind: str, number: int, reply: Any = None) -> None:
        if kind == DONE:
            self.log.record_done(number)
            return
        replies = self.log.record_answer(rank, number, reply)
        if replies is not None and number in self._replies:
            self._replies[number] = replies

    def _send_dropped(self) -> None:
        self._drops_soon = False
        self._send()

    def _send(self) -> None:
        """Send all that is unsent, once the ranks are there."""
        self._is_awake = False  # first: later commands call this again
        with self._changed:
            if not self._streams:
                return
            self._add_dropped()
            commands = self.log.take_unsent()
        for stream in self._streams:
            stream.send(*commands)


_StreamsByGang: TypeAlias = WeakValueDictionary[str, ClientStreams]
_streams: WeakKeyDictionary[Any, _StreamsByGang] = WeakKeyDictionary()  # by client


def _record_ranks(by_gang: _StreamsByGang, event: tuple[float, Mapping[str, Any]]) -> None:
    _, message = event
    if (streams := by_gang.get(message["gang"])) is not None:
        streams.record_ranks(message["ranks"], message["resume"])


_MOST_MEMORY = 0.8  # part of a worker's memory limit: beyond it Dask pauses the worker


class HandleMemory:
    """Counts the handles that are in use, and refuses calls whose results would not fit."""

    def __init__(
        self,
        results: Sequence[Declared],
        outputs: Sequence[Sequence[Iterable[Key]]],  # by rank and result: keys of the blocks
    ) -> None:
        self._bytes = [  # by rank and result
            [_bytes_of(declared, keys) for declared, keys in zip(results, of_rank, strict=True)]
            for of_rank in outputs
        ]
        self.results = len(results)
        self.live = Counter[int]()  # handles by number of the result

    def check(self, ranks: Iterable[tuple[str, str, int]]) -> None:
        """Refuse one more call if a worker's handles would take too much: `MemoryLimitError`.

        `ranks` are the addresses, tokens and memory limits by rank. A limit of 0 is none.
        """
        needed_bytes, limits = Counter[str](), dict[str, int]()
        for (address, _, limit_bytes), result_bytes in zip(ranks, self._bytes, strict=False):
            for number, size_bytes in enumerate(result_bytes):
                needed_bytes[address] += (self.live[number] + 1) * size_bytes
            limits[address] = limit_bytes
        for address, size_bytes in needed_bytes.items():
            most_bytes = int(_MOST_MEMORY * limits[address])
            if most_bytes and size_bytes > most_bytes:
                raise MemoryLimitError(
                    f"expected handles of at most {format_bytes(most_bytes)} on {address}, got "
                    f"{format_bytes(size_bytes)} with the results of this call. Drop handles that "
                    f"are not needed: del u.",
                    size_bytes,
                    size_bytes - most_bytes,
                )

    def drop(self, numbers: Iterable[int]) -> None:
        self.live.subtract(number % self.results for number in numbers)


def _bytes_of(declared: Declared, keys: Iterable[Key]) -> int:
    sizes = (prod(block_shape(declared.chunks, key[1:])) for key in keys if isinstance(key, tuple))
    return sum(0 if isnan(size) else int(size) * declared.dtype.itemsize for size in sizes)
