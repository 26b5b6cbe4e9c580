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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from distributed import Future
from distributed.comm import connect

from dask_p2p.errors import SectionError
from dask_p2p.fusing.resident.command_log import (
    CALL,
    DONE,
    DROP,
    END,
    KEEP,
    MOST_COMMANDS,
    CommandLog,
)
from dask_p2p.fusing.resident.command_queues import COMMANDS, TOPIC
from dask_p2p.fusing.resident.command_stream import CommandStream
from dask_p2p.fusing.resident.handle_memory import HandleMemory
from dask_p2p.geometry import Index
from dask_p2p.types import Key

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # time between two checks whether the client is open
_MOST_AHEAD = 64  # calls that have not run

# Most time, and most commands, between two checkpoints.
_KEEP_S, _KEEP_COMMANDS = 30.0, 10_000

_DROP_S = 0.1  # time until dropped handles go to the ranks, without another call

#: Address, token and memory limit of each rank.
Ranks = Sequence[tuple[str, str, int]]

#: Index and size in bytes of each block of a rank.
Sizes = Sequence[tuple[Index, int]]

#: Streams of a client to its resident gangs, by the name of the gang.
_Gangs: TypeAlias = "WeakValueDictionary[str, ClientStreams]"
_gangs: WeakKeyDictionary[Any, _Gangs] = WeakKeyDictionary()  # by client


