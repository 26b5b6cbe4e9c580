"""Threads that run when they are told to."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

from tests.support import BOUND_S

_actor: ContextVar[Actor | None] = ContextVar("actor", default=None)


def current():
    """The actor whose thread this is, or for whom this message is sent; None for the test."""
    return _actor.get()


class KilledError(BaseException):
    """Ends the threads of a worker that is killed; nothing in the package may stop it."""


class GaveUpError(Exception):
    """What may happen to a reader in the middle of its work: an error, a cancellation."""


#: Where threads halt: before they do this, but `leased` and `found`, which is when it is done.
PLACES = ("open", "wait", "look again", "is tended", "lock", "leased", "found", "export", "copy")


def halt(place, trouble=False):
    """Let others go on first; with `trouble` something may be raised here."""
    assert place in PLACES
    actor = current()
    if actor is not None:
        actor.halt(place, trouble)


class Actor:
    """A thread of a worker that runs when it is told to."""

    def __init__(self, worker, function, *args):
        self.worker, self.world = worker, worker.world
        self.done = False
        self.result = self.error = None
        self.leases = []
        self.running = False
        self.place = None  # where it halts
        self.asking = False  # waits for the answer to a message
        self.awaited = None  # tells whether what it waits for is there
        self.trouble = None  # to be raised at the next place for it
        self.ended = None  # a future that gets the result
        self._go = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self._thread.start()
        self.world.actors.append(self)

    def _run(self, function, args):
        _actor.set(self)
        self._go.acquire()
        try:
            if self.worker.dead:
                raise KilledError
            self.result = function(*args)
        except BaseException as exc:
            self.error = exc
            _strip(exc)
        del function, args
        self.done = True
        self._tell()

    def _tell(self):
        self.running = False
        self.world.loop.call_soon_threadsafe(self.world.loop.stop)

    def halt(self, place, trouble):
        if not self.worker.dead:
            self.place = place
            self._tell()
            self._go.acquire()
            self.place = None
        if self.worker.dead:
            raise KilledError
        if trouble and self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            raise trouble

    @property
    def ready(self):
        waits = self.asking or (self.awaited is not None and not self.awaited())
        return not (self.done or waits)

    @property
    def open_leases(self):
        return [lease for lease in self.leases if lease.is_open]

    def go_on(self):
        self.running = True
        self._go.release()
        self.world.settle()

    def join(self):
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()


def _strip(exc):
    """Let go of the frames in which an error was raised, which would keep blocks alive."""
    if exc is not None and exc.__traceback__ is not None:
        exc.__traceback__ = None
        _strip(exc.__cause__)
        _strip(exc.__context__)


class Loop(asyncio.SelectorEventLoop):
    """An event loop that runs when it is told to, in a time of its own."""

    now_s = 0.0

    def time(self):
        return self.now_s
