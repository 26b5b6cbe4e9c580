"""Timed and checked runs of several ways to transpose, with the workers' records."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from statistics import median
from typing import Any

import dask
from distributed import wait

from benchmarks.moved import collect, least_bytes, note
from dask_p2p.cli.cluster import count_wrong, indexed_array
from dask_p2p.ops.rechunk import transpose
from dask_p2p.plans import Plan, redistribution, slab_chunks
from dask_p2p.plugins.registration import workers_of
from dask_p2p.types import DaskArray, DType, Kind

__all__ = [
    "EVEN",
    "Case",
    "Measured",
    "Row",
    "Way",
    "compare",
    "dask_rechunk",
    "no_op",
    "p2p_with",
    "place_blocks",
    "wait_for_blocks",
]

#: The measurements of one way with one array; `benchmarks/README.md` explains the fields.
Row = dict[str, Any]

#: Takes a Dask array and the axes, returns the lazy result.
Transpose = Callable[[Any, tuple[int, ...]], Any]

EVEN = "even slabs"

_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """An array to transpose; its elements encode their own index."""

    shape: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    axes: tuple[int, ...]
    dtype: DType  # a NumPy dtype
    kind: Kind = "numpy"  # type of its blocks, or "cupy"
    name: str = EVEN
    #: True if neighbouring blocks lie on different workers.
    scattered: bool = field(default=False, kw_only=True)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole array."""
        return prod(self.shape) * int(self.dtype.itemsize)

    def make(self) -> Any:
        """Return the lazy array."""
        return indexed_array(self.shape, self.chunks, self.dtype, self.kind)

    def plan(self, y: DaskArray) -> Plan:
        """Return the plan that assembles a result from the array."""
        return redistribution(self.chunks, self.axes, y.chunks)

    def settle(self, client: Any) -> float:
        """Wait for work that tasks leave queued; return the time of its end since the epoch.

        Return 0 without such work, as here.
        """
        return 0.0

    def count_wrong(self, y: DaskArray) -> int:
        """Count the elements of a result that are not where they belong."""
        return int(count_wrong(y, self.shape, self.axes, self.kind, self.dtype).compute())


#: The measurements of each array, one row for each way.
Measured = dict[Case, list[Row]]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to transpose, and its cluster."""

    transpose: Transpose  # a way without a cluster runs immediately, and returns its seconds
    apart: bool = False  # on its own array: the way may leave copies of blocks on other workers
    checked: bool = True  # its result is compared with the transpose
    required: bool = False  # its failure ends the measurement; other failures become rows
    protocol: str | None = None  # protocol of its cluster; None: the usual one


def place_blocks(client: Any, make: Callable[[], Any], scattered: bool = False) -> Any:
    """Persist a new array with equal numbers of blocks a worker: neighbours, or scattered.

    Parameters
    ----------
    client : distributed.Client
    make : callable
        Returns the lazy array, with the same keys each time.
    scattered : bool, optional
        Put each block on another worker than the previous one. Otherwise workers have neighbours in
        C order. Dask scatters blocks if it makes many and assigns each to any free worker.
    """
    addresses = sorted(workers_of(client))
    numblocks = make().numblocks
    workers, blocks = len(addresses), prod(numblocks)

    def place(key: tuple[Any, ...]) -> str:  # sent to the scheduler, with its closure
        number = 0
        for index, count in zip(key[1:], numblocks, strict=True):
            number = number * count + index
        # Dask passes keys of other layers too; their numbers may exceed the last block's.
        worker = number % workers if scattered else min(number * workers // blocks, workers - 1)
        return str(addresses[worker])

    with dask.annotate(workers=place, allow_other_workers=True):
        x = make()
    x = client.persist(x, optimize_graph=False)  # optimization drops the workers of blocks
    wait_for_blocks(x)
    return x


def p2p_with(changes: Mapping[str, Any]) -> Transpose:
    """Return this package's transpose to slabs with changed options."""

    def way(x: DaskArray, axes: tuple[int, ...]) -> Any:
        with dask.config.set(changes):
            return transpose(x, axes)

    return way


def dask_rechunk(method: str) -> Transpose:
    """Return Dask's own way to the same result, by this rechunk method."""

    def way(x: DaskArray, axes: tuple[int, ...]) -> Any:
        chunks = slab_chunks(x.chunks, axes)
        return x.transpose(axes).rechunk(chunks, method=method)

    return way


def no_op(x: DaskArray, axes: tuple[int, ...]) -> Any:
    """Return an empty layer: Dask's own time."""
    chunks = tuple((1,) * count for count in x.numblocks)
    return x.map_blocks(lambda block: block[(slice(1),) * block.ndim], meta=x._meta, chunks=chunks)


