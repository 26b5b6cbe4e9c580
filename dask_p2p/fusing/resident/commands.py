"""The commands that a client sends to the ranks of a resident gang, and their answers.

All ranks receive all commands in the same order. A rank that is lost takes its values with it. So
the next attempt repeats the commands since the last checkpoint. If the checkpoint is lost as well,
it repeats all commands, as long as they are few enough to be in the log.

`CommandLog` is a state machine without Dask, asyncio or a clock.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias
from uuid import uuid4

from distributed import Future, Worker
from distributed.core import Status

from dask_p2p import tuning
from dask_p2p.errors import SectionError
from dask_p2p.geometry import Index
from dask_p2p.plugins.dask_internals import Units
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.types import Key

#: The number of a handle, or a value, for each argument of a call; its first new handle.
CALL = "call"
#: Numbers of handles that are not used any more.
DROP = "drop"
#: The number of a handle: the ranks send its blocks.
FETCH = "fetch"
#: The number of a handle: the ranks send the sizes of its blocks.
SIZES = "sizes"
#: The number of a handle, and the name of an array that gets its blocks.
PUBLISH = "publish"
#: The ranks save their handles.
KEEP = "keep"
#: The ranks return.
END = "end"

#: Kinds that each rank answers.
REQUESTS = (FETCH, SIZES, PUBLISH, KEEP)

#: Message of rank 0: the number of a call. This call and all before it are complete.
DONE = "done"
#: Message of a rank: the number of a request, and the answer.
ANSWER = "answer"

#: The number of a command, its kind and its arguments.
Command: TypeAlias = tuple[Any, ...]


class CommandLog:
    """The commands that a later attempt needs, and the answers so far."""

    def __init__(
        self,
        size: int,  # number of ranks
        command_limit: int,  # commands before those before a checkpoint are dropped
    ) -> None:
        self.command_limit, self._size = command_limit, size
        #: Number of the last command.
        self.last = 0
        # Number of the last command that the log has dropped.
        self._forgotten = 0

        self._commands: dict[int, Command] = {}  # by number
        self._unsent: deque[Command] = deque()  # not sent in this attempt
        self._running: deque[int] = deque()  # calls that rank 0 has not completed
        self._replies: dict[int, dict[int, Any]] = {}  # by request and rank
        #: Number of the last complete checkpoint.
        self.last_checkpoint = 0
        #: True while a checkpoint is under way.
        self.is_keeping = False

    @property
    def calls_ahead(self) -> int:
        return len(self._running)

    def add(self, kind: str, *arguments: Any) -> int:
        self.last += 1
        self._commands[self.last] = command = (self.last, kind, *arguments)
        self._unsent.append(command)
        if kind == CALL:
            self._running.append(self.last)
        self.is_keeping = self.is_keeping or kind == KEEP
        return self.last

    def take_unsent(self) -> list[Command]:
        """Return the commands that were not sent in this attempt; they count as sent."""
        commands = list(self._unsent)
        self._unsent.clear()
        return commands

    def record_done(self, number: int) -> None:
        while self._running and self._running[0] <= number:
            self._running.popleft()

    def record_answer(self, rank: int, number: int, reply: Any) -> Mapping[int, Any] | None:
        if number not in self._commands:
            return None  # a checkpoint that was complete before its last answer
        replies = self._replies.setdefault(number, {})
        replies[rank] = reply
        if len(replies) < self._size:
            return None
        del self._replies[number]
        if self._commands.pop(number)[1] == KEEP:
            self._record_kept(number)
        return replies

    def restart(self, resume: int) -> None:
        """Begin another attempt, whose ranks have the handles of a checkpoint; 0: those at first.

        Raises `SectionError` if the log has dropped commands after that checkpoint.
        """
        if resume < self._forgotten:
            raise SectionError(
                "the workers that had the checkpoints of the resident gang are lost, so its "
                "handles are lost, too. Begin again from arrays; run.array(handle) makes them."
            )
        self._record_kept(resume)
        self._replies.clear()
        self._unsent = deque(
            command
            for number, command in self._commands.items()
            if number > resume or command[1] in REQUESTS  # without an answer
        )

    def _record_kept(self, number: int) -> None:
        """Record the newest complete checkpoint; drop older commands if there are very many."""
        self.last_checkpoint = number
        is_late = len(self._commands) > self.command_limit
        self._forgotten = number if is_late else self._forgotten
        self._commands = {
            command_number: command
            for command_number, command in self._commands.items()
            if command[1] in REQUESTS or command_number > self._forgotten
            if command[1] != KEEP or command_number > number
        }
        self.record_done(number)
        self.is_keeping = any(command[1] == KEEP for command in self._commands.values())


# A stream of messages over a connection of Dask, between a client and a rank of a resident gang.
#
# Messages that are sent while another one is on its way go together: a batch costs Dask about as
# much as one message.


class CommandStream:
    """One end of a stream. Made on the event loop."""

    def __init__(self, comm: Any) -> None:  # a connection of Dask
        self._comm, self._loop = comm, asyncio.get_running_loop()
        self._unsent: deque[Any] = deque()
        self._has_unsent = asyncio.Event()
        self._is_awake = False  # whether the event will be set
        self._writing = asyncio.ensure_future(self._write())

    def send(self, *messages: Any) -> None:
        """Send messages soon. Any thread may call this."""
        self._unsent.extend(messages)
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon_threadsafe(self._has_unsent.set)

    async def read(self) -> Any:
        """Return the next batch of messages. Raises `OSError` once the stream has ended."""
        return await self._comm.read()

    def close(self) -> None:
        """End the stream, without the messages that were not sent. On the event loop."""
        self._writing.cancel()
        self._comm.abort()

    async def _write(self) -> None:
        try:
            with suppress(OSError):
                while True:
                    await self._has_unsent.wait()
                    self._has_unsent.clear()
                    self._is_awake = False  # first: later messages set the event again
                    if batch := [self._unsent.popleft() for _ in range(len(self._unsent))]:
                        await self._comm.write(batch)
        finally:
            self._comm.abort()  # wakes the reader, also after a message that cannot be sent


#: Index and size in bytes of each block that a rank has.
Sizes: TypeAlias = Sequence[tuple[Index, int]]


async def register_blocks(client: Any, name: str, sizes: Sequence[Sizes], ranks: Ranks) -> Any:
    """Register blocks with the scheduler, before the ranks add them; return their futures, by key.

    Raises `KeyError` if the scheduler has lost a worker.
    """
    who_has, nbytes = dict[Key, list[str]](), dict[Key, int]()
    for (address, *_), blocks in zip(ranks, sizes, strict=True):
        who_has |= {(name, *index): [address] for index, _ in blocks}
        nbytes |= {(name, *index): size_bytes for index, size_bytes in blocks}
    await client.scheduler.update_data(who_has=who_has, nbytes=nbytes, client=client.id)
    futures = {key: Future(key, client) for key in who_has}
    for key in futures:
        client.futures[key].finish()
    return futures


#: Address, token and memory limit of each rank.
Ranks: TypeAlias = Sequence[tuple[str, str, int]]

#: Request of a client to a worker, which begins the stream of commands to a rank there.
COMMANDS = "p2p_resident_commands"
#: Topic of events: all ranks of a gang have begun, and receive commands.
TOPIC = "p2p-resident"

_LOOK_S = 0.2  # time between two checks for the end of the attempt


class CommandQueue:
    """The commands that a rank has received, and the stream for its answers."""

    def __init__(
        self,
        has_ended: Callable[[], bool],  # whether the attempt has ended
        units: Units,  # the resources of the rank's task
        idle_s: float,  # time without a command until the rank lends them
    ) -> None:
        self.token = uuid4().hex
        self._has_ended, self._units, self._idle_s = has_ended, units, idle_s
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._stream: CommandStream | None = None
        self._is_closed = False

    # --- in the rank's thread

    def get(self) -> Command:
        """Wait for the next command, and return it. An idle rank lends its resources.

        Raises `AttemptEndedError` if the attempt or the stream has ended, and `SectionError` if the
        client does not begin the stream.
        """
        begun_s = time.monotonic()
        with self._changed:
            while not self._commands:
                waited_s = time.monotonic() - begun_s
                if self._is_closed or self._has_ended():
                    raise AttemptEndedError("the attempt or the stream of commands has ended")
                limit_s = tuning.current.client_wait_s
                if self._stream is None and waited_s >= limit_s:
                    raise SectionError(
                        f"the client has not connected to a rank of its resident gang for "
                        f"{limit_s:g} s. Run the client where it reaches the workers."
                    )
                if waited_s >= self._idle_s:
                    self._units.lend_while_idle()
                self._changed.wait(_LOOK_S)
            command = self._commands.popleft()
        # Waiting for tasks that have borrowed them could wait for another gang for ever.
        self._units.take(lambda: False)
        return command

    def send(self, message: Any) -> None:
        if self._stream is not None:
            self._stream.send(message)

    # --- on the event loop

    def begin(self, stream: CommandStream) -> bool:
        """Use a stream for the answers; return False if there is one, or the rank has ended."""
        if self._stream is not None or self._is_closed:
            return False
        self._stream = stream
        return True

    def extend(self, commands: list[Command]) -> None:
        with self._changed:
            self._commands += commands
            self._changed.notify()

    def close(self) -> None:
        """End the stream, and the wait of the rank's thread after the commands that are here."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._stream is not None:
            self._stream.close()


class CommandQueues:
    """The ranks of resident gangs on a worker: a part of the worker's plugin."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._queues: dict[str, CommandQueue] = {}  # by token
        worker.handlers[COMMANDS] = self.receive

    def close(self) -> None:
        self._worker.handlers.pop(COMMANDS, None)
        for token in tuple(self._queues):
            self._end(token)

    @contextmanager
    def queue(self, *arguments: Any) -> Iterator[CommandQueue]:
        """Receive the commands of a rank inside this context. In the rank's thread.

        The arguments are those of `CommandQueue`.
        """
        queue = CommandQueue(*arguments)
        self._queues[queue.token] = queue
        try:
            yield queue
        finally:
            self._worker.loop.add_callback(self._end, queue.token)

    async def receive(self, comm: Any, token: str) -> Status:
        queue, stream = self._queues.get(token), CommandStream(comm)
        if queue is None or not queue.begin(stream):
            stream.close()
            return Status.dont_reply
        try:
            stream.send("ok")
            while True:
                queue.extend(await stream.read())
        except OSError:
            return Status.dont_reply
        finally:
            self._end(token)

    def _end(self, token: str) -> None:
        if queue := self._queues.pop(token, None):
            queue.close()
