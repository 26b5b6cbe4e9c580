"""Running a transpose and its rivals, timing them, and collecting what the workers noted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import dask
from dask.core import flatten

from dask_p2p.layout import box_size
from dask_p2p.ops.transpose import transpose
from dask_p2p.plan import slab_chunks, transpose_plan
from dask_p2p.registration import workers_of
from dask_p2p.task import PLUGIN_NAME

__all__ = [
    "Exchange",
    "Runs",
    "Way",
    "bandwidth_gbs",
    "collect",
    "compare",
    "dask_rechunk",
    "least_bytes",
    "measure",
    "measure_in_turn",
    "p2p_transpose",
    "p2p_transpose_in",
    "place_blocks",
]

#: A way to transpose: takes a Dask array and the axes, returns the lazy result.
Way = Callable[[Any, tuple[int, ...]], Any]

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
    least_bytes
        That had to move, because of where the scheduler put the result's blocks; None if that
        was not looked up.
    busy_s
        During which at least one of the tasks ran.
    start_s, stop_s
        When the first task started and the last one ended, since the epoch.
    before_s, after_s
        From the client's call to the first task's start, and from the last task's end until the
        client knew: with `span_s` all of a run's time. By the clocks of client and workers, which
        are one on one host; None if the client did not look.
    """

    moved_bytes: int
    pairs: dict[tuple[str, str, str], int]
    span_s: float
    tasks_s: list[float]
    link_gbs: list[float]
    least_bytes: int | None = None
    busy_s: float = 0.0
    start_s: float = 0.0
    stop_s: float = 0.0
    before_s: float | None = None
    after_s: float | None = None


@dataclass(slots=True)
class Runs:
    """Repeated runs of one way to transpose."""

    name: str
    first_s: float  # the first run, warm-up included
    times_s: list[float]  # the others: persist() to wait(), as the client sees it
    exchanges: list[Exchange] = field(default_factory=list)
    wrong: int | None = None  # elements, if the last result was checked
    failed: str | None = None  # why there are no times, in a line
    one_by_one: bool = False  # whether one block of the result was made after the other

    @property
    def median_s(self) -> float:
        """Median of the runs after the first; of the first if there is no other."""
        return median(self.times_s or [self.first_s])

    @property
    def link_gbs(self) -> float:
        """Median over the runs of the slowest reader's rate, GB/s; 0 if nothing was moved."""
        rates = [min(e.link_gbs) for e in self.exchanges if e.link_gbs]
        return median(rates) if rates else 0.0

    @property
    def busy_s(self) -> float:
        """Median over the runs of the time during which tasks ran; 0 if nothing was noted."""
        return median(e.busy_s for e in self.exchanges) if self.exchanges else 0.0


def bandwidth_gbs(size_bytes: int, time_s: float) -> float:
    """Effective bandwidth of a transpose: each byte of the array is read once and written once."""
    return 2 * size_bytes / time_s / 1e9


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
    workers = len(workers_of(client))
    for attempt in range(tries):
        x = client.persist(make())
        _wait_for(x)
        held = Counter(address for who in client.who_has(x).values() for address in who[:1])
        counts = [*held.values(), *[0] * (workers - len(held))]
        if max(counts) - min(counts) <= 1 or attempt == tries - 1:
            break
        # Not cancelled: word of that could come when the next array's keys, the same, are there.
        x = None
        time.sleep(_SETTLE_S)
    return x


def p2p_transpose(x: Any, axes: tuple[int, ...]) -> Any:
    """Return this package's transpose of `x`, as slabs."""
    return transpose(x, axes)


def p2p_transpose_in(mode: str) -> Way:
    """Return this package's way, in the mode "sync" or "async" whatever is configured."""

    def way(x: Any, axes: tuple[int, ...]) -> Any:
        with dask.config.set({"p2p.mode": mode}):
            return p2p_transpose(x, axes)

    return way


def dask_rechunk(method: str) -> Way:
    """Return Dask's own way to the same result, with a named rechunk method."""

    def way(x: Any, axes: tuple[int, ...]) -> Any:
        chunks = slab_chunks(x.chunks, axes)
        return x.transpose(axes).rechunk(chunks, method=method)

    return way


def compare(
    client: Any,
    ours: Mapping[str, Way],
    rivals: Mapping[str, Way],
    make: Callable[[], Any],
    axes: tuple[int, ...],
    repeats: int,
    check: Callable[[Any], int] | None = None,
    progress: Callable[[], None] = lambda: None,
    one_by_one: Collection[str] = (),
) -> list[Runs]:
    """Time our ways in turn, and then each rival on an array of its own.

    Parameters
    ----------
    client : distributed.Client
    ours, rivals : mapping of str to callable
        Ways, by name.
    make : callable
        Returns the lazy array to transpose; see `place_blocks`. A rival may leave copies of
        blocks on workers that lacked them, so each gets blocks that are placed anew.
    axes, repeats, check, progress, one_by_one
        See `measure_in_turn`.

    Returns
    -------
    list of Runs
        Of our ways, then of the rivals. A rival that fails says so in `Runs.failed`.

    Raises
    ------
    Exception
        Whatever a task of one of our ways raises.
    """
    measured: list[Runs] = []
    if ours:
        x = place_blocks(client, make)
        measured += measure_in_turn(client, ours, x, axes, repeats, check, progress, one_by_one)
        del x
    for name, way in rivals.items():
        x = place_blocks(client, make)
        try:
            measured.append(measure(client, name, way, x, axes, repeats, check, progress))
        except Exception as exc:
            measured.append(Runs(name, 0.0, [], failed=_short_reason(exc)))
        del x
    return measured


