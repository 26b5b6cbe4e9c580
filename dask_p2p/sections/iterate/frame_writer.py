"""The thread of a rank that writes frames while steps go on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class FrameWriter:
    """Runs one function at a time in a thread; it starts with the first one."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Run a function in the thread. The previous one must have ended: see `wait`."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "p2p-frames")
        self._work = self._thread.submit(work)

    def check(self) -> None:
        """Raise the error of a function that has ended."""
        if self._work is not None and self._work.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the function has ended; raise its error."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def close(self) -> None:
        """End the thread, after its function."""
        if self._work is not None:
            wait([self._work])
        if self._thread is not None:
            self._thread.shutdown()
