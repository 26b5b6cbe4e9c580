"""Who read how much from whom, and how fast: a matrix of workers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any

from dask.utils import format_bytes

from dask_p2p.monitoring.charts import Chart, as_columns, busiest, short_names
from dask_p2p.monitoring.records import Record, Stage

__all__ = ["links"]

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


@dataclass
class _Pair:
    by_transport: defaultdict[str, _Link] = field(default_factory=lambda: defaultdict(_Link))
    fallbacks: dict[str, str] = field(default_factory=dict)  # reasons, by transport that failed

    @property
    def nbytes(self) -> int:
        return sum(link.nbytes for link in self.by_transport.values())

    @property
    def main(self) -> tuple[str, _Link]:
        """The transport that brought most, and what it brought."""
        return max(self.by_transport.items(), key=lambda item: item[1].nbytes)


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
    pairs: defaultdict[tuple[str, str], _Pair] = defaultdict(_Pair)
    for record in records:
        for stage in record.stages:
            pairs[record.worker, stage.holder].by_transport[stage.transport].add(stage)
        for fallback in record.fallbacks:
            pairs[record.worker, fallback[0]].fallbacks[fallback[1]] = fallback[2]
    pairs = defaultdict(_Pair, {at: pair for at, pair in pairs.items() if pair.by_transport})
    best: defaultdict[str, float] = defaultdict(float)
    for pair in pairs.values():
        for transport, link in pair.by_transport.items():
            best[transport] = max(best[transport], link.gbs)  # nan is never more
    moved: Counter[str] = Counter(dict.fromkeys(workers, 0))
    for at, pair in pairs.items():
        for worker in at:
            moved[worker] += pair.nbytes
    shown, note = busiest(moved)
    note = note if pairs else ": nothing has moved yet"
    names = short_names(shown)
    cells = [
        _cell(pairs[reader, holder], names[reader], names[holder], best)
        for reader in shown
        for holder in shown
        if (reader, holder) in pairs
    ]
    return Chart(f"Links{note}", [names[w] for w in shown], {"cells": as_columns(cells, _CELL)})


_CELL = ("reader", "holder", "transport", "gbs", "share", "nbytes", "tasks", "text", "fallback")


def _cell(pair: _Pair, reader: str, holder: str, best: Mapping[str, float]) -> tuple[Any, ...]:
    transport, link = pair.main
    parts = sorted(pair.by_transport.items(), key=lambda item: -item[1].nbytes)
    text = ", ".join(f"{name} {format_bytes(part.nbytes)}" for name, part in parts)
    tasks = sum(part.tasks for _, part in parts)
    share = link.gbs / best[transport] if best[transport] else nan
    reasons = [
        reason if reason.startswith(f"{name}: ") else f"{name}: {reason}"
        for name, reason in pair.fallbacks.items()
    ]
    fallback = "; ".join(reasons[:_REASONS])
    return reader, holder, transport, link.gbs, share, pair.nbytes, tasks, text, fallback
