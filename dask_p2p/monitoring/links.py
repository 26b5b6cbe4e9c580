"""Who read how much from whom, and how fast: a matrix of workers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

from dask.utils import format_bytes

from dask_p2p.monitoring.charts import Chart, as_columns, busiest, short_names
from dask_p2p.monitoring.records import Record, Stage

__all__ = ["links"]

_Pair = tuple[str, str]  # a reader and a holder

_REASONS = 3  # of fallbacks, that a cell tells


@dataclass
class _Link:
    """What one worker read from another, by one transport."""

    nbytes: int = 0
    timed_bytes: int = 0
    seconds: float = 0.0
    tasks: int = 0

    def add(self, stage: Stage) -> None:
        self.nbytes += stage.nbytes
        self.tasks += 1
        seconds = stage.wire_s if stage.wire_s is not None else stage.kernel_s
        if seconds > 0:
            self.timed_bytes += stage.nbytes
            self.seconds += seconds

    @property
    def gbs(self) -> float:
        return self.timed_bytes / self.seconds / 1e9 if self.seconds else nan


def links(records: Iterable[Record], workers: Iterable[str] = ()) -> Chart:
    """Return a matrix of workers: a cell for each pair of a reader and a holder.

    Parameters
    ----------
    records
        Of attempts, also of those under way.
    workers
        Addresses that are to be there also where they moved nothing.

    Returns
    -------
    Chart
        Columns ``cells``: ``reader`` and ``holder`` (short names), ``transport`` (that brought
        most), ``gbs`` (GB, 1e9 bytes, a second by it), ``share`` of the best link of the same
        transport (0 to 1; nan where nothing was timed), ``nbytes`` and ``tasks`` by all transports,
        ``text`` (bytes by each), ``fallback`` (empty, or which transports failed and why).
    """
    pairs: defaultdict[_Pair, defaultdict[str, _Link]] = defaultdict(lambda: defaultdict(_Link))
    failed: defaultdict[_Pair, dict[str, str]] = defaultdict(dict)  # reasons, by transport
    moved: Counter[str] = Counter(dict.fromkeys(workers, 0))
    for record in records:
        for stage in record.stages:
            pairs[record.worker, stage.holder][stage.transport].add(stage)
            moved[record.worker] += stage.nbytes
            moved[stage.holder] += stage.nbytes
        for holder, transport, reason in record.fallbacks:
            failed[record.worker, holder][transport] = reason
    best: defaultdict[str, float] = defaultdict(float)
    for by_transport in pairs.values():
        for transport, link in by_transport.items():
            best[transport] = max(best[transport], link.gbs)  # nan is never more
    shown, note = busiest(moved)
    note = note if pairs else ": nothing has moved yet"
    names = short_names(shown)
    cells = [
        (names[reader], names[holder], *_cell(pairs[reader, holder], failed[reader, holder], best))
        for reader in shown
        for holder in shown
        if (reader, holder) in pairs
    ]
    return Chart(f"Links{note}", [names[w] for w in shown], {"cells": as_columns(cells, _CELL)})


_CELL = ("reader", "holder", "transport", "gbs", "share", "nbytes", "tasks", "text", "fallback")


def _cell(
    by_transport: Mapping[str, _Link], failed: Mapping[str, str], best: Mapping[str, float]
) -> tuple[Any, ...]:
    """Return a cell but for its reader and holder."""
    parts = sorted(by_transport.items(), key=lambda item: -item[1].nbytes)
    transport, link = parts[0]
    share = link.gbs / best[transport] if best[transport] else nan
    nbytes = sum(part.nbytes for _, part in parts)
    tasks = sum(part.tasks for _, part in parts)
    text = ", ".join(f"{name} {format_bytes(part.nbytes)}" for name, part in parts)
    reasons = [
        reason if reason.startswith(f"{name}: ") else f"{name}: {reason}"
        for name, reason in failed.items()
    ]
    return transport, link.gbs, share, nbytes, tasks, text, "; ".join(reasons[:_REASONS])
