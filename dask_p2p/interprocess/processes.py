"""Other processes of this host: a name for each, and the end of each."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias
from uuid import uuid4

logger = logging.getLogger(__name__)

#: Called with the name of a process that has ended.
OnEnd: TypeAlias = Callable[[str], object]


@cache
def own_name() -> str:
    """Return a name of this process that no other process has, before or after it."""
    return f"{os.getpid()}-{uuid4().hex}"


class Processes:
    """Other processes, watched by one thread until they end.

    The kernel reports the end of a process when all that the process had is closed: its sockets,
    and its memory on GPUs, except for memory that others have mapped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._poll: select.epoll | None = None  # made with the first process
        self._names: dict[int, str] = {}  # by file descriptor
        # By name, of those that are watched: functions, and whether each waits for the others.
        self._calls: dict[str, dict[OnEnd, bool]] = {}
        self._ended = set[str]()  # names; few processes of a host end

    def watch(self, name: str, pid: int, on_end: OnEnd | None = None, last: bool = False) -> None:
        """Watch a process, if the kernel allows it, and call a function once when it has ended.

        The functions for one process are called in another thread, one after the other. Those that
        are `last` may wait for a GPU, which waits for the process until the others have returned.
        """
        with self._lock:
            if name not in self._ended and name not in self._calls:
                self._begin(name, pid)
            if on_end is not None and name in self._calls:
                self._calls[name][on_end] = last
            elif on_end is not None and name in self._ended:
                _call(name, [on_end])

    def forget(self, name: str, on_end: OnEnd) -> None:
        """Do not call a function any more."""
        with self._lock:
            self._calls.get(name, {}).pop(on_end, None)

    def has_ended(self, name: str) -> bool:
        """Return whether a process that is watched has ended."""
        return name in self._ended

    def _begin(self, name: str, pid: int) -> None:
        try:
            number = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended.add(name)
            return
        except OSError as exc:  # an old container forbids the call
            logger.debug("process %s cannot be watched: %s", name, exc)
            return
        if self._poll is None:
            self._poll = select.epoll()
            thread = threading.Thread(target=self._run, name="dask-p2p-processes", daemon=True)
            thread.start()
        self._names[number], self._calls[name] = name, {}
        self._poll.register(number, select.EPOLLIN)

    def _run(self) -> None:
        assert self._poll is not None
        while True:
            for number, _ in self._poll.poll():
                self._end(number)

    def _end(self, number: int) -> None:
        with self._lock:
            name = self._names.pop(number)
            self._ended.add(name)
            calls = self._calls.pop(name)
            os.close(number)  # which ends the watch too
        _call(name, sorted(calls, key=calls.__getitem__))


def _call(name: str, functions: Sequence[OnEnd]) -> None:
    def call() -> None:
        for on_end in functions:
            try:
                on_end(name)
            except Exception:
                logger.exception("the end of process %s could not be handled", name)

    threading.Thread(target=call, name="dask-p2p-process-ended", daemon=True).start()


#: All other processes whose memory this one has mapped, or may map.
PROCESSES = Processes()
