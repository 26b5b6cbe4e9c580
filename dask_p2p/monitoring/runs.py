"""Runs: bytes, transports and times of each computation of an operation."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any, overload

from dask.utils import format_bytes, format_time

from dask_p2p.errors import InputError, P2PWarning
from dask_p2p.inputs import checked_client, checked_count
from dask_p2p.monitoring.records import RECORDS_OP, TaskRecord, unpacked
from dask_p2p.types import AsynchronousClient, Client

# Fields of `Run.summary`, in the order of the columns.
_FIGURES = (
    *("operation", "name", "state", "shape", "dtype", "blocks"),
    *("moved_bytes", "least_bytes", "start_s", "longest_task_s", "wall_s", "gbs", "transports"),
    *("attempts", "steps", "all_steps", "steps_per_s", "waited_share"),
)


@dataclass(frozen=True)
class Run:
    """One computation of an operation's output array, in whole or in part.

    See `last_runs` for the start and the end of a run. Times are of the workers' clocks.

    Attributes
    ----------
    records : tuple of TaskRecord
        Records of the attempts at its blocks, sorted by start. At least one.
    """

    records: tuple[TaskRecord, ...]

    @cached_property
    def made(self) -> tuple[TaskRecord, ...]:
        """The successful attempts, one for each block. For a recomputed block, the last one."""
        return tuple({record.key: record for record in self.records if record.is_made}.values())

    @cached_property
    def under_way(self) -> tuple[TaskRecord, ...]:
        """The attempts that were still running."""
        return tuple(record for record in self.records if record.wanted_bytes is not None)

    @property
    def state(self) -> str:
        """State of the run: "running", "done", "failed" or "cancelled"."""
        if self.records[0].outcome:
            return self.records[0].outcome
        if self.under_way:
            return "running"
        failed = {record.key for record in self.records if record.error}
        return "failed" if failed - {record.key for record in self.made} else "done"

    @property
    def name(self) -> str:
        """Name of the output array."""
        return self.records[0].name

    @property
    def operation(self) -> str:
        """Prefix of the name, like ``p2p-transpose``, ``p2p-overlap`` or ``p2p-iterate``."""
        return self.records[0].operation

    @property
    def shape(self) -> tuple[float, ...] | None:
        """Shape of the output array, of several the first one; None if it is unknown."""
        return self.records[0].array_shape

    @property
    def dtype(self) -> str:
        """Dtype of the output array; empty if it is unknown because no block was made."""
        return next((record.dtype for record in self.records if record.dtype), "")

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of the output array's blocks along each axis. This run's blocks are in `made`.

        For `iterate` and `spmd`, number of ranks.
        """
        return self.records[0].blocks

    @cached_property
    def pairs(self) -> dict[tuple[str, str, str], int]:
        """Bytes read for the completed blocks, by reader, holder and transport."""
        pairs: Counter[tuple[str, str, str]] = Counter()
        for record in self.made:
            for stage in record.stages:
                pairs[record.worker, stage.holder, stage.transport] += stage.nbytes
        return dict(pairs)

    @property
    def transports(self) -> dict[str, int]:
        """Number of pairs of reader and holder that used a transport, by its name."""
        return dict(Counter(transport for _, _, transport in self.pairs).most_common())

    @property
    def least_bytes(self) -> int:
        """Bytes that had to move, given the workers of all blocks and of their inputs."""
        return sum(self.pairs.values())

    @property
    def moved_bytes(self) -> int:
        """Bytes that moved so far, for blocks that were not finished, too.

        More than `least_bytes` if failures caused bytes to be read again.
        """
        read = (stage.nbytes for record in self.records for stage in record.stages)
        return sum(read) + sum(record.wasted_bytes for record in self.records)

    @property
    def start_s(self) -> float:
        """Start of the first task, in seconds since the epoch."""
        return self.records[0].start_s

    @property
    def stop_s(self) -> float:
        """End of the last task, in seconds since the epoch."""
        return max(record.stop_s for record in self.records)

    @property
    def wall_s(self) -> float:
        """Seconds from the start of the first task to the end of the last one."""
        return self.stop_s - self.start_s

    @property
    def longest_task_s(self) -> float:
        """Seconds of the longest task."""
        return max(record.stop_s - record.start_s for record in self.made or self.records)

    @property
    def gbs(self) -> float:
        """GB (1e9 bytes) moved per second, from the first start to the last end."""
        return self.moved_bytes / self.wall_s / 1e9 if self.wall_s > 0 else 0.0

    @property
    def attempts(self) -> int:
        """Number of attempts at the tasks. Without failures, one for each block."""
        return len(self.records)

    @cached_property
    def latest(self) -> tuple[TaskRecord, ...]:
        """The latest attempt of each rank of `iterate` or `spmd`; empty for other operations."""
        return tuple({r.key: r for r in self.records if r.attempt}.values())

    @property
    def steps(self) -> int:
        """Steps that all ranks have finished, in `iterate` or in a loop over `Context.steps`."""
        return min((record.step for record in self.latest), default=0)

    @property
    def all_steps(self) -> int:
        """Number of steps that were asked for; 0 if unknown."""
        return max((record.steps for record in self.latest), default=0)

    @property
    def steps_per_s(self) -> float:
        """Steps per second of the slowest rank, in its latest attempt."""
        return min((record.steps_per_s for record in self.latest), default=0.0)

    @property
    def waited_share(self) -> float:
        """Largest fraction of a rank's time that it waited for others: 0 to 1."""
        return max((record.waited_share for record in self.latest), default=0.0)

    @property
    def failures(self) -> tuple[str, ...]:
        """Reasons of failed attempts, each once. An attempt that was cancelled has not failed."""
        failed = [record for record in self.records if record.error]
        if self.state == "cancelled":
            last = {record.key: record for record in self.records}
            failed = [record for record in failed if record is not last[record.key]]
        return tuple(dict.fromkeys(record.error for record in failed))

    @cached_property
    def fallbacks(self) -> dict[tuple[str, str, str], str]:
        """Reasons why a preferred transport was not used, by reader, holder and transport."""
        return {
            (record.worker, fallback.holder, fallback.transport): fallback.reason
            for record in self.records
            for fallback in record.fallbacks
        }

    def __repr__(self) -> str:
        return repr(RunTable([self]))

    def _repr_html_(self) -> str:
        return RunTable([self])._repr_html_()

    def summary(self) -> dict[str, Any]:
        """Return the figures by name, as plain values. ``_bytes`` and ``_s`` are units."""
        return {
            **{name: getattr(self, name) for name in _FIGURES},
            "made": len(self.made),
            "fallbacks": len(self.fallbacks),
            "is_section": bool(self.latest),
        }


