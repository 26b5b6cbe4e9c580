"""The package's metrics on the page ``/metrics`` of Dask's workers and schedulers.

Dask makes this page from one registry per process. The package registers one collector for workers
and one for schedulers. Like Dask's own, they return the metrics of the server whose page is
requested. Without the package prometheus_client, Dask has no such page, and this module logs
the command that installs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import dask

from dask_p2p.errors import install_command
from dask_p2p.monitoring.counters import COUNTERS, GAUGES, Values

_PREFIXES = {"worker": "p2p", "scheduler": "p2p_cluster"}
registered: WeakKeyDictionary[Any, Callable[[], Values]] = WeakKeyDictionary()  # by server


def register(server: Any, kind: str, read: Callable[[], Values]) -> None:
    """Add the package's metrics to the page of a server of this kind: "worker" or "scheduler".

    `read` returns the values of `COUNTERS` and `GAUGES`, or an empty dict. It is called on the
    event loop.
    """
    try:
        add_collector(kind)
    except ImportError:
        command = install_command("metrics")
        logger = logging.getLogger(f"distributed.{kind}")  # Dask's logger for the server
        logger.info("dask_p2p: no metrics, which need prometheus_client. Run: %s", command)
        return
    registered[server] = read


def unregister(server: Any) -> None:
    """Remove the package's metrics from a server's page. Idempotent."""
    registered.pop(server, None)


@cache  # the registry accepts a collector once
def add_collector(kind: str) -> None:
    """Register a collector for the workers or schedulers of this process."""
    from prometheus_client import REGISTRY

    REGISTRY.register(Collector(kind))


class Collector:
    """A Prometheus collector of the package's metrics, for workers or for schedulers."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def describe(self) -> list[Any]:
        return []  # otherwise the registry would call `collect`

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
    """Return the server of this process whose page is being made, or None.

    Returns None also if this release of Dask makes the page in another way. An error would remove
    Dask's own metrics too.
    """
    try:
        handler = import_module(f"distributed.http.{kind}.prometheus.core").PrometheusHandler
    except (ImportError, AttributeError):
        return None
    collectors = getattr(handler, "_collectors", None) or [getattr(handler, "_collector", None)]
    return getattr(collectors[0], "server", None)
