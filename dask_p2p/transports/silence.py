"""How long other workers are waited for, and which of them are known not to answer.

All tasks of a worker share what is known of a silent holder: see "Failure" in docs/design.md.
"""

from __future__ import annotations

import threading
from time import perf_counter
from typing import NamedTuple

from dask_p2p.config import Options
from dask_p2p.errors import TransferError

#: How long to wait for a worker that is asked for the first time.
PROBE_TIMEOUT_S = 10.0
#: Transports keep their own deadlines. A region that is later than this by so much is given up.
EVENT_LOOP_GRACE_S = 10.0
#: How often a holder that answers is asked to publish a block that is gone again by then.
PUBLISH_REQUESTS = 3
#: Between two attempts at a task.
LONGEST_PAUSE_S = 2.0

_KEPT_S = 3600.0  # what is known of a holder that nobody needs any more


def is_given_up(options: Options, silent_s: float) -> bool:
    """Return whether a holder is given up that was found silent, and so long after once more."""
    return silent_s >= (options.attempts - 1) * options.request_timeout_s


class _Silence(NamedTuple):
    """What is known of a holder that does not answer; times by the performance counter."""

    error: type[TransferError]
    text: str
    first_s: float  # when it was found silent
    last_s: float  # when it was found silent again, by an attempt that began after the time before


class SilenceLog:
    """The holders that do not answer one worker, until they do. Any thread may use it.

    It takes attempts at tasks by their start: seconds of the performance counter.
    """

    def __init__(self) -> None:
        #: By holder and transport: a holder that cannot be reached (None) is so by each of them.
        self.known: dict[tuple[str, str | None], _Silence] = {}
        self._lock = threading.Lock()

    def note(
        self, holder: str, transport: str, error: TransferError, start_s: float, options: Options
    ) -> None:
        """Note how an attempt failed, if that was by a holder that does not answer."""
        if not error.is_silence:
            return
        key = holder, None if error.scope == "holder" else transport
        with self._lock:
            known, first_s = self.known.get(key), perf_counter()
            last_s = first_s
            if known is not None:
                if _need_not_ask(known, start_s, options):
                    return  # it has found nothing out
                if _is_remembered(known, start_s, options):
                    first_s = known.first_s
            self.known = {k: s for k, s in self.known.items() if last_s - s.last_s < _KEPT_S}
            self.known[key] = _Silence(type(error), str(error), first_s, last_s)

    def check(self, holder: str, transport: str, start_s: float, options: Options) -> None:
        """Raise the error that was noted if an attempt need not ask a holder: it is silent."""
        for known in self._of(holder, transport):
            if _need_not_ask(known, start_s, options):
                raise known.error(known.text)

    def is_older(self, holder: str, transport: str, start_s: float) -> bool:
        """Return whether what is known of a holder is older than an attempt."""
        return all(known.last_s < start_s for known in self._of(holder, transport))

    def _of(self, holder: str, transport: str) -> list[_Silence]:
        found = self.known.get((holder, None)), self.known.get((holder, transport))
        return [known for known in found if known is not None]

    def is_silent(self, holder: str, start_s: float, options: Options) -> bool:
        """Return whether a holder was lately found silent, so that another one is asked first."""
        known = self.known.get((holder, None))
        return known is not None and _is_remembered(known, start_s, options)

    def lasted_s(self, holder: str, transport: str) -> float:
        """Return for how long a holder has been known to be silent; 0 if it is not."""
        silences = self._of(holder, transport)
        return max((known.last_s - known.first_s for known in silences), default=0.0)

    def heard(self, holder: str, transport: str | None = None) -> None:
        """Note that something came from a holder; by default that it answers."""
        if self.known:
            with self._lock:
                self.known.pop((holder, transport), None)

    def on_worker_left(self, holder: str) -> None:
        """Drop what is known of a worker that has left."""
        with self._lock:
            self.known = {key: known for key, known in self.known.items() if key[0] != holder}


def _is_remembered(known: _Silence, start_s: float, options: Options) -> bool:
    """Return whether it was lately: after a longer while unasked, the silence begins anew."""
    return start_s - known.last_s <= options.request_timeout_s + LONGEST_PAUSE_S


def _need_not_ask(known: _Silence, start_s: float, options: Options) -> bool:
    """Return whether an attempt need not find out for itself that a holder is silent."""
    if start_s <= known.last_s:
        return True  # it had begun when that was found out
    if not is_given_up(options, known.last_s - known.first_s):
        return False
    return start_s - known.last_s <= LONGEST_PAUSE_S
