"""Which way a block comes: transports in order of preference, holders one after another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dask_p2p.transports.base import Transport

__all__ = ["BlockRef", "Links", "Way"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Stands in a task for a block that other workers hold."""

    key: Any  # Dask key
    holders: tuple[str, ...]  # addresses of the workers that hold it


@dataclass(frozen=True, slots=True)
class Way:
    """One way to bring a block here."""

    holder: str
    transport: Transport


class Links:
    """The ways between this worker and all others, and what was learnt about them.

    Parameters
    ----------
    transports
        All transports of this worker, by name.
    """

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        self.transports = transports
        self._broken: dict[tuple[str, str], str] = {}  # (holder, transport) -> why
        self._warned: set[str] = set()  # texts
        self._lock = threading.Lock()

    def ways(self, ref: BlockRef, kind: str, order: tuple[str, ...]) -> list[Way]:
        """Return the ways to bring a block of this kind here, best first."""
        ways = []
        for holder in ref.holders:
            open_ = [
                Way(holder, transport)
                for transport in (self.transports[name] for name in order)
                if transport.obstacle(holder, kind) is None
            ]
            # Where everything has failed before, everything is tried again.
            working = [way for way in open_ if (holder, way.transport.name) not in self._broken]
            ways.extend(working or open_)
        return ways

    def report_failure(self, way: Way, error: Exception, last: bool) -> str | None:
        """Note that a way failed; unless it was the last one, it is not tried again.

        Returns the text of a warning, the first time that there is this reason: the same text on
        all workers, so that a user sees it once.
        """
        name = way.transport.name
        with self._lock:
            if last or (way.holder, name) in self._broken:
                return None
            self._broken[way.holder, name] = str(error)
            logger.warning("%s from %s failed: %s", name, way.holder, error)
            reason = getattr(error, "reason", str(error))
            text = f"dask_p2p: {name} fails, another transport is used instead: {reason}"
            if text in self._warned:
                return None
            self._warned.add(text)
            return text

    def forget(self, holder: str) -> None:
        """Drop what was learnt about a worker that has left."""
        with self._lock:
            for pair in [pair for pair in self._broken if pair[0] == holder]:
                del self._broken[pair]
        for transport in self.transports.values():
            transport.forget(holder)
