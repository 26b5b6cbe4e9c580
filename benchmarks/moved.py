"""What moved between workers, by what they noted of it, and what had to move."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dask_p2p.geometry import box_size
from dask_p2p.monitoring.runs import Run, fetch_records
from dask_p2p.plans import Plan, block_plans
from dask_p2p.types import DaskArray

__all__ = ["collect", "least_bytes", "note"]


def least_bytes(client: Any, x: DaskArray, plan: Plan, y: DaskArray = None) -> int:
    """Count the bytes that have to move for the output of a plan, given where the blocks lie.

    Those are the elements that a block of the output reads, and that its worker does not hold.

    Parameters
    ----------
    client : distributed.Client
    x : dask.array.Array
        The input, persisted.
    plan : Plan
        How the output is assembled from it.
    y : dask.array.Array, optional
        The output, persisted. Without, each of its blocks may be made where the least has to move.
    """
    holders = client.who_has(x)
    readers = None if y is None else client.who_has(y)
    elements = 0
    for index, block in block_plans(plan):
        held: Counter[str] = Counter()
        for piece in block.pieces:
            size = box_size(piece.src)
            elements += size
            held.update(dict.fromkeys(holders[x.name, *block.sources[piece.source].block], size))
        makers = held if readers is None else readers[y.name, *index]
        elements -= max((held[worker] for worker in makers), default=0)
    return elements * int(x.dtype.itemsize)


def link_gbs(run: Run) -> list[float]:
    """Return GB (1e9 bytes) a second that came to each task that read from other workers."""
    return [
        sum(stage.nbytes for stage in record.stages) / (record.stop_s - record.start_s) / 1e9
        for record in run.made
        if record.stages and record.stop_s > record.start_s
    ]


def collect(client: Any, name: str, since_s: float = 0.0) -> Run | None:
    """Collect the records of the array with this name, as one run; None if there are none.

    The same array may have been computed before: `since_s` (seconds since the epoch) says from
    when on it is meant. Where its blocks are computed one by one, each is a run to `last_runs`.
    """
    found = client.sync(fetch_records, client)
    records = [record for record in found if record.name == name and record.start_s >= since_s]
    return Run(tuple(sorted(records, key=lambda record: record.start_s))) if records else None


def note(row: dict[str, Any], run: Run, since_s: float, until_s: float) -> None:
    """Note the parts of a run, by the clocks of client and workers, which are one on one host."""
    parts_s = {
        "before_s": run.start_s - since_s,
        "exchange_s": run.exchange_s,
        "span_s": run.wall_s,
        "tasks_s": sum(record.stop_s - record.start_s for record in run.made),
        "after_s": until_s - run.stop_s,
    }
    for part, time_s in parts_s.items():
        row.setdefault(part, []).append(time_s)
    row.setdefault("rates_gbs", []).extend(sorted(link_gbs(run))[:1])  # the slowest reader's
    row["moved_bytes"] = run.moved_bytes
    row["pairs"] = [
        {"reader": reader, "holder": holder, "transport": transport, "bytes": nbytes}
        for (reader, holder, transport), nbytes in sorted(run.pairs.items())
    ]
