"""The worker's side of resident gangs: commands of the client, on their way to a rank's thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any
from uuid import uuid4

from distributed import Worker
from distributed.core import Status

from dask_p2p import tuning
from dask_p2p.errors import SectionError
from dask_p2p.fusing.resident.command_log import Command
from dask_p2p.fusing.resident.command_stream import CommandStream
from dask_p2p.plugins.gangs.units import Units
from dask_p2p.sections.wire.connection import AttemptEndedError

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
        units: Units | None = None,  # the resources of the rank's task
        idle_s: float = inf,  # time without a command until the rank lends them
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
                if self._units is not None and waited_s >= self._idle_s:
                    self._units.lend_while_idle()
                self._changed.wait(_LOOK_S)
            command = self._commands.popleft()
        if self._units is not None:
            # Waiting for tasks that have borrowed them could wait for another gang for ever.
            self._units.take(lambda: False)
        return command

    def send(self, message: Any) -> None:
        """Send a message to the client."""
        if self._stream is not None:
            self._stream.send(message)

    # --- on the event loop

    def begin(self, stream: CommandStream) -> bool:
        """Use a stream for the answers; return False if there is one, or the rank has ended."""
        if self._stream is not None or self._is_closed:
            return False
        self._stream = stream
        return True

    def put(self, commands: list[Command]) -> None:
        """Add received commands."""
        with self._changed:
            self._commands += commands
            self._changed.notify()

    def close(self) -> None:
        """End the wait of the rank's thread, after the commands that are here."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()


class CommandQueues:
    """The ranks of resident gangs on a worker: a part of the worker's plugin."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._queues: dict[str, CommandQueue] = {}  # by token
        self._streams: dict[str, CommandStream] = {}
        worker.handlers[COMMANDS] = self.receive

    def close(self) -> None:
        """End all ranks here."""
        self._worker.handlers.pop(COMMANDS, None)
        for token in tuple(self._queues):
            self._end(token)

    @contextmanager
    def queue(self, *given: Any) -> Iterator[CommandQueue]:
        """Receive the commands of a rank inside this context. In the rank's thread.

        The arguments are those of `CommandQueue`.
        """
        queue = CommandQueue(*given)
        self._queues[queue.token] = queue
        try:
            yield queue
        finally:
            self._worker.loop.add_callback(self._end, queue.token)

    async def receive(self, comm: Any, token: str) -> Status:
        """Receive the commands of one rank until the stream ends."""
        queue, stream = self._queues.get(token), CommandStream(comm)
        if queue is None or not queue.begin(stream):
            stream.close()
            return Status.dont_reply
        self._streams[token] = stream
        try:
            stream.send("ok")
            while True:
                queue.put(await stream.read())
        except OSError:
            return Status.dont_reply
        finally:
            self._end(token)

    def _end(self, token: str) -> None:
        if queue := self._queues.pop(token, None):
            queue.close()
        if stream := self._streams.pop(token, None):
            stream.close()
