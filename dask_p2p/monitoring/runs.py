"""Runs: what each call of an operation moved, by which transports, in what time."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, overload

from dask_p2p.errors import InputError, P2PWarning
from dask_p2p.inputs import checked_client, checked_count
from dask_p2p.monitoring.records import RECORDS_OP, Record, overlap, unpacked
from dask_p2p.monitoring.tables import OF_SOME, cells, html_table, text_table
from dask_p2p.monitoring.trace import trace
from dask_p2p.types import AsynchronousClient, Client

# Of a run, in the order of a table's columns.
_FIGURES = (
    *("operation", "name", "shape", "dtype", "blocks", "axes", "moved_bytes", "least_bytes"),
    *("start_s", "exchange_s", "wall_s", "gbs", "transports", "attempts"),
    *("steps", "steps_per_s", "waited_share", "overlap"),
)


@dataclass(frozen=True)
class Run:
    """One call of an operation: an output array that was computed once, or a part of it.

    See `last_runs` for when one ends.

    Times are of the workers' clocks.

    Parameters
    ----------
    records : tuple of Record
        Of the attempts at its blocks, in the order in which they began. At least one.
    """

    records: tuple[Record, ...]

    @cached_property
    def made(self) -> tuple[Record, ...]:
        """The attempts that made a block: of one that was lost and made again, the last."""
        return tuple({record.key: record for record in self.records if record.is_made}.values())

    @cached_property
    def under_way(self) -> tuple[Record, ...]:
        """The attempts that had not ended when they were looked at; `last_runs` has none."""
        return tuple(record for record in self.records if record.wanted_bytes is not None)

    @property
    def name(self) -> str:
        """Of the output array."""
        return self.records[0].name

    @property
    def operation(self) -> str:
        """Prefix of the name, like ``p2p-transpose``, ``p2p-overlap`` or ``p2p-iterate``."""
        return self.records[0].operation

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output array."""
        return self.records[0].array_shape

    @property
    def dtype(self) -> str:
        """Of the output array; empty if no block was made."""
        return self.made[0].dtype if self.made else ""

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of the output array along each axis. Those of this run are `made`.

        Of `iterate` and `spmd`, members.
        """
        return self.records[0].blocks

    @property
    def axes(self) -> tuple[int, ...]:
        """Output axis ``i`` is input axis ``axes[i]``."""
        return self.records[0].axes

    @property
    def workers(self) -> tuple[str, ...]:
        """Addresses of those that took part as readers."""
        return tuple(sorted({record.worker for record in self.records}))

    @cached_property
    def pairs(self) -> dict[tuple[str, str, str], int]:
        """Bytes that are in place, by reader, holder and transport."""
        pairs: Counter[tuple[str, str, str]] = Counter()
        for record in self.made:
            for stage in record.stages:
                pairs[record.worker, stage.holder, stage.transport] += stage.nbytes
        return dict(pairs)

    @property
    def transports(self) -> dict[str, int]:
        """Pairs of reader and holder that used a transport, by its name."""
        return dict(Counter(transport for _, _, transport in self.pairs).most_common())

    @property
    def least_bytes(self) -> int:
        """Bytes that had to move, given where each block was made and where its inputs lay."""
        return sum(self.pairs.values())

    @property
    def moved_bytes(self) -> int:
        """Bytes that did move: `least_bytes`, and what had to be read again after a failure."""
        used = (stage.nbytes for r in self.records if r.is_made for stage in r.stages)
        return sum(used) + sum(record.wasted_bytes for record in self.records)

    @property
    def start_s(self) -> float:
        """When the first task started, in seconds since the epoch."""
        return self.records[0].start_s

    @property
    def stop_s(self) -> float:
        """When the last task ended, in seconds since the epoch."""
        return max(record.stop_s for record in self.records)

    @property
    def wall_s(self) -> float:
        """From the start of the first task to the end of the last one."""
        return self.stop_s - self.start_s

    @property
    def exchange_s(self) -> float:
        """Seconds that the longest task took."""
        return max(record.stop_s - record.start_s for record in self.made or self.records)

    @property
    def gbs(self) -> float:
        """GB (1e9 bytes) that moved a second, from the first start to the last end."""
        return self.moved_bytes / self.wall_s / 1e9 if self.wall_s > 0 else 0.0

    @property
    def attempts(self) -> int:
        """Attempts at its tasks. Without failures there is one for each block."""
        return len(self.records)

    @cached_property
    def latest(self) -> tuple[Record, ...]:
        """Of each member of `iterate` or `spmd` the latest attempt; none of other operations."""
        return tuple({r.key: r for r in self.records if r.attempt}.values())

    @property
    def steps(self) -> int:
        """Steps of `iterate`, or of a loop over `Context.steps`, that all members have done."""
        return min((record.step for record in self.latest), default=0)

    @property
    def steps_per_s(self) -> float:
        """Steps a second of the slowest member, in its latest attempt."""
        return min((record.steps_per_s for record in self.latest), default=0.0)

    @property
    def waited_share(self) -> float:
        """How much of its time the member that waited most stood still for others: 0 to 1."""
        return max((record.waited_share for record in self.latest), default=0.0)

    @property
    def waited_s(self) -> dict[tuple[str, str], float]:
        """Seconds that tasks stood still for others, by the worker that waited and the other."""
        waited_s: Counter[tuple[str, str]] = Counter()
        for record in self.records:
            for stage in record.stages:
                waited_s[record.worker, stage.holder] += stage.waited_s  # type: ignore[assignment]
        return dict(waited_s)

    @property
    def overlap(self) -> float:
        """Of `map_on_gpu`, how many of copies up, function and copies down went on at once."""
        return overlap(self.made)

    @property
    def failures(self) -> tuple[str, ...]:
        """Why attempts failed, each reason once."""
        return tuple(dict.fromkeys(record.error for record in self.records if record.error))

    @cached_property
    def fallbacks(self) -> dict[tuple[str, str, str], str]:
        """Why a better transport was not used, by reader, holder and transport."""
        return {
            (record.worker, fallback.holder, fallback.transport): fallback.reason
            for record in self.records
            for fallback in record.fallbacks
        }

    def summary(self) -> dict[str, Any]:
        """Return the figures by name, each a plain value; ``_bytes`` and ``_s`` are units."""
        return {
            **{name: getattr(self, name) for name in _FIGURES},
            "made": len(self.made),
            "fallbacks": len(self.fallbacks),
        }


class Runs(tuple[Run, ...]):
    """Runs, the newest first. A notebook shows them as a table."""

    __slots__ = ()

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`: a row for each run, as `Run.summary` names its columns.

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

    def to_trace(self, file: str | PathLike[str]) -> None:
        """Write the runs as Chrome trace events, which https://ui.perfetto.dev shows.

        Parameters
        ----------
        file : str or path
            Where to write the JSON text; what is there is replaced.

        Raises
        ------
        InputError
            If the file cannot be written.
        """
        text = trace(record for run in self for record in run.records)
        try:
            Path(file).write_text(text, "utf-8")
        except (OSError, TypeError, ValueError) as exc:
            raise InputError(f"expected a file that can be written, got {file!r}: {exc}") from exc

    def __repr__(self) -> str:
        return text_table(self._rows()) if self else "no runs"

    def _repr_html_(self) -> str:
        return html_table(self._rows()) if self else "<p>no runs</p>"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [cells(run) for run in self]
        shown = [name for name in rows[0] if name not in OF_SOME or any(r[name] for r in rows)]
        return [tuple(shown), *(tuple(row[name] for name in shown) for row in rows)]


def runs_of(records: Iterable[Record]) -> Runs:
    """Group records by array, and by the number of the run; the newest run comes first."""
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in sorted(records, key=lambda record: record.start_s):
        groups.setdefault((record.name, record.run), []).append(record)
    return Runs(Run(tuple(group)) for group in reversed(groups.values()))


@overload
def last_runs(client: Client | None = None, n: int = 10) -> Runs: ...


@overload
def last_runs(client: AsynchronousClient, n: int = 10) -> Awaitable[Runs]: ...


def last_runs(client: Any = None, n: int = 10) -> Any:
    """Tell of the last runs what they moved, by which transports, and in what time.

    A run is one call of `transpose`, `rechunk`, `map_overlap`, `iterate` or `spmd`, computed once,
    or a part of it. It begins when the scheduler sends the first task of the array to a worker, and
    ends when none is left to do. So an array that is computed again, wholly or as far as its blocks
    are gone, is another run. Waiting for other tasks does not end a run, nor does a worker that is
    lost while it goes on: blocks that are made again then count as attempts, and once as `made`.

    Workers keep what they noted of about their last thousand tasks, the scheduler of about ten
    thousand, as far as it was asked for it while their workers were there.

    Parameters
    ----------
    client : distributed.Client, optional
        By default the current one.
    n : int, optional
        How many runs, at most.

    Returns
    -------
    Runs or awaitable
        The newest first; something to await if the client is asynchronous. Empty for a cluster
        that lacks the plugins. Each `Run` has ``operation``, ``shape``, ``dtype``, ``blocks``,
        ``axes``, ``moved_bytes``, ``least_bytes``, ``exchange_s``, ``wall_s``, ``gbs``, ``pairs``,
        ``transports``, ``attempts``, ``failures`` and ``fallbacks``; of `iterate` and `spmd`
        ``steps``, ``steps_per_s``, ``waited_share`` and ``waited_s``. All together have
        ``to_pandas()`` and ``to_trace(file)``.

    Raises
    ------
    InputError
        If `n` is no positive number, or the client is closed.
    ValueError
        If there is no client.
    """
    number = checked_count("runs", n=n)
    client = checked_client(client)

    async def fetch() -> Runs:
        return runs_of(await fetch_records(client, number))

    return client.sync(fetch)


async def fetch_records(client: Any, n: int | None = None) -> list[Record]:
    """Return the records of a cluster's newest `n` runs, or of all that are kept.

    There are none where the scheduler lacks its plugin.
    """
    answer = await getattr(client.scheduler, RECORDS_OP)(n=n)
    if answer is None:  # Dask's answer to what it does not know
        return []
    if answer.get("status", "ok") != "ok":
        raise InputError(f"the scheduler refused to tell of {n} runs: {answer.get('message')}")
    if answer["silent"]:
        text = (
            f"no answer of {', '.join(sorted(answer['silent']))} in time: what these workers did "
            f"lately is missing. Ask again when they answer, or close them."
        )
        warnings.warn(text, P2PWarning, stacklevel=2)
    return unpacked(answer["records"])
