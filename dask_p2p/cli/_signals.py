"""Signals that end a command: Ctrl-C, SIGTERM, and SIGHUP of a terminal that closes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Return a context in which Ctrl-C, SIGTERM and SIGHUP set a flag: the command can clean up.

    The context's value returns the flag. Batch systems send SIGTERM, terminals that close SIGHUP.
    Python itself raises an exception at the current instruction: garbage collection may swallow it,
    and a lock may stay locked. Only the second Ctrl-C raises an exception. `nohup` starts programs
    with SIGHUP ignored; it stays ignored.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set  # only the main thread may set signal handlers
        return

    def ask(number: int, _: object) -> None:
        # A terminal that closes sends SIGHUP, and so does its shell: the second is no impatience.
        if asked.is_set() and number != signal.SIGHUP:
            raise KeyboardInterrupt
        asked.set()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ctrl_c_later() -> Iterator[None]:
    """Return a context that defers Ctrl-C and SIGHUP; processes started inside never receive them.

    A terminal also sends them to the workers, which would print tracebacks. Workers end with the
    command anyway. Threads that start inside do not receive them either.
    """
    from multiprocessing import resource_tracker

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    resource_tracker.ensure_running()  # started later, it would unblock Ctrl-C
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
