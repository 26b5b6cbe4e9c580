"""Which routes lead to a block: holders one after another, each by its transports, best first."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any
from urllib.parse import urlsplit

from dask_p2p.errors import BlockUnavailableError, Obstacle, TransferError
from dask_p2p.transports.base import Transport
from dask_p2p.transports.silence import SilenceLog
from dask_p2p.types import DType, Kind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """One route by which a block may come here."""

    holder: str
    transport: Transport

    def __str__(self) -> str:
        return f"{self.holder} by {self.transport.name}"


@dataclass(slots=True)
class _Proof:
    """Whether a route was seen to work; one thread tries it while others wait."""

    is_given: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Router:
    """The routes between this worker and all others, and what was learnt about them."""

    def __init__(
        self,
        transports: Mapping[str, Transport],  # all of this worker, by name
        warn: Callable[[str], None],  # the user, wherever they are; equal finds in equal words
        address: str = "this worker",  # for its log
        #: Told of a holder, and the transport that is given up for it, and why.
        on_fallback: Callable[[str, str, Obstacle], None] | None = None,
    ) -> None:
        self._address = address
        self.transports = transports
        self._warn = warn
        self._on_fallback = on_fallback
        self.failures: dict[tuple[str, str], Obstacle] = {}  # by holder and transport
        self.silences = SilenceLog()
        self._warned: set[str] = set()  # texts
        self._lock = threading.Lock()
        #: By holder, transport and kind.
        self.proofs: defaultdict[tuple[str, str, str], _Proof] = defaultdict(_Proof)

    def routes(
        self, holders: Iterable[str], kind: Kind, dtype: DType, order: tuple[str, ...]
    ) -> list[Route]:
        """Return the routes by which a block may come here, best first.

        So are the workers that hold it, and the names of transports in `order`.
        """
        routes = []
        for holder in holders:
            all_ = [Route(holder, self.transports[name]) for name in order]
            open_ = [route for route in all_ if not route.transport.obstacle(holder, kind, dtype)]
            # Where everything has failed before, everything is tried again.
            left = [route for route in open_ if not self._is_broken(route)] or open_
            # Only what will be used is proved: a transport may take long to start.
            while len(left) > 1 and not self._works(left[0], kind):
                left.pop(0)
            routes.extend(left)
        return routes

    def hosts(self, workers: Iterable[str]) -> dict[str, str]:
        """Return a name for the host of each of these workers, the same for those of one host.

        Their addresses tell it, unless a transport knows better: a host may have several addresses.
        """
        boot_ids = {worker: self._boot_id(worker) for worker in workers}
        names = {worker: urlsplit(worker).hostname or known for worker, known in boot_ids.items()}
        first: dict[str, str] = {}  # of the names of those with one boot id
        for worker, name in sorted(names.items()):
            first.setdefault(boot_ids[worker] or name, name)
        return {worker: first[boot_ids[worker] or name] for worker, name in names.items()}

    def _boot_id(self, worker: str) -> str:
        known = (transport.boot_id(worker) for transport in self.transports.values())
        return next((boot_id for boot_id in known if boot_id is not None), "")

    def _is_broken(self, route: Route) -> bool:
        return (route.holder, route.transport.name) in self.failures

    def _works(self, route: Route, kind: Kind) -> bool:
        """Return whether a route works: the first time by trying it."""
        about = (route.holder, route.transport.name, kind)
        if (proof := self.proofs.get(about)) is None:
            with self._lock:
                proof = self.proofs[about]
        if not proof.is_given:
            with proof.lock:
                if not proof.is_given and not self._is_broken(route):
                    try:
                        route.transport.probe(route.holder, kind)
                        proof.is_given = True
                    except BlockUnavailableError:
                        return True  # it does not answer: that tells nothing about the route
                    except TransferError as exc:
                        self.record_failure(route, exc, last=False)
        return not self._is_broken(route)

    def record_failure(self, route: Route, error: Exception, last: bool) -> None:
        """Note that a route failed; unless it was the last one, it is not tried again.

        The user is warned the first time that there is this reason.
        """
        name = route.transport.name
        with self._lock:
            if last or (route.holder, name) in self.failures:
                return
            message = str(error)
            obstacle = getattr(error, "obstacle", None) or Obstacle("failed", message)
            self.failures[route.holder, name] = obstacle
            # A log may keep what it is given, and the error keeps the frames that it passed.
            logger.warning(
                "%s reads from %s by another transport than %s, which failed: %s. %s.",
                self._address,
                route.holder,
                name,
                message.rstrip("."),
                obstacle.remedy,
            )
            if self._on_fallback is not None:
                self._on_fallback(route.holder, name, obstacle)
            reason = getattr(error, "reason", str(error))
            text = f"dask_p2p: {name} fails, another transport is used instead: {reason}"
            if text in self._warned:
                return
            self._warned.add(text)
        self._warn(text)

    def failure(self, holder: str, transport: str) -> Obstacle | None:
        """Return why a transport is no longer used for a holder; None if it did not fail."""
        return self.failures.get((holder, transport))

    def given_up(
        self, holder: str, used: str, order: tuple[str, ...]
    ) -> list[tuple[str, Obstacle]]:
        """Return the transports that come before the one that was used, and why they failed."""
        if not self.failures:
            return []
        better = takewhile(lambda name: name != used, order)
        failures = ((name, self.failure(holder, name)) for name in better)
        return [(name, failure) for name, failure in failures if failure is not None]

    def on_worker_left(self, holder: str) -> None:
        """Drop what was learnt about a worker that has left."""
        with self._lock:
            learnt: tuple[dict[Any, Any], ...] = self.failures, self.proofs
            for known in learnt:
                for about in [about for about in known if about[0] == holder]:
                    del known[about]
        self.silences.on_worker_left(holder)
        for transport in self.transports.values():
            transport.on_worker_left(holder)
