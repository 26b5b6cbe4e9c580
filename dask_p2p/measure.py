"""Running a transpose and its rivals, timing them, and collecting what the workers noted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dask_p2p.plan import slab_chunks
from dask_p2p.task import PLUGIN_NAME
from dask_p2p.transpose import transpose

__all__ = [
    "Exchange",
    "Runs",
    "collect",
    "dask_rechunk",
    "measure",
    "p2p_transpose",
    "place_blocks",
]

_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the workers noted of one transpose.

    Attributes
    ----------
    moved_bytes
        That came from other workers, in all.
    pairs
        ``(reader, holder, transport)`` to bytes.
    span_s
        From the first task's start to the last one's end.
    tasks_s
        Duration of each task.
    link_gbs
        GB (1e9 bytes) per second that each reader received while its task ran.
    """

    moved_bytes: int
    pairs: dict[tuple[str, str, str], int]
    span_s: float
    tasks_s: list[float]
    link_gbs: list[float]


@dataclass(slots=True)
class Runs:
    """Repeated runs of one way to transpose."""

    name: str
    first_s: float  # the first run, warm-up included
    times_s: list[float]  # the others: persist() to wait(), as the client sees it
    exchanges: list[Exchange] = field(default_factory=list)
    wrong: int | None = None  # elements, if the last result was checked

    @property
    def median_s(self) -> float:
        """Median of the runs after the first."""
        return median(self.times_s)

    @property
    def link_gbs(self) -> float:
        """Median over the runs of the slowest reader's rate, GB/s; 0 if nothing was moved."""
        rates = [min(e.link_gbs) for e in self.exchanges if e.link_gbs]
        return median(rates) if rates else 0.0


def place_blocks(client: Any, make: Callable[[], Any], tries: int = 5) -> Any:
    """Persist a new array with its blocks spread evenly over the workers.

    Where they fall depends on timing, and what a benchmark measures depends on where they fall:
    an uneven placing is thrown away and tried again.

    Parameters
    ----------
    client : distributed.Client
    make : callable
        Returns the lazy array, with the same keys each time.
    tries : int
        After so many the array is taken as it is.
    """
    from distributed import wait

    workers = len(client.scheduler_info(n_workers=-1)["workers"])
    for _ in range(tries):
        x = client.persist(make())
        wait(x)
        held = Counter(address for who in client.who_has(x).values() for address in who[:1])
        counts = [*held.values(), *[0] * (workers - len(held))]
        if max(counts) - min(counts) <= 1:
            break
        client.cancel(x)
    return x


def p2p_transpose(x: Any, axes: tuple[int, ...]) -> Any:
    """Return this package's transpose of `x`, as slabs."""
    return transpose(x, axes)


def dask_rechunk(method: str) -> Callable[[Any, tuple[int, ...]], Any]:
    """Return Dask's own way to the same result, with a named rechunk method."""

    def way(x: Any, axes: tuple[int, ...]) -> Any:
        chunks = slab_chunks(x.chunks, axes)
        return x.transpose(axes).rechunk(chunks, method=method)

    return way


def measure(
    client: Any,
    name: str,
    way: Callable[[Any, tuple[int, ...]], Any],
    x: Any,
    axes: tuple[int, ...],
    repeats: int,
    check: Callable[[Any], int] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Runs:
    """Time one way to transpose a persisted array: a first run, then `repeats` more.

    Parameters
    ----------
    client : distributed.Client
    name : str
        Of the way, for the report.
    way : callable
        Takes `x` and `axes`, returns the lazy result.
    x : dask.array.Array
        Persisted.
    axes : tuple of int
    repeats : int
        Timed runs after the first.
    check : callable, optional
        Takes the last result, returns how many of its elements are wrong.
    progress : callable, optional
        Called after each run.
    """
    from distributed import wait

    times_s: list[float] = []
    runs = Runs(name, 0.0, times_s)
    for run in range(repeats + 1):
        since_s = time.time()
        start_s = time.perf_counter()
        y = client.persist(way(x, axes))
        wait(y)
        elapsed_s = time.perf_counter() - start_s
        if run == 0:
            runs.first_s = elapsed_s
        else:
            times_s.append(elapsed_s)
            if (exchange := collect(client, y.name, since_s)) is not None:
                runs.exchanges.append(exchange)
        if run == repeats and check is not None:
            runs.wrong = check(y)
        del y  # the next run must neither find this one's result nor share memory with it
        time.sleep(_SETTLE_S)
        progress()
    return runs


def collect(client: Any, name: str, since_s: float = 0.0) -> Exchange | None:
    """Collect what the workers noted of the array with this name; None if they did not.

    The same array may have been computed before: `since_s` (seconds since the epoch) says from
    when on it is meant.
    """

    def noted(dask_worker: Any) -> list[tuple[float, float, list[tuple[str, str, int]]]]:
        plugin = dask_worker.plugins.get(PLUGIN_NAME)
        return [
            (r.start_s, r.stop_s, [(s.holder, s.transport, s.nbytes) for s in r.stages])
            for r in (plugin.runtime.records if plugin else ())
            if r.key[0] == name and r.start_s >= since_s
        ]

    tasks = [(reader, *task) for reader, kept in client.run(noted).items() for task in kept]
    if not tasks:
        return None
    pairs: Counter[tuple[str, str, str]] = Counter()
    for reader, _, _, stages in tasks:
        for holder, transport, nbytes in stages:
            pairs[reader, holder, transport] += nbytes
    rates = [
        sum(nbytes for _, _, nbytes in stages) / (stop_s - start_s) / 1e9
        for _, start_s, stop_s, stages in tasks
        if stages
    ]
    return Exchange(
        moved_bytes=sum(pairs.values()),
        pairs=dict(pairs),
        span_s=max(t[2] for t in tasks) - min(t[1] for t in tasks),
        tasks_s=[t[2] - t[1] for t in tasks],
        link_gbs=rates,
    )