class RunTable(tuple[Run, ...]):
    """A tuple of runs, the newest first. A notebook shows it as a table."""

    __slots__ = ()

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each run, and the columns of `Run.summary`.

        Raises
        ------
        InputError
            If pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise InputError(
                "expected the package pandas, which is not installed: pip install pandas"
            ) from None
        rows = [run.summary() for run in self]
        for row in rows:
            row["start"] = pd.Timestamp(row["start_s"], unit="s", tz="UTC")
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        return text_table(self._rows()) if self else "no runs"

    def _repr_html_(self) -> str:
        return html_table(self._rows()) if self else "<p>no runs</p>"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [cells(run) for run in self]
        shown = [name for name in rows[0] if any(row[name] for row in rows)]
        return [tuple(shown), *(tuple(row[name] for name in shown) for row in rows)]


def runs_of(records: Iterable[TaskRecord]) -> RunTable:
    """Return records grouped into runs, by array and number of the run, the newest run first."""
    groups: dict[tuple[str, int], list[TaskRecord]] = {}
    for record in sorted(records, key=lambda record: record.start_s):
        groups.setdefault((record.name, record.run), []).append(record)
    return RunTable(Run(tuple(group)) for group in reversed(groups.values()))


@overload
def last_runs(client: Client | None = None, n: int = 10) -> RunTable: ...


@overload
def last_runs(client: AsynchronousClient, n: int = 10) -> Awaitable[RunTable]: ...


def last_runs(client: Any = None, n: int = 10) -> Any:
    """Return the last runs, with the bytes they moved, their transports and their times.

    A run is one computation, in whole or in part, of the result of `transpose`, `rechunk`,
    `map_overlap`, `iterate` or `spmd`. It starts when the scheduler sends the first task of the
    array to a worker, and ends when no task of the array is left. Computing the array again, or
    only its lost blocks, is another run. Runs under way are in the list as well, with the records
    of their tasks so far. A run does not end while it waits for other tasks, or when
    a worker is lost. Blocks recomputed after a loss count as attempts, but only once in `made`.

    A worker keeps the records of about its last thousand tasks, and the scheduler those of about
    ten thousand. Records of a worker that has left are kept if the scheduler had requested them.

    Parameters
    ----------
    client : distributed.Client, optional
        The client. By default the current one.
    n : int, optional
        Maximum number of runs.

    Returns
    -------
    RunTable or awaitable
        The runs, the newest first; an awaitable if the client is asynchronous. Empty for a cluster
        without the plugins. Each `Run` has ``operation``, ``shape``, ``dtype``, ``blocks``,
        ``state``, ``moved_bytes``, ``least_bytes``, ``longest_task_s``, ``wall_s``,
        ``gbs``, ``pairs``, ``transports``, ``attempts``, ``failures`` and ``fallbacks``. A run of
        `iterate` or `spmd` also has ``steps``, ``steps_per_s`` and ``waited_share``. `RunTable` has
        ``to_pandas()``.

    Raises
    ------
    InputError
        If `n` is not a positive number, or the client is closed.
    ValueError
        If there is no client.

    See Also
    --------
    progress : The run under way.

    Examples
    --------
    >>> y = dask_p2p.transpose(x).persist()  # doctest: +SKIP
    >>> run = dask_p2p.last_runs()[0]  # doctest: +SKIP
    >>> run.operation, run.moved_bytes, run.wall_s  # doctest: +SKIP
    ('p2p-transpose', 96000000, 0.042)
    """
    number = checked_count("runs", n=n)
    client = checked_client(client)

    async def fetch() -> RunTable:
        return runs_of(await fetch_records(client, number))

    return client.sync(fetch)


