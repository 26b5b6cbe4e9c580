"""Other processes of this host: unique names, and detection of their ends."""

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
    """Return a unique name of this process, for all time."""
    return f"{os.getpid()}-{uuid4().hex}"


class Processes:
    """Other processes, watched by one thread until they end.

    The kernel reports the end of a process after it has closed the process's sockets and freed its
    GPU memory, except memory that others have mapped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._poll: select.epoll | None = None  # made for the first process
        self._names: dict[int, str] = {}  # by file descriptor
        # By name of a watched process: functions, and true if a function comes last.
        self._calls: dict[str, dict[OnEnd, bool]] = {}
        self._ended = set[str]()  # names; few processes of a host end

    def watch(self, name: str, pid: int, on_end: OnEnd | None = None, last: bool = False) -> None:
        """Watch a process, if the kernel allows it, and call a function once after its end.

        Another thread calls the functions of one process, one after another. A function that waits
        for the GPU comes `last`, in a thread of its own, because the GPU may wait until another
        function has returned.
        """
        with self._lock:
            if name not in self._ended and name not in self._calls:
                self._begin(name, pid)
            if on_end is not None and name in self._calls:
                self._calls[name][on_end] = last
            elif on_end is not None and name in self._ended:
                _call(name, [on_end])

    def forget(self, name: str, on_end: OnEnd) -> None:
        """Cancel a function of `watch`."""
        with self._lock:
            self._calls.get(name, {}).pop(on_end, None)

    def has_ended(self, name: str) -> bool:
        """Return true if a watched process has ended."""
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
            os.close(number)  # also ends the watch
        first, last = (
            [on_end for on_end in calls if calls[on_end] == is_last] for is_last in (0, 1)
        )
        _call(name, first, last)


def _call(name: str, first: Sequence[OnEnd], last: Sequence[OnEnd] = ()) -> None:
    def call() -> None:
        for on_end in first:
            try:
                on_end(name)
            except Exception:
                logger.exception("the end of process %s could not be handled", name)
        for on_end in last:
            _call(name, [on_end])

    threading.Thread(target=call, name="dask-p2p-process-ended", daemon=True).start()


#: All other processes whose memory this one may map.
PROCESSES = Processes()
