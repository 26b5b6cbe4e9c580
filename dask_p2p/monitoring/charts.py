"""What charts have in common: their parts, which workers they show, what runs at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

__all__ = [
    "MOST_WORKERS",
    "Chart",
    "Columns",
    "as_columns",
    "busiest",
    "in_lanes",
    "short_names",
]

Columns = dict[str, list[Any]]

#: Workers that a chart has at most: those that move most.
MOST_WORKERS = 64


class Chart(NamedTuple):
    """What is drawn."""

    title: str
    workers: list[str]  # in their order, by short names
    columns: dict[str, Columns]  # by what they draw


def short_names(workers: Iterable[str]) -> dict[str, str]:
    """Return addresses as people read them: without the protocol, where all have the same.

    Examples
    --------
    >>> short_names(["tcp://10.0.0.1:40001", "tcp://10.0.0.2:40001"])
    {'tcp://10.0.0.1:40001': '10.0.0.1:40001', 'tcp://10.0.0.2:40001': '10.0.0.2:40001'}
    """
    workers = list(workers)
    protocols = {worker.partition("://")[0] for worker in workers if "://" in worker}
    if len(protocols) > 1:
        return {worker: worker for worker in workers}
    return {worker: worker.rpartition("://")[2] for worker in workers}


def busiest(moved: Counter[str]) -> tuple[list[str], str]:
    """Return the workers to show, in their order, and what a title has to say of it."""
    most = [worker for worker, _ in moved.most_common(MOST_WORKERS)]
    note = f": the busiest {len(most)} of {len(moved)} workers" if len(most) < len(moved) else ""
    return sorted(most, key=_in_parts), note


def _in_parts(name: str) -> list[Any]:
    """Split a name so that numbers in it are in their order."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


def as_columns(table: Sequence[tuple[Any, ...]], names: Sequence[str]) -> Columns:
    """Return a table, given by rows, by columns of these names."""
    turned = zip(*table, strict=True) if table else [()] * len(names)
    return {name: list(column) for name, column in zip(names, turned, strict=True)}


class _Timed(Protocol):
    @property
    def start_s(self) -> float: ...
    @property
    def stop_s(self) -> float: ...


_T = TypeVar("_T", bound=_Timed)


def in_lanes(timed: Iterable[_T]) -> list[list[_T]]:
    """Return records, or other things with a start and a stop, in lists without an overlap.

    Each list is in the order of time, and there are as few of them as possible.
    """
    lanes: list[list[_T]] = []
    for one in sorted(timed, key=lambda one: (one.start_s, one.stop_s)):
        lane = next((lane for lane in lanes if lane[-1].stop_s <= one.start_s), None)
        if lane is None:
            lanes.append([one])
        else:
            lane.append(one)
    return lanes
