"""Signals that end a command: Ctrl-C, SIGTERM, and SIGHUP of a terminal that closes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Take Ctrl-C, SIGTERM of batch systems, and SIGHUP as a wish to end soon and tidily.

    Python's own way, an exception wherever the program just is, may hit a garbage collection,
    which drops it, or a lock, which stays locked. The second Ctrl-C goes that way. `nohup` starts
    programs with SIGHUP ignored, which stays so.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set  # only the main thread may have handlers
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
    """Hold Ctrl-C and SIGHUP back, forever in processes and threads that start inside.

    A terminal sends them to the workers too, which end with the job, and without tracebacks.
    """
    from multiprocessing import resource_tracker

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    # Before Ctrl-C is held back: it lets Ctrl-C through again, but ignores it.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
