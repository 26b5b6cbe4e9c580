"""Timeouts for other workers, and a record of those that do not answer.

All tasks of a worker share the record of silent holders: see "Failure" in docs/design.md.
"""

from __future__ import annotations

import threading
from time import perf_counter
from typing import NamedTuple

from dask_p2p.config import Options
from dask_p2p.errors import TransferError

#: Timeout of the first request to a worker.
PROBE_TIMEOUT_S = 10.0
#: Number of requests to publish a block, if the holder withdraws it again each time.
PUBLISH_REQUESTS = 3
#: Longest pause between two attempts at a task.
LONGEST_PAUSE_S = 2.0

_KEPT_S = 3600.0  # maximum age of a record


def is_given_up(options: Options, silent_s: float) -> bool:
    """Return whether a holder that has been silent for this long counts as dead."""
    return silent_s >= (options.attempts - 1) * options.request_timeout_s


class _Silence(NamedTuple):
    """The record of a silent holder. Times are of the performance counter."""

    error: type[TransferError]
    text: str
    first_s: float  # first time that an attempt found the holder silent
    last_s: float  # last time, by an attempt that started after the time before


class SilenceLog:
    """The holders that currently do not answer a worker. Any thread may use the log.

    Attempts at tasks are identified by their start, in seconds of the performance counter.
    """

    def __init__(self) -> None:
        #: By holder and transport. The transport is None for an unreachable holder.
        self.known: dict[tuple[str, str | None], _Silence] = {}
        self._lock = threading.Lock()

    def record_failure(
        self, holder: str, transport: str, error: TransferError, start_s: float, options: Options
    ) -> None:
        """Record an attempt's error, if a silent holder caused it."""
        if not error.is_silence:
            return
        key = holder, None if error.scope == "holder" else transport
        with self._lock:
            known, first_s = self.known.get(key), perf_counter()
            last_s = first_s
            if known is not None:
                if _is_known_silent(known, start_s, options):
                    return  # the attempt did not ask the holder itself
                if _is_remembered(known, start_s, options):
                    first_s = known.first_s
            self.known = {k: s for k, s in self.known.items() if last_s - s.last_s < _KEPT_S}
            self.known[key] = _Silence(type(error), str(error), first_s, last_s)

    def check(self, holder: str, transport: str, start_s: float, options: Options) -> None:
        """Raise the recorded error if the holder is known to be silent for this attempt."""
        for known in self._of(holder, transport):
            if _is_known_silent(known, start_s, options):
                raise known.error(known.text)

    def is_older(self, holder: str, transport: str, start_s: float) -> bool:
        """Return whether all records of a holder are older than an attempt."""
        return all(known.last_s < start_s for known in self._of(holder, transport))

    def _of(self, holder: str, transport: str) -> list[_Silence]:
        found = self.known.get((holder, None)), self.known.get((holder, transport))
        return [known for known in found if known is not None]

    def is_silent(self, holder: str, start_s: float, options: Options) -> bool:
        """Return whether a holder was recently silent, so that other holders are preferred."""
        known = self.known.get((holder, None))
        return known is not None and _is_remembered(known, start_s, options)

    def lasted_s(self, holder: str, transport: str) -> float:
        """Return the time from a holder's first to its last record of silence; 0 without one."""
        silences = self._of(holder, transport)
        return max((known.last_s - known.first_s for known in silences), default=0.0)

    def record_answer(self, holder: str, transport: str | None = None) -> None:
        """Record data from a holder by a transport. Without a transport: record any answer."""
        if self.known:
            with self._lock:
                self.known.pop((holder, transport), None)

    def on_worker_left(self, holder: str) -> None:
        """Drop all records of a worker that has left."""
        with self._lock:
            self.known = {key: known for key, known in self.known.items() if key[0] != holder}


def _is_remembered(known: _Silence, start_s: float, options: Options) -> bool:
    """Return whether a silence is recent. An older one does not count: a new one starts."""
    return start_s - known.last_s <= options.request_timeout_s + LONGEST_PAUSE_S


def _is_known_silent(known: _Silence, start_s: float, options: Options) -> bool:
    """Return whether the holder counts as silent for an attempt, without a new request."""
    if start_s <= known.last_s:
        return True  # the attempt started before another one found the holder silent
    if not is_given_up(options, known.last_s - known.first_s):
        return False
    return start_s - known.last_s <= LONGEST_PAUSE_S
