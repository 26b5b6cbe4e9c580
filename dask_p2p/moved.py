"""What moved between workers, by what they noted of it, and what had to move."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from dask_p2p.layout import box_size
from dask_p2p.plans import Plan, block_plans
from dask_p2p.task import PLUGIN_NAME

__all__ = ["Exchange", "collect", "least_bytes"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the workers noted of one transpose."""

    pairs: dict[tuple[str, str, str], int]  # reader, holder, transport, to bytes
    tasks: list[tuple[float, float]]  # when each started and ended, since the epoch, s
    link_gbs: list[float]  # GB (1e9 bytes) a second that each reader received while its task ran


def least_bytes(client: Any, x: Any, plan: Plan, y: Any = None) -> int:
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


def collect(client: Any, name: str, since_s: float = 0.0) -> Exchange | None:
    """Collect what the workers noted of the array with this name; None if they did not.

    The same array may have been computed before: `since_s` (seconds since the epoch) says from
    when on it is meant.
    """

    def noted(dask_worker: Any) -> list[tuple[float, float, list[tuple[str, str, int]]]]:
        plugin = dask_worker.plugins.get(PLUGIN_NAME)
        return [
            (r.start_s, r.stop_s, [(s.holder, s.transport, s.nbytes) for s in r.stages])
            for r in (plugin.context.records if plugin else ())
            if r.key[0] == name and r.start_s >= since_s
        ]

    tasks = [(reader, *task) for reader, kept in client.run(noted).items() for task in kept]
    pairs: Counter[tuple[str, str, str]] = Counter()
    rates: list[float] = []
    for reader, start_s, stop_s, stages in tasks:
        for holder, transport, nbytes in stages:
            pairs[reader, holder, transport] += nbytes
        if stages:
            rates.append(sum(nbytes for _, _, nbytes in stages) / (stop_s - start_s) / 1e9)
    spans = [(start_s, stop_s) for _, start_s, stop_s, _ in tasks]
    return Exchange(dict(pairs), spans, rates) if tasks else None
