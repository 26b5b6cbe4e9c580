"""What Ctrl-C does to a command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Take Ctrl-C and SIGTERM, which batch systems send, as a wish to end soon and tidily.

    Python's own way, an exception wherever the program just is, may hit a garbage collection,
    which drops it, or a lock, which stays locked. The second Ctrl-C goes that way.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set  # only the main thread may have handlers
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
    """Hold Ctrl-C back, forever in processes and threads that start inside.

    A terminal sends it to the workers too, whose tracebacks nobody wants: they end with the job.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # else it starts inside, and lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
