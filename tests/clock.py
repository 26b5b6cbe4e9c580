"""Clocks that tests advance, for code that waits: no test then depends on the machine's speed."""

import asyncio
import selectors
from functools import wraps

START_S = 1000.0  # as of a machine that has run for a while


class Clock:
    """Called as `time.monotonic` is; `now_s` is set by the test, or by `sleep`."""

    def __init__(self, now_s=START_S):
        self.now_s = now_s

    def __call__(self):
        return self.now_s

    def advance(self, by_s):
        self.now_s += by_s

    monotonic, sleep = __call__, advance  # so that it can stand for the module `time`


class Timers:
    """Makes timers as `threading.Timer` is one, which `advance` calls in this thread."""

    def __init__(self):
        self.clock = Clock()
        self._waiting = []

    def make(self, interval_s, function):
        return _Timer(self._waiting, self.clock() + interval_s, function)

    def advance(self, by_s):
        """Let time pass: timers whose time has come then are called, the earliest first."""
        until_s = self.clock() + by_s
        while due_timers := [timer for timer in self._waiting if timer.when_s <= until_s]:
            first = min(due_timers, key=lambda timer: timer.when_s)
            self.clock.now_s = first.when_s
            first.cancel()
            first.function()
        self.clock.now_s = until_s


class _Timer:
    daemon = False

    def __init__(self, waiting, when_s, function):
        self._waiting, self.when_s, self.function = waiting, when_s, function

    def start(self):
        self._waiting.append(self)

    def cancel(self):
        self._waiting.remove(self)


class _Selector(selectors.DefaultSelector):
    """Advances the clock where it would wait."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def select(self, timeout=None):
        if timeout is None:  # a thread may still call the loop
            return super().select()
        events = super().select(0)
        if not events:
            self._clock.advance(max(timeout, 0))
        return events


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: its clock goes to the next timer once all else is done.

    Not for code that waits for threads or processes.
    """

    def __init__(self):
        self.time = Clock()
        self.timers = []
        super().__init__(_Selector(self.time))

    def call_at(self, when, callback, *args, **kwargs):
        self.timers.append(super().call_at(when, callback, *args, **kwargs))
        return self.timers[-1]

    def has_timers(self):
        """Whether something is still to be called later."""
        return any(not timer.cancelled() and timer.when() > self.time() for timer in self.timers)


def run_clocked(main):
    """Run a coroutine on a loop that does not wait."""
    with asyncio.Runner(loop_factory=ClockedLoop) as runner:
        return runner.run(main)


def clocked(main):
    """Make a test of a coroutine, on a loop that does not wait; it has to leave nothing behind."""

    @wraps(main)
    def run(**fixtures):
        async def run_and_check():
            await main(**fixtures)
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        run_clocked(run_and_check())

    return run