async def fetch_records(client: Any, n: int | None = None) -> list[TaskRecord]:
    """Return the records of a cluster's newest `n` runs; with None, all records."""
    records, _ = await fetch_records_and_tasks(client, n)
    return records


async def fetch_records_and_tasks(
    client: Any, n: int | None
) -> tuple[list[TaskRecord], dict[str, tuple[int, int]]]:
    """Return the records of the newest `n` runs, and the total and unfinished tasks by array.

    Both are empty if the scheduler lacks the plugin.
    """
    reply = await getattr(client.scheduler, RECORDS_OP)(n=n)
    if reply is None:  # Dask's reply to an unknown operation
        return [], {}
    if reply.get("status", "ok") != "ok":
        raise InputError(f"the scheduler rejected the request for {n} runs: {reply.get('message')}")
    if reply["silent"]:
        text = (
            f"no answer from {', '.join(sorted(reply['silent']))} in time: the latest records of "
            f"these workers are missing. Call again when they answer, or close them."
        )
        warnings.warn(text, P2PWarning, stacklevel=2)
    return unpacked(reply["records"]), reply["tasks"]


def cells(run: Run) -> dict[str, str]:
    """Return the cells of a run's row, by column. A cell that does not apply is empty."""
    blocks, is_section = " x ".join(map(str, run.blocks)) or "1", bool(run.latest)
    transports = ", ".join(f"{name} {pairs}" for name, pairs in run.transports.items())
    waited = f"{run.waited_share:.0%}"
    if run.steps:  # of the rank that waited longest
        waited = waits_text(run.waited_share, max(r.waited_per_step_s for r in run.latest))
    attempt = max((record.attempt for record in run.latest), default=0)
    steps = (
        [f"{run.steps} of {run.all_steps}, mean {run.steps_per_s:.3g}/s"] if run.all_steps else []
    )
    if attempt > 1:
        steps.append(f"attempt {attempt}")
    return {
        "operation": run.operation,
        "state": "" if run.state == "done" else run.state,
        "shape": "" if run.shape is None else " x ".join(map(str, run.shape)) or "one value",
        "dtype": run.dtype,
        "blocks": f"{blocks} ranks" if is_section else f"{len(run.made)} of {blocks}",
        "moved": format_bytes(run.moved_bytes),
        "least": "" if is_section else format_bytes(run.least_bytes),
        "longest task": "" if is_section else format_time(run.longest_task_s),
        "wall": format_time(run.wall_s),
        "GB/s": "" if is_section else f"{run.gbs:.3g}",
        "transports": "" if is_section else transports or "-",
        "attempts": str(run.attempts),
        "fallbacks": str(len(run.fallbacks)),
        "steps": ", ".join(steps),
        "waited": waited if is_section else "",
    }


def waits_text(share: float, per_step_s: float) -> str:
    """Return the waits of a rank as text: the share of its time, and the time in a step."""
    return f"{share:.0%}, {format_time(per_step_s)} per step"


def pace_text(steps: int, total: int, now_per_s: float, mean_per_s: float) -> str:
    """Return the steps of a section as text, with its speeds, and the time left at the speed now.

    Examples
    --------
    >>> pace_text(250, 1000, 50.0, 62.5)
    '250 of 1000 steps, now 50/s, mean 62.5/s, 15.00 s left'
    """
    parts = [f"{steps} of {total} steps" if total else f"{steps} steps"]
    if now_per_s:
        parts.append(f"now {now_per_s:.3g}/s")
    if mean_per_s:
        parts.append(f"mean {mean_per_s:.3g}/s")
    if now_per_s and steps < total:
        parts.append(f"{format_time((total - steps) / now_per_s)} left")
    return ", ".join(parts)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows with aligned columns: the first one to the left, the others to the right.

    Examples
    --------
    >>> print(text_table([("name", "count"), ("a", "10")]))
    name  count
    a        10
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table in HTML. The first row is the head."""
    head, *body = ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows]
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    head = head.replace("td>", "th>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
