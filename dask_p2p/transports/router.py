"""The routes from all other workers to this one, with their failures and probes."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any
from urllib.parse import urlsplit

from dask_p2p.errors import Obstacle, TransferError
from dask_p2p.transports.base import Transport
from dask_p2p.types import DType, Kind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """A holder of a block, and a transport to read the block from it."""

    holder: str
    transport: Transport

    def __str__(self) -> str:
        return f"{self.holder} by {self.transport.name}"


@dataclass(slots=True)
class _Proof:
    """The state of a route's probe. One thread probes while others wait."""

    is_given: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Router:
    """The routes from all other workers to this one, with their failures and probes."""

    def __init__(
        self,
        transports: Mapping[str, Transport],  # the worker's transports, by name
        warn: Callable[[str], None],  # sends a warning to the user; equal causes get equal texts
        address: str = "this worker",  # name of the worker in the log
        #: Callback for a holder, the transport that is given up for it, and the reason.
        on_fallback: Callable[[str, str, Obstacle], None] | None = None,
    ) -> None:
        self._address = address
        self.transports = transports
        self._warn = warn
        self._on_fallback = on_fallback
        #: Obstacles that ended the use of a transport for a holder.
        self.failures: dict[tuple[str, str], Obstacle] = {}  # by holder and transport
        self._warned: set[str] = set()  # texts of warnings sent so far
        self._lock = threading.Lock()
        #: Probes by holder, transport and kind.
        self.proofs: defaultdict[tuple[str, str, str], _Proof] = defaultdict(_Proof)

    def find_routes(
        self, holders: Iterable[str], kind: Kind, dtype: DType, order: tuple[str, ...]
    ) -> list[Route]:
        """Return the usable routes to a block, best first.

        `holders` and `order`, the names of transports, are sorted in the same way.
        """
        routes = []
        for holder in holders:
            all_ = [Route(holder, self.transports[name]) for name in order]
            possible_routes = [
                route for route in all_ if not route.transport.obstacle(holder, kind, dtype)
            ]
            # If all routes to a holder have failed before, all are tried again.
            candidates = [
                route for route in possible_routes if not self._is_broken(route)
            ] or possible_routes
            # Routes are probed up to the first that works: starting a transport may take long.
            while len(candidates) > 1 and not self._works(candidates[0], kind):
                candidates.pop(0)
            routes.extend(candidates)
        return routes

    def find_hosts(self, workers: Iterable[str]) -> dict[str, str]:
        """Return the host's name for each worker. Workers on one host get the same name.

        Hosts are identified by boot id if a transport has it, since a host may have several
        addresses. Otherwise they are identified by the workers' addresses.
        """
        transports = self.transports.values()
        boot_ids = {
            worker: next(filter(None, (route.boot_id(worker) for route in transports)), "")
            for worker in workers
        }
        names = {
            worker: urlsplit(worker).hostname or boot_id for worker, boot_id in boot_ids.items()
        }
        first: dict[str, str] = {}  # first name of a host, by boot id or name
        for worker, name in sorted(names.items()):
            first.setdefault(boot_ids[worker] or name, name)
        return {worker: first[boot_ids[worker] or name] for worker, name in names.items()}

    def _is_broken(self, route: Route) -> bool:
        return (route.holder, route.transport.name) in self.failures

    def _works(self, route: Route, kind: Kind) -> bool:
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
                    except TransferError as exc:
                        if exc.scope in ("block", "holder"):
                            return True  # a silent holder proves nothing about the route
                        self.record_failure(route, exc, last=False)
        return not self._is_broken(route)

    def record_failure(self, route: Route, error: Exception, last: bool) -> None:
        """Record a route's failure. The route is not used again, except if it was the last one.

        Warns the user once for each reason.
        """
        name = route.transport.name
        with self._lock:
            if last or (route.holder, name) in self.failures:
                return
            message = str(error)
            obstacle = getattr(error, "obstacle", None) or Obstacle("failed", message)
            self.failures[route.holder, name] = obstacle
            # Log text, not the error: a log may keep it, and an error keeps its frames alive.
            logger.warning(
                f"{self._address} reads from {route.holder} by another transport than {name}, "
                f"which failed: {message.rstrip('.')}. {obstacle.remedy}."
            )
            if self._on_fallback is not None:
                self._on_fallback(route.holder, name, obstacle)
            reason = getattr(error, "reason", str(error))
            text = f"dask_p2p: {name} fails, another transport is used instead: {reason}"
            if text in self._warned:
                return
            self._warned.add(text)
        self._warn(text)

    def list_failed(
        self, holder: str, used: str, order: tuple[str, ...]
    ) -> list[tuple[str, Obstacle]]:
        """Return the failed transports that precede the used one in `order`, with the reasons."""
        if not self.failures:
            return []
        better = takewhile(lambda name: name != used, order)
        failures = ((name, self.failures.get((holder, name))) for name in better)
        return [(name, failure) for name, failure in failures if failure is not None]

    def on_worker_left(self, holder: str) -> None:
        with self._lock:
            learnt: tuple[dict[Any, Any], ...] = self.failures, self.proofs
            for facts in learnt:
                for about in [about for about in facts if about[0] == holder]:
                    del facts[about]
        for transport in self.transports.values():
            transport.on_worker_left(holder)
