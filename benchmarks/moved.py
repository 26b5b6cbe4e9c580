"""Bytes that moved between workers, from their records, and the least that had to move."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dask_p2p.geometry import box_size
from dask_p2p.monitoring.runs import Run, fetch_records
from dask_p2p.plans import Plan, block_plans
from dask_p2p.types import DaskArray

__all__ = ["collect", "least_bytes", "note"]


def least_bytes(client: Any, x: DaskArray, plan: Plan, y: DaskArray = None) -> int:
    """Count the bytes that have to move for a plan's output, given the blocks' workers.

    They are the elements that an output block reads and its worker does not hold.

    Parameters
    ----------
    client : distributed.Client
    x : dask.array.Array
        The input, persisted.
    plan : Plan
        The plan that assembles the output.
    y : dask.array.Array, optional
        The output, persisted. If it is None, each block may be made on its best worker.
    """
    holders = client.who_has(x)
    readers = None if y is None else client.who_has(y)
    elements = 0
    for index, block in block_plans(plan):
        held_bytes: Counter[str] = Counter()
        for piece in block.pieces:
            size = box_size(piece.src)
            elements += size
            held_bytes.update(dict.fromkeys(holders[x.name, *block.sources[piece.source]], size))
        makers = held_bytes if readers is None else readers[y.name, *index]
        elements -= max((held_bytes[worker] for worker in makers), default=0)
    return elements * int(x.dtype.itemsize)


def link_gbs(run: Run) -> list[float]:
    """Return the rate, GB/s (1e9 bytes), of each task that read from other workers."""
    return [
        sum(stage.nbytes for stage in record.stages) / (record.stop_s - record.start_s) / 1e9
        for record in run.made
        if record.stages and record.stop_s > record.start_s
    ]


def collect(client: Any, name: str, since_s: float = 0.0) -> Run | None:
    """Return the records of the array with this name as one run; None without records.

    Records before `since_s` (seconds since the epoch) are left out: the same array may have been
    computed before. Blocks computed one by one are separate runs for `last_runs`, but not here.
    """
    found = client.sync(fetch_records, client)
    records = [record for record in found if record.name == name and record.start_s >= since_s]
    return Run(tuple(sorted(records, key=lambda record: record.start_s))) if records else None


def note(row: dict[str, Any], run: Run, since_s: float, until_s: float) -> None:
    """Add the parts of a run to a row; client and workers share one host's clock."""
    parts_s = {
        "before_s": run.start_s - since_s,
        "exchange_s": run.longest_task_s,
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
