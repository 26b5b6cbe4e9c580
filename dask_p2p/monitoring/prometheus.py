"""The package's part of the page ``/metrics`` that Dask's workers and schedulers have.

Dask gives that page from one registry for each process. So one collector for workers and one for
schedulers are registered there, once, and tell the figures of the server that is being asked, as
Dask's own collectors do. Without the package prometheus_client there is no such page, and nothing
is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import dask

from dask_p2p.monitoring.counters import COUNTERS, GAUGES, Values

_PREFIXES = {"worker": "p2p", "scheduler": "p2p_cluster"}
registered: WeakKeyDictionary[Any, Callable[[], Values]] = WeakKeyDictionary()  # by server


def register(server: Any, kind: str, read: Callable[[], Values]) -> None:
    """Have the page of a server, a "worker" or "scheduler", tell the package's figures too.

    `read` returns the values of `COUNTERS` and `GAUGES`, or nothing; called on the event loop.
    """
    try:
        add_collector(kind)
    except ImportError:
        return
    registered[server] = read


def unregister(server: Any) -> None:
    """End what `register` began. Idempotent."""
    registered.pop(server, None)


@cache  # the registry takes it once
def add_collector(kind: str) -> None:
    """Have the pages of this process' workers, or schedulers, tell the package's figures."""
    from prometheus_client import REGISTRY

    REGISTRY.register(Collector(kind))


class Collector:
    """Makes the package's part of the page of workers, or of schedulers."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def describe(self) -> list[Any]:
        return []  # or the registry would collect

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        server = _asked(self._kind)
        values = registered[server]() if server in registered else {}
        if not values:
            return
        namespace = dask.config.get("distributed.dashboard.prometheus.namespace", "dask")
        prefix = "_".join(filter(None, [namespace, _PREFIXES[self._kind]]))
        for family in (*COUNTERS, *GAUGES):
            make = CounterMetricFamily if family in COUNTERS else GaugeMetricFamily
            labels = [family.label] if family.label else []
            metric = make(f"{prefix}_{family.name}", family.text, labels=labels)
            for label, value in values.get(family.name, {}).items():
                metric.add_metric([label] if labels else [], value)
            yield metric


def _asked(kind: str) -> Any:
    """Return the server of this process whose page is being made.

    None if none ever was, or if this release of Dask makes the page in another way: an error here
    would take Dask's own figures away too.
    """
    try:
        handler = import_module(f"distributed.http.{kind}.prometheus.core").PrometheusHandler
    except (ImportError, AttributeError):
        return None
    collectors = getattr(handler, "_collectors", None) or [getattr(handler, "_collector", None)]
    return getattr(collectors[0], "server", None)
