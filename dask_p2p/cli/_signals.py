"""Handling of Ctrl-C in commands."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Return a context in which Ctrl-C and SIGTERM set a flag, so that the command can clean up.

    The context's value returns the flag. Batch systems send SIGTERM. Python itself raises an
    exception at the current instruction: garbage collection may swallow it, and a lock may stay
    locked. Only the second Ctrl-C raises an exception.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set  # only the main thread may set signal handlers
        return

    def ask(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ctrl_c_later() -> Iterator[None]:
    """Return a context that defers Ctrl-C; processes and threads started inside never receive it.

    A terminal also sends Ctrl-C to the workers, which would print tracebacks. They end with the
    command anyway.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # started later, it would unblock Ctrl-C
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