def _short_reason(error: BaseException) -> str:
    """Return the first line of what is at the bottom of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100]}" if lines else type(error).__name__


def least_bytes(client: Any, x: Any, y: Any, axes: tuple[int, ...]) -> int:
    """Count the bytes that had to move for `y`, given where the blocks of both arrays lie.

    Those are the elements which the worker of their block of `y` does not hold in a block of `x`.

    Parameters
    ----------
    client : distributed.Client
    x, y : dask.array.Array
        Persisted; `y` is the transpose of `x`.
    axes : tuple of int
        Axis ``i`` of `y` is axis ``axes[i]`` of `x`.
    """
    holders = client.who_has(x)
    readers = client.who_has(y)
    elements = 0
    for index, block in transpose_plan(x.chunks, axes, y.chunks).blocks():
        here = set(readers[y.name, *index])
        there = [set(holders[x.name, *source]) for source in block.sources]
        elements += sum(box_size(p.src) for p in block.pieces if not here & there[p.source])
    return elements * int(x.dtype.itemsize)


def measure(
    client: Any,
    name: str,
    way: Way,
    x: Any,
    axes: tuple[int, ...],
    repeats: int,
    check: Callable[[Any], int] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Runs:
    """Time one way to transpose a persisted array: a first run, then `repeats` more.

    See `measure_in_turn`.
    """
    return measure_in_turn(client, {name: way}, x, axes, repeats, check, progress)[0]


def measure_in_turn(
    client: Any,
    ways: Mapping[str, Way],
    x: Any,
    axes: tuple[int, ...],
    repeats: int,
    check: Callable[[Any], int] | None = None,
    progress: Callable[[], None] = lambda: None,
    one_by_one: Collection[str] = (),
) -> list[Runs]:
    """Time several ways to transpose a persisted array, in turn: first runs, then more.

    What else goes on on the machine then disturbs all of them alike.

    Parameters
    ----------
    client : distributed.Client
    ways : mapping of str to callable
        By name. Each takes `x` and `axes`, and returns the lazy result.
    x : dask.array.Array
        Persisted.
    axes : tuple of int
    repeats : int
        Timed runs of each way after its first.
    check : callable, optional
        Takes the last result of each way, returns how many of its elements are wrong.
    progress : callable, optional
        Called after each run.
    one_by_one : collection of str
        Names of ways of which one block is made after the other, so that there is one transfer
        at a time in the whole cluster.

    Raises
    ------
    Exception
        Whatever a task of a way raises.
    """
    measured = {name: Runs(name, 0.0, [], one_by_one=name in one_by_one) for name in ways}
    for run in range(repeats + 1):
        for name, way in ways.items():
            _run_once(client, measured[name], way, x, axes, check if run == repeats else None)
            progress()
    return list(measured.values())


def _run_once(
    client: Any,
    runs: Runs,
    way: Way,
    x: Any,
    axes: tuple[int, ...],
    check: Callable[[Any], int] | None,
) -> None:
    """Run one way once, and note it."""
    since_s = time.time()
    start_s = time.perf_counter()
    y = way(x, axes)
    made = _made_one_by_one(client, y) if runs.one_by_one else None
    made_s = time.perf_counter()
    y = client.persist(y)
    _wait_for(y)
    until_s = time.time()
    # Where all blocks were made before, persisting only gives `y` what `made` has kept.
    elapsed_s = (made_s if runs.one_by_one else time.perf_counter()) - start_s
    del made
    if not runs.first_s:
        runs.first_s = elapsed_s
    else:
        runs.times_s.append(elapsed_s)
        if (exchange := collect(client, y.name, since_s)) is not None:
            exchange = replace(
                exchange,
                least_bytes=least_bytes(client, x, y, axes),
                before_s=exchange.start_s - since_s,
                after_s=until_s - exchange.stop_s,
            )
            runs.exchanges.append(exchange)
    if check is not None:
        runs.wrong = check(y)
    del y  # the next run must neither find this one's result nor share memory with it
    time.sleep(_SETTLE_S)


def _made_one_by_one(client: Any, y: Any) -> list[Any]:
    """Make the blocks of `y` one after the other; return futures that keep them."""
    futures = []
    for key in flatten(y.__dask_keys__()):
        future = client.get(y.dask, key, sync=False)
        _wait_for(future)
        futures.append(future)
    return futures


def _wait_for(blocks: Any) -> None:
    """Wait until all blocks are there; `distributed.wait` alone is content with failed ones."""
    from distributed import wait

    for future in wait(blocks).done:
        if future.status != "finished":
            future.result()


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
    start_s, stop_s = min(t[1] for t in tasks), max(t[2] for t in tasks)
    return Exchange(
        moved_bytes=sum(pairs.values()),
        pairs=dict(pairs),
        span_s=stop_s - start_s,
        tasks_s=[t[2] - t[1] for t in tasks],
        link_gbs=rates,
        busy_s=_covered_s((t[1], t[2]) for t in tasks),
        start_s=start_s,
        stop_s=stop_s,
    )


def _covered_s(spans_s: Iterable[tuple[float, float]]) -> float:
    """Length of what these spans cover together.

    >>> _covered_s([(0.0, 2.0), (5.0, 6.0), (1.0, 3.0)])
    4.0
    """
    covered_s, end_s = 0.0, float("-inf")
    for start_s, stop_s in sorted(spans_s):
        covered_s += max(0.0, stop_s - max(start_s, end_s))
        end_s = max(end_s, stop_s)
    return covered_s