def compare(
    client: Any,
    ways: Mapping[str, Way],
    case: Case,
    repeats: int,
    progress: Callable[[], None] = lambda: None,
    *,
    anew: bool = False,
) -> list[Row]:
    """Time ways to transpose one array, in turn; some ways get an array of their own.

    Other load on the machine disturbs alternating ways equally.

    Parameters
    ----------
    client : distributed.Client
    ways : mapping of str to Way
    case : Case
    repeats : int
        Timed runs of each way after its first. The last result is checked.
    progress : callable, optional
        Called after each run.
    anew : bool, optional
        Make a new array for each run. Then all ways take turns, and the CPU time of all processes
        is recorded too.

    Returns
    -------
    list of dict
        A row for each way. A failed way has the reason in ``failed`` and no times.

    Raises
    ------
    Exception
        The error of a task of a required way.
    """
    together = {name: way for name, way in ways.items() if anew or not way.apart}
    groups = [together, *({name: way} for name, way in ways.items() if name not in together)]
    return [
        row
        for group in groups
        if group
        for row in _in_turn(client, group, case, repeats, progress, anew)
    ]


def _in_turn(
    client: Any,
    ways: Mapping[str, Way],
    case: Case,
    repeats: int,
    progress: Callable[[], None],
    anew: bool,
) -> list[Row]:
    x = place_blocks(client, case.make, case.scattered)
    measured: dict[str, Row] = {name: {} for name in ways}
    for number in range(repeats + 1):
        for name, way in ways.items():
            try:
                if "failed" not in measured[name]:
                    if anew:
                        x = None
                        time.sleep(_SETTLE_S)  # new blocks have the same keys: the old must go
                        x = place_blocks(client, case.make, case.scattered)
                    last = number == repeats
                    _run_once(client, measured[name], way, x, case, last=last, with_cpu=anew)
            except Exception as exc:
                if way.required:
                    raise
                measured[name] = {"failed": _short_reason(exc)}
            progress()
    array = {
        "case": case.name,
        "shape": list(case.shape),
        "axes": list(case.axes),
        "blocks": [len(lengths) for lengths in case.chunks],
        "size": case.shape[0],
        "dtype": str(case.dtype),
        "matrix_bytes": case.size_bytes,
    }
    return [{"way": name, **array, **_summary(row, case)} for name, row in measured.items()]


def _summary(row: Row, case: Case) -> Row:
    """Add the median, the bandwidth and the link's rate."""
    if "failed" in row:
        return row
    rates_gbs = row.pop("rates_gbs", None)
    median_s = median(row["times_s"])
    # Each byte of the array is read once and written once.
    bandwidth_gbs = 2 * case.size_bytes / median_s / 1e9
    link_gbs = median(rates_gbs) if rates_gbs else 0.0
    return {"median_s": median_s, "bandwidth_gbs": bandwidth_gbs, "link_gbs": link_gbs, **row}


def _short_reason(error: BaseException) -> str:
    """Return the first line of an error's root cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100]}" if lines else type(error).__name__


def _run_once(
    client: Any, row: Row, way: Way, x: DaskArray, case: Case, last: bool, with_cpu: bool
) -> None:
    """Run one way once, and record its measurements in the row."""
    cpu_s = _cpu_s(client) if with_cpu else 0.0
    since_s = time.time()
    y = way.transpose(x, case.axes)
    if isinstance(y, float):
        _add_time(row, y)
        return
    y = client.persist(y)
    wait_for_blocks(y)
    until_s = max(time.time(), case.settle(client))
    if not _add_time(row, until_s - since_s):
        if with_cpu:
            row.setdefault("cpu_s", []).append(_cpu_s(client) - cpu_s)
        if (run := collect(client, y.name, since_s)) is not None:
            note(row, run, since_s, until_s)
            plan = case.plan(y)
            row["least_bytes"] = least_bytes(client, x, plan, y)
            row["least_anywhere_bytes"] = least_bytes(client, x, plan)
    if last and way.checked:
        row["wrong"] = case.count_wrong(y)
    del y  # the next run must neither reuse this result nor share memory with it
    time.sleep(_SETTLE_S)


def _add_time(row: Row, time_s: float) -> bool:
    """Record the time of a run; return true for the first run."""
    if "first_s" not in row:
        row |= {"first_s": time_s, "times_s": [], "wrong": None}
        return True
    row["times_s"].append(time_s)
    return False


def _cpu_s(client: Any) -> float:
    """Return the CPU seconds of all processes of a cluster and its client so far."""

    def spent() -> tuple[int, float]:
        return os.getpid(), time.process_time()

    everywhere = [*client.run(spent).values(), client.run_on_scheduler(spent), spent()]
    return sum(dict(everywhere).values())  # client and scheduler may be one process


def wait_for_blocks(blocks: Any) -> None:
    """Wait for all blocks; raise the error of a failed one, unlike `distributed.wait`."""
    for future in wait(blocks).done:
        if future.status != "finished":
            future.result()
