"""The commands that a client sends to the ranks of a resident gang, and their answers.

All ranks receive all commands in the same order. A rank that is lost takes its values with it. So
the next attempt repeats the commands since the last checkpoint. If the checkpoint is lost as well,
it repeats all commands, as long as they are few enough to be in the log.

This is a state machine without Dask, asyncio or a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, TypeAlias

from dask_p2p.errors import SectionError

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
#: The ranks save their handles, and send the sizes of the states on their workers.
KEEP = "keep"
#: The number of a checkpoint, and a name: the ranks add its states to the data of Dask.
STORE = "store"
#: The ranks return.
END = "end"

#: Kinds that each rank answers.
REQUESTS = (FETCH, SIZES, PUBLISH, KEEP, STORE)

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
        most: int,  # commands before those before a checkpoint are dropped
    ) -> None:
        self.most, self._size = most, size
        #: Number of the last command.
        self.last = 0
        # Number of the last command that the log has dropped.
        self._forgotten = 0

        self._commands: dict[int, Command] = {}  # by number
        self._unsent: deque[Command] = deque()  # not sent in this attempt
        self._running: deque[int] = deque()  # calls that rank 0 has not completed
        self._answers: dict[int, dict[int, Any]] = {}  # by request and rank
        #: Number of the last complete checkpoint.
        self.kept = 0
        #: True while a checkpoint is under way.
        self.is_keeping = False

    @property
    def calls_ahead(self) -> int:
        """Number of calls that have not run."""
        return len(self._running)

    @property
    def since_kept(self) -> int:
        """Number of commands after the last complete checkpoint."""
        return self.last - self.kept

    def add(self, kind: str, *arguments: Any) -> int:
        """Add a command; return its number."""
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
        """Record that rank 0 has completed all calls up to a number."""
        while self._running and self._running[0] <= number:
            self._running.popleft()

    def record_answer(self, rank: int, number: int, answer: Any) -> Mapping[int, Any] | None:
        """Record the answer of a rank; return those of all ranks when the last one is here."""
        if number not in self._commands:
            return None  # a checkpoint that was complete before its last answer
        found = self._answers.setdefault(number, {})
        found[rank] = answer
        if len(found) < self._size:
            return None
        del self._answers[number]
        if self._commands.pop(number)[1] == KEEP:
            self._record_kept(number)
        return found

    def record_end(self) -> None:
        """Record that the ranks have returned: other ranks will do the commands after the end."""
        self._drop(END)

    def restart(self, resume: int) -> None:
        """Begin another attempt, whose ranks have the handles of a checkpoint; 0: those at first.

        Raises `SectionError` if the log has dropped commands after that checkpoint.
        """
        if resume < self._forgotten:
            raise SectionError(
                "the workers that had the checkpoints of the resident gang are lost, so its "
                "handles are lost, too. Begin again from arrays; run.array(handle) makes them."
            )
        self._drop(STORE)  # the client requests it again
        self._record_kept(resume)
        self._answers.clear()
        self._unsent = deque(
            command
            for number, command in self._commands.items()
            if number > resume or command[1] in REQUESTS  # without an answer
        )

    def _drop(self, kind: str) -> None:
        """Drop the commands of a kind."""
        self._commands = {n: each for n, each in self._commands.items() if each[1] != kind}

    def _record_kept(self, number: int) -> None:
        """Record the newest complete checkpoint; drop older commands if there are very many."""
        self.kept = number
        is_late = len(self._commands) > self.most
        self._forgotten = number if is_late else self._forgotten
        self._commands = {
            each: command
            for each, command in self._commands.items()
            if command[1] in REQUESTS or each > self._forgotten
            if command[1] != KEEP or each > number
        }
        self.record_done(number)
        self.is_keeping = any(command[1] == KEEP for command in self._commands.values())