class KeepingRule:
    """Decides when a checkpoint is due."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def restart(self) -> None:
        """Make a checkpoint due soon: Dask bounds the losses of workers between two of them."""
        self._last_s = float("-inf")

    def is_due(self, log: CommandLog, ranks: Ranks) -> bool:
        """Return whether a checkpoint is due, after a call."""
        if log.is_keeping:
            return False
        if len({address for address, *_ in ranks}) < 2:  # its loss would take all checkpoints
            return log.since_kept >= MOST_COMMANDS
        is_due = log.since_kept >= _KEEP_COMMANDS or time.monotonic() - self._last_s >= _KEEP_S
        if is_due:
            self._last_s = time.monotonic()
        return is_due


class ClientStreams:
    """The commands of a client to a resident gang, and the answers."""

    def __init__(
        self,
        client: Any,
        gang: str,  # its name
        size: int,  # number of ranks
        memory: HandleMemory,
    ) -> None:
        self._client, self._gang, self._memory = client, gang, memory
        self._loop: asyncio.AbstractEventLoop = client.loop.asyncio_loop
        self._streams: Sequence[CommandStream] = ()
        self._attempt: asyncio.Future[None] | None = None
        self._future: Any = None  # of the gang's commit task
        self._is_awake = self._drops_soon = False  # whether `_send` will run
        self._wanted = set[int]()  # requests whose answers a thread awaits
        self._answers: dict[int, Mapping[int, Any]] = {}  # by number of the request
        self._dropped: deque[int] = deque()  # numbers of handles
        self._error: BaseException | None = None
        self._has_raised = False  # whether the user has got the error
        self._changed = threading.Condition(threading.RLock())
        self._keeping = KeepingRule()
        self.log = CommandLog(size)
        self.attempt = 0  # number of attempts so far
        self.ranks: Ranks = ()  # of the newest attempt
        self.is_over = False  # whether the gang has ended, or was ended

    # --- in any thread

    def start(self, submit: Callable[[], Any]) -> None:
        """Begin to listen, and submit the gang: `submit` returns the future of its commit task."""
        gangs = _gangs.setdefault(self._client, WeakValueDictionary())
        gangs[self._gang] = self
        # Once more for each gang: the client may have connected to another scheduler.
        self._client.subscribe_topic(TOPIC, partial(_pass_on, gangs))
        self._future = submit()
        self._future.add_done_callback(self._record_end)

    def call(self, handles: Sequence[int], first: int) -> None:
        """Send a call once few calls are ahead; now and then, also the command for a checkpoint.

        Raises `MemoryLimitError` if its results would not fit, and the error of a gang that has
        ended.
        """
        with self._changed:
            self._wait_until(lambda: self.log.calls_ahead < _MOST_AHEAD)
            self._add_dropped()  # first, so that ranks have them no longer than the client
            self._memory.check(self.ranks)
            self._add(CALL, handles, first)
            self._memory.add_call()
            if self._keeping.is_due(self.log, self.ranks):
                self._add(KEEP)

    def _add_dropped(self) -> None:
        if dropped := [self._dropped.popleft() for _ in range(len(self._dropped))]:
            self.log.add(DROP, dropped)
            self._memory.drop(dropped)

    def _add(self, kind: str, *arguments: Any) -> int:
        """Send a command; return its number."""
        self._check_runs()
        number = self.log.add(kind, *arguments)
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon_threadsafe(self._send)
        return number

    def request(self, kind: str, *arguments: Any) -> list[Any]:
        """Send a request; return the answers of all ranks, by rank."""
        with self._changed:
            number = self._add(kind, *arguments)
            self._wanted.add(number)
            try:
                self._wait_until(lambda: number in self._answers)
            finally:
                self._wanted.discard(number)
                answers = self._answers.pop(number, {})
        return [answers[rank] for rank in range(len(answers))]

    def register(self, name: str, sizes: Sequence[Sizes]) -> dict[Key, Any]:
        """Register the blocks of an array with the scheduler; return their futures, by key.

        `sizes` has the indices and bytes of the blocks of each rank. Raises `KeyError` if the
        scheduler has lost a worker.
        """
        return dict(self._client.sync(self._register, name, sizes, self.ranks))

    def drop(self, handle: int) -> None:
        """Send the number of a handle that is not used any more, soon or with the next call.

        Python may call this within any other method, so that it takes no lock.
        """
        self._dropped.append(handle)
        if not self._drops_soon and not self._loop.is_closed():
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
        """End the gang now, if it runs."""
        with self._changed:
            self.is_over = True
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
        if self.is_over or self._client.status != "running":
            raise SectionError("the resident gang has ended. Begin another one: step.resident(x).")

    def _record_end(self, future: Any) -> None:
        """Record the end of the commit task."""
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

    async def _register(self, name: str, sizes: Sequence[Sizes], ranks: Ranks) -> dict[Key, Any]:
        who_has, nbytes = dict[Key, list[str]](), dict[Key, int]()
        for (address, *_), blocks in zip(ranks, sizes, strict=True):
            who_has |= {(name, *index): [address] for index, _ in blocks}
            nbytes |= {(name, *index): size_bytes for index, size_bytes in blocks}
        await self._client.scheduler.update_data(
            who_has=who_has, nbytes=nbytes, client=self._client.id
        )
        futures = {key: Future(key, self._client) for key in who_has}
        for key in futures:
            self._client.futures[key].finish()
        return futures

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
                if self.attempt:
                    self._keeping.restart()
                self.attempt, self.ranks, self._streams = self.attempt + 1, ranks, streams
            self._send()
            reading += [
                asyncio.ensure_future(self._read(rank, each)) for rank, each in enumerate(streams)
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
                comm = await connect(address, **self._client.connection_args)
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
                    for kind, number, *answer in batch:
                        self._record(rank, kind, number, *answer)
                    self._changed.notify_all()

    def _record(self, rank: int, kind: str, number: int, answer: Any = None) -> None:
        if kind == DONE:
            self.log.record_done(number)
            return
        answers = self.log.record_answer(rank, number, answer)
        if answers is not None and number in self._wanted:
            self._answers[number] = answers

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


def _pass_on(gangs: _Gangs, event: tuple[float, Mapping[str, Any]]) -> None:
    """Pass an event to the streams of its gang; other clients ignore it."""
    _, message = event
    if (streams := gangs.get(message["gang"])) is not None:
        streams.record_ranks(message["ranks"], message["resume"])
